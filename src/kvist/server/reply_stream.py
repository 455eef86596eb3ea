"""A reply's text as it comes, to what a client is shown: reasoning, content and tool calls, cut at stop strings.

Owns the order of parsing and stopping: stop strings are looked for in content only, never in reasoning or arguments. Pure; how
the text is cut into pieces never changes what comes out. Must not know tokens, HTTP or any protocol. PAR and SRV cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvist.text import ContentDelta, Event, ReplyParser, StopMatcher, ToolArgumentsDelta, ToolCallEnd, ToolCallStart


class ReplyStream:
    """The state machine of one reply.

    `parse` takes marks apart as `ReplyParser` says (a chat); without it all text is content. `reasoning`: the prompt ended with
    `<think>`. `calls` False leaves tool calls out (`tool_choice: none`). Text after a stop string is gone, calls after it too.
    """

    def __init__(self, *, parse: bool, reasoning: bool = False, stops: Sequence[str] = (), calls: bool = True) -> None:
        self._parser = ReplyParser(reasoning=reasoning) if parse else None
        self._stops = tuple(stops)
        self._matcher = StopMatcher(self._stops)
        self._calls = calls
        self.matched: str | None = None
        self.tool_calls = 0

    @property
    def over(self) -> bool:
        """A stop string has ended the reply."""
        return self.matched is not None

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; what became certain."""
        if self.over or not text:
            return []
        return self._through(self._parser.feed(text) if self._parser else [ContentDelta(text)])

    def finish(self) -> list[Event]:
        """The reply has ended: what was held back."""
        if self.over:
            return []
        events = self._through(self._parser.finish() if self._parser else [])
        return events if self.over else [*events, *self._released()]

    def _through(self, events: Iterable[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                text = self._matcher.feed(event.text)
                shown += [ContentDelta(text)] if text else []
                self.matched = self._matcher.matched
            elif isinstance(event, ToolCallStart):
                shown += self._released()
                self._matcher = StopMatcher(self._stops)
                self.tool_calls += self._calls and not self.over
            if self.over:
                break
            if self._calls or not isinstance(event, ToolCallStart | ToolArgumentsDelta | ToolCallEnd):
                shown += [] if isinstance(event, ContentDelta) else [event]
        return shown

    def _released(self) -> list[Event]:
        """Content that was held because a stop string might have begun in it."""
        text = self._matcher.finish()
        self.matched = self._matcher.matched
        return [ContentDelta(text)] if text else []
