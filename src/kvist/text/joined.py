"""Keeps marks out of shown text that only the dropping of other marks would form, as in `<thi</think>nk>`.

Owns one rule: shown text never contains a mark. Must not know what marks mean or where the text goes.
Linear in the text, and independent of how it is cut into pieces. Source: bug case PAR-03.
"""

from __future__ import annotations

import re

from kvist.text.marks import BAR, CLOSE_TAG, DSML, END_THINK, EOS, OPEN_TAG, THINK

_MARKS = (THINK, END_THINK, EOS, OPEN_TAG, CLOSE_TAG, DSML)  # those that end in another stand before it
_LONGEST = max(map(len, _MARKS))
_BEGINNINGS = frozenset(mark[:length] for mark in _MARKS for length in range(1, len(mark)))
_MAY_BEGIN_MARK = re.compile(f"[<{BAR}]")


class JoinedMarks:
    """Takes the text of one field in order and gives it back without any mark; what may become part of one is held.

    The text is a stack of characters: a mark at its top is taken off as soon as it is complete, so what stood before it
    can join what comes after. A character can still go only while everything from it to the top is a row of beginnings
    of marks (each may be completed once what stands above it has gone). Only such a row is held; it is as long as the
    reply writes it, in ordinary text a few characters.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._row: list[int] = [0]  # for each height of the stack: where the longest row of beginnings below it starts
        self._shown = 0  # characters at the bottom of `_held` that were given out already

    def feed(self, text: str) -> str:
        """Takes more text and returns what can be shown."""
        shown: list[str] = []
        at = 0
        while at < len(text):
            if not self._held:
                found = _MAY_BEGIN_MARK.search(text, at)
                start = found.start() if found else len(text)
                shown.append(text[at:start])
                at = start
            if at < len(text):
                self._push(text[at])
                at += 1
                shown.append(self._release(self._row[-1]))
        return "".join(shown)

    def finish(self) -> str:
        """The field ends here: returns what was held, without half marks that hold a bar at its end. Reusable afterwards."""
        while (length := self._half_mark()) and len(self._held) - length >= self._shown:
            del self._held[-length:]
        return self._release(len(self._held))

    def _push(self, character: str) -> None:
        self._held.append(character)
        top = "".join(self._held[-_LONGEST:])
        mark = next((mark for mark in _MARKS if top.endswith(mark)), None)
        if mark is not None:
            del self._held[-len(mark) :]
            del self._row[1 - len(mark) :]
            return
        height = len(self._held)
        starts = [self._row[height - n] for n in range(1, len(top) + 1) if top[-n] in "<" + BAR and top[-n:] in _BEGINNINGS]
        self._row.append(min(starts, default=height))

    def _release(self, until: int) -> str:
        text = "".join(self._held[self._shown : until])
        self._shown = max(self._shown, until)
        if self._shown >= len(self._held):
            self._held, self._row, self._shown = [], [0], 0
        return text

    def _half_mark(self) -> int:
        """Length of the longest half mark with a bar that the text ends with; 0 if there is none. A lone bar is text."""
        top = "".join(self._held[-_LONGEST:])
        return next((n for n in range(len(top), 1, -1) if BAR in top[-n:] and top[-n:] in _BEGINNINGS), 0)
