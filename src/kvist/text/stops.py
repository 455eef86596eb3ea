"""Stop strings over streamed text: text comes out as soon as no stop string can begin in it.

Owns `StopMatcher`. The result is the text before the leftmost match, the same for every way of cutting the stream.
Must not know tokens.
"""

from __future__ import annotations


class StopMatcher:
    """Feed text; `matched` holds the stop string once one is complete, and nothing comes out after it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self.stops = stops
        self.matched: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of all text so far that is now certain to stand before any stop string."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        wait = self._first_open()
        if found:
            at, _, stop = min(found)
            # An earlier start that is still open could become the leftmost match: wait for it.
            if wait is None or wait >= at:
                out, self._held, self.matched = self._held[:at], "", stop
                return out
        cut = len(self._held) if wait is None else wait
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """The held text when the stream ends; a complete match inside it still stops there."""
        if self.matched is not None:
            return ""
        found = [(at, -len(stop), stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        out, self._held = self._held, ""
        if found:
            at, _, self.matched = min(found)
            return out[:at]
        return out

    def _first_open(self) -> int | None:
        """Where the earliest possible, not yet complete match starts."""
        longest = max((len(stop) for stop in self.stops), default=0)
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            rest = self._held[at:]
            if any(stop.startswith(rest) and len(stop) > len(rest) for stop in self.stops):
                return at
        return None
