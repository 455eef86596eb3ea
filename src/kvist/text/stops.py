"""Stop strings over streamed text: where a reply must end, and how much of it can be shown before that is known.

Owns matching only; which text is searched (content, reasoning, both) is the caller's choice. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Pattern:
    """One stop string and how many of its characters the text so far ends with.

    The automaton of Knuth, Morris and Pratt, SIAM Journal on Computing 6(2), 1977.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # longest proper prefix that is also a suffix of text[:i + 1]
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._fallback[length - 1]
            length += text[at] == text[length]
            self._fallback[at] = length

    def step(self, character: str) -> bool:
        """Reads one character; true if it completes the stop string."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)


class StopMatcher:
    """Finds the leftmost stop string in a text that arrives in pieces; text that may belong to one is held back.

    Of two stop strings that begin at the same place the shorter wins. A character costs time for the stop strings that
    are begun or begin with it, not for the others. Released text never contains any part of the match. One per reply.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        self._starts: dict[str, list[_Pattern]] = {}  # by first character
        for stop in dict.fromkeys(stops):
            if _not_empty(stop):
                self._starts.setdefault(stop[0], []).append(_Pattern(stop))
        self._going: list[_Pattern] = []  # begun, not complete
        self._held = ""
        self._start = 0  # position in the whole text of the first held character
        self._position = 0
        self._found: tuple[int, str] | None = None
        self._over = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once that is certain."""
        return self._found[1] if self._over and self._found else None

    def feed(self, text: str) -> str:
        """Takes the next piece and returns what can be shown. Once `matched` is set, further text is ignored."""
        if self._over:
            return ""
        if not self._starts:
            return text
        self._held += text
        self._over = any(self._ends_at(character) for character in text)
        return self._release(self._certain())

    def finish(self) -> str:
        """The text has ended: returns what was held, up to a match if there is one."""
        if self._over:
            return ""
        self._over = True
        return self._release(self._found[0] if self._found else self._position)

    def _ends_at(self, character: str) -> bool:
        """Reads one character; true if the leftmost match is now certain."""
        self._position += 1
        fresh = [pattern for pattern in self._starts.get(character, ()) if not pattern.matched]
        going, self._going = self._going + fresh, []
        for pattern in going:
            if pattern.step(character):
                candidate = (self._position - len(pattern.text), pattern.text)
                if self._found is None or _rank(candidate) < _rank(self._found):
                    self._found = candidate
            elif pattern.matched:
                self._going.append(pattern)
        # A later completion may still win if it began further left.
        return self._found is not None and self._certain() == self._found[0]

    def _certain(self) -> int:
        """Position before which no match can begin any more."""
        starts = [self._position - pattern.matched for pattern in self._going]
        return min([*starts, self._position if self._found is None else self._found[0]])

    def _release(self, until: int) -> str:
        count = until - self._start
        text, self._held = self._held[:count], self._held[count:]
        self._start = until
        return text


def _rank(found: tuple[int, str]) -> tuple[int, int]:
    return found[0], len(found[1])


def _not_empty(stop: str) -> bool:
    if not stop:
        raise ValueError("a stop string is empty: it would end every reply at once; leave it out or give at least one character")
    return True
