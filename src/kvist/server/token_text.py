"""Tokens of a reply to pieces of the state machine's input, with what is counted on the way.

Owns which control tokens are text to the parser. Must not know HTTP. One per reply.
"""

from __future__ import annotations

from kvist.server.reply_stream import ReplyStream
from kvist.text import Event, StreamDecoder, Tokenizer
from kvist.text.marks import ASSISTANT, BOS, DSML, END_THINK, EOS, SYSTEM, THINK, USER

_PARSED = (THINK, END_THINK, DSML, EOS)
_TURN_MARKS = (BOS, USER, ASSISTANT, SYSTEM)


def turn_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that begin another turn: a chat's reply ends before them."""
    return tuple(tokenizer.special_id(mark) for mark in _TURN_MARKS if tokenizer.has_special(mark))


class TokenText:
    """Feeds tokens, one by one, to a `ReplyStream`. Other control tokens than those of the reply's format show as nothing.

    `count`: tokens up to the end; `reasoning_count`: those of them before reasoning ended.
    """

    def __init__(self, tokenizer: Tokenizer, stream: ReplyStream, *, parse: bool, reasoning: bool) -> None:
        self._tokenizer, self.stream = tokenizer, stream
        self._decoder = StreamDecoder(tokenizer)
        marks = [mark for mark in _PARSED if parse and tokenizer.has_special(mark)]
        self._kept = frozenset(tokenizer.special_id(mark) for mark in marks)
        self._ends_reasoning = frozenset(tokenizer.special_id(mark) for mark in marks if mark in (END_THINK, DSML))
        self._in_reasoning = reasoning
        self.count = self.reasoning_count = 0

    def feed(self, token: int) -> list[Event]:
        """What a token made certain. The caller stops feeding once `stream.over`."""
        self.count += 1
        self.reasoning_count += self._in_reasoning
        if token in self._ends_reasoning:
            self._in_reasoning = False
        if self._tokenizer.is_control(token) and token not in self._kept:
            return self.stream.feed(self._decoder.finish())
        return self.stream.feed(self._decoder.feed([token]))

    def finish(self) -> list[Event]:
        """The reply has ended: half characters and held text."""
        events = self.stream.feed(self._decoder.finish())
        return [*events, *self.stream.finish()]
