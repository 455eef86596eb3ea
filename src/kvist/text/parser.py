"""Takes a reply apart as it streams in: reasoning, content, tool calls. The inverse of `prompt.py` for assistant turns.

Owns the rules of what the marks mean in every order (listed at `ReplyParser`). Must not know tokens, JSON details
(`call_body.py`) or servers. Linear in the text; held text is bounded except the value or body that is being checked and
rows of half marks (`joined.py`).
Source: facts section 12; bug cases PAR-01 to PAR-09.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from kvist.text.call_body import ObjectBody, ParameterArguments
from kvist.text.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    collect,
)
from kvist.text.joined import JoinedMarks
from kvist.text.marks import BAR, CALLS, CLOSE_TAG, DSML, END_THINK, EOS, INVOKE, OPEN_TAG, PARAMETER, THINK

MAX_TAG_CHARACTERS = 512
"""Longest tag, from its mark to its `>`; names are far shorter. A longer one is no tag."""

_MAY_BEGIN_MARK = re.compile(f"[<{BAR}]")
_TEXT_MARKS = (THINK, END_THINK, EOS, OPEN_TAG, CLOSE_TAG, DSML)
_BLOCK_MARKS = (EOS, OPEN_TAG, CLOSE_TAG)
_STRAY_TAGS = (CALLS, INVOKE, PARAMETER)
_CLOSE_NAMES = (PARAMETER + ">", INVOKE + ">", CALLS + ">")
_ENDS_STRAY_TAG = re.compile("[<>\n]")
_BLANK = re.compile(r"\s*")
_HOLD = ""  # as the result of a match: the text may yet become a mark


class _Body(Enum):
    """What the inside of the current call has turned out to be."""

    NO_CALL = "no call is open"
    UNKNOWN = "nothing yet"
    PARAMETERS = "parameter tags"
    OBJECT = "one JSON object"
    OTHER = "neither"


def parse(text: str, *, reasoning: bool) -> Reply:
    """A whole reply at once; equal to feeding it to a `ReplyParser` in any pieces.

    `reasoning` says whether the prompt ended with `<think>`.
    """
    parser = ReplyParser(reasoning=reasoning)
    return collect([*parser.feed(text), *parser.finish()])


class ReplyParser:
    """Incremental parser of one reply. Rules, for any order of marks and any division of the text:

    - The reply starts as reasoning if the prompt ended with `<think>`, else as content. `</think>` turns reasoning into
      content. A reply that never closes its reasoning has reasoning only.
    - In content, `<think>` and `</think>` are dropped and change nothing; so is `<think>` inside reasoning.
    - `<｜DSML｜ calls>` opens the tool calls, from reasoning (which it ends) or content. One blank line before it is framing.
    - Any other DSML tag or bare DSML mark outside the calls is dropped; text around it stays.
    - Where dropping a mark joins its neighbours into another mark, that one is dropped too and means nothing.
    - Text after the calls is content. A second block of calls is not executed: the rest of the reply is ignored from there.
    - The end-of-sentence text ends the reply wherever it stands; nothing after it counts.
    - Inside the calls only calls count, inside a call only its body; other text is dropped and the call says so (`problem`).
    - A reply that is cut off ends its open call with valid JSON; a half mark with a bar in it is dropped where reasoning,
      content or the reply ends; a lone bar and half of a thinking mark (`<`, `<t`: also the end of plain text) stay.
    """

    def __init__(self, *, reasoning: bool) -> None:
        self._text = ""
        self._at = 0
        self._events: list[Event] = []
        self._delta: type[ReasoningDelta | ContentDelta] = ReasoningDelta if reasoning else ContentDelta
        self._step: Callable[[], bool] = self._read_text
        self._joined = JoinedMarks()
        self._newlines = ""  # at most two, held in case they frame the calls
        self._said_content = False
        self._calls_closed = False
        self._right_after_calls = False
        self._index = -1
        self._body = _Body.NO_CALL
        self._problem = ""
        self._parameters = ParameterArguments()
        self._object = ObjectBody()

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the reply and returns the events that became certain."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """The reply has ended, or was cut: the remaining events. Idempotent."""
        if self._step != self._ignore_rest:
            held = self._text[self._at :]
            held = "" if BAR in held and held != BAR else held
            if self._step == self._read_text:
                self._say(held)
            elif self._step == self._read_value:
                self._value(held)
            elif self._step == self._read_object:
                self._object.feed(held)
            self._end_reply()
        self._text, self._at = "", 0
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Text outside the calls

    def _read_text(self) -> bool:
        start = self._at
        for found in _MAY_BEGIN_MARK.finditer(self._text, start):
            mark = self._mark_at(found.start(), _TEXT_MARKS)
            if mark is None:
                continue
            self._say(self._text[start : found.start()])
            self._at = found.start()
            return mark != _HOLD and self._text_mark(mark)
        self._say(self._text[start:])
        self._at = len(self._text)
        return False

    def _mark_at(self, at: int, marks: tuple[str, ...]) -> str | None:
        """The mark at this place, `_HOLD` if the text ends inside what may be one, None if there is none."""
        for mark in marks:
            if self._text.startswith(mark, at):
                return mark
        rest = self._text[at : at + len(EOS)]
        return _HOLD if any(mark.startswith(rest) for mark in marks) else None

    def _text_mark(self, mark: str) -> bool:
        after = self._at + len(mark)
        if mark == EOS:
            self._end_reply()
            return True
        if mark == END_THINK and self._delta is ReasoningDelta:
            self._show_newlines()
            self._show_held()
            self._delta = ContentDelta
        if mark in (THINK, END_THINK):
            self._at = after
            return True
        return self._text_tag(mark, after)

    def _text_tag(self, mark: str, after: int) -> bool:
        """A DSML mark outside the calls: opens them, or is dropped together with the tag it belongs to."""
        rest = self._text[after : after + MAX_TAG_CHARACTERS]
        if any(len(rest) < len(tag) and tag.startswith(rest) for tag in (CALLS + ">", *_STRAY_TAGS)):
            return False
        if mark == OPEN_TAG and rest.startswith(CALLS + ">"):
            self._at = after + len(CALLS) + 1
            self._open_calls()
            return True
        self._at = after
        tag = next((tag for tag in _STRAY_TAGS if rest.startswith(tag)), None)
        if tag is None:
            return True
        end = _ENDS_STRAY_TAG.search(rest)
        if end is None and len(rest) < MAX_TAG_CHARACTERS:
            self._at -= len(mark)
            return False
        self._at = after + (end.end() if end is not None and end.group() == ">" else len(tag))
        return True

    def _say(self, text: str) -> None:
        if self._right_after_calls:
            text = text.lstrip()
            if not text:
                return
            self._right_after_calls = False
            text = "\n\n" + text if self._said_content else text
        text = self._newlines + text
        kept = min(2, len(text) - len(text.rstrip("\n")))
        shown, self._newlines = text[: len(text) - kept], text[len(text) - kept :]
        self._show(shown)

    def _show(self, text: str) -> None:
        if text:
            self._said_content = self._said_content or self._delta is ContentDelta
            self._emit(self._joined.feed(text))

    def _show_held(self) -> None:
        self._emit(self._joined.finish())

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(self._delta(text))

    def _show_newlines(self) -> None:
        text, self._newlines = self._newlines, ""
        self._show(text)

    def _end_reply(self) -> None:
        if self._body is not _Body.NO_CALL:
            self._note("the reply ended inside the call")
            self._end_call()
        self._show_newlines()
        self._show_held()
        self._step = self._ignore_rest

    def _ignore_rest(self) -> bool:
        self._at = len(self._text)
        return False

    # Between the calls

    def _open_calls(self) -> None:
        self._newlines = ""
        self._show_held()
        self._step = self._ignore_rest if self._calls_closed else self._read_calls

    def _close_calls(self) -> None:
        self._calls_closed = self._right_after_calls = True
        self._delta = ContentDelta
        self._step = self._read_text

    def _read_calls(self) -> bool:
        found = self._next_mark(_BLOCK_MARKS)
        if found is None or not self._tag_is_whole(found):
            return False
        mark, header = found, self._take_tag(found)
        if mark == EOS:
            self._end_reply()
        elif mark == CLOSE_TAG and header == CALLS:
            self._close_calls()
        elif mark == OPEN_TAG and _is_tag(header, INVOKE):
            self._open_call(_attributes(header[len(INVOKE) :]).get("name", ""))
        return True

    def _next_mark(self, marks: tuple[str, ...]) -> str | None:
        """Moves to the next of `marks`, dropping what stands before it; None if it has not wholly arrived."""
        while (at := self._text.find("<", self._at)) >= 0:
            self._at = at
            mark = self._mark_at(at, marks)
            if mark is not None:
                return mark or None
            self._at += 1
        self._at = len(self._text)
        return None

    def _tag_end(self, mark: str) -> int:
        """Place of the `>` of the tag that begins here, -1 if it has not arrived, -2 if the tag is too long to be one."""
        start = self._at + len(mark)
        limit = start + MAX_TAG_CHARACTERS
        end = self._text.find(">", start, limit)
        while end >= 0 and self._text.count('"', start, end) % 2:  # inside a quoted name
            end = self._text.find(">", end + 1, limit)
        return -2 if end < 0 and len(self._text) >= limit else end

    def _tag_is_whole(self, mark: str) -> bool:
        return mark == EOS or self._tag_end(mark) != -1

    def _take_tag(self, mark: str) -> str:
        """Steps over the tag that begins here and returns what stands between its mark and its `>`."""
        start = self._at + len(mark)
        end = self._tag_end(mark) if mark != EOS else -2
        self._at = start if end < 0 else end + 1
        return "" if end < 0 else self._text[start:end]

    # Inside a call

    def _open_call(self, name: str) -> None:
        self._index += 1
        self._body = _Body.UNKNOWN
        self._problem = ""
        self._parameters, self._object = ParameterArguments(), ObjectBody()
        if not name:
            self._note("the call has no name")
        self._events.append(ToolCallStart(self._index, name))
        self._step = self._read_body

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _end_call(self) -> None:
        if self._step == self._read_value:
            self._add(self._parameters.close())
        if self._body is _Body.OBJECT:
            text, problem = self._object.arguments()
            self._add(text)
        else:
            self._add(self._parameters.end())
            problem = self._parameters.problem
        self._events.append(ToolCallEnd(self._index, self._problem or problem))
        self._body = _Body.NO_CALL
        self._step = self._read_calls

    def _add(self, arguments: str) -> None:
        if arguments:
            self._events.append(ToolArgumentsDelta(self._index, arguments))

    def _read_body(self) -> bool:
        blank = _BLANK.match(self._text, self._at)
        self._at = blank.end() if blank else self._at
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "{" and self._body is _Body.UNKNOWN:
            self._body = _Body.OBJECT
            self._step = self._read_object
            return True
        mark = self._mark_at(self._at, _BLOCK_MARKS)
        if mark is None:
            self._drop_text()
            return True
        return mark != _HOLD and self._tag_is_whole(mark) and self._body_tag(mark)

    def _drop_text(self) -> None:
        self._note("text that is no parameter was left out")
        self._body = _Body.OTHER if self._body is _Body.UNKNOWN else self._body
        at = self._text.find("<", self._at + 1)
        self._at = len(self._text) if at < 0 else at

    def _body_tag(self, mark: str) -> bool:
        start, header = self._at, self._take_tag(mark)
        if mark == EOS:
            self._end_reply()
        elif mark == CLOSE_TAG and header == INVOKE:
            self._end_call()
        elif (mark == CLOSE_TAG and header == CALLS) or (mark == OPEN_TAG and _is_tag(header, INVOKE)):
            self._note("the call is not closed")
            self._at = start
            self._end_call()
        elif mark == OPEN_TAG and _is_tag(header, PARAMETER) and self._body is not _Body.OBJECT:
            self._open_parameter(_attributes(header[len(PARAMETER) :]))
        else:
            self._note("a tag that has no place here was left out")
        return True

    def _open_parameter(self, attributes: dict[str, str]) -> None:
        if "name" not in attributes:
            self._note("a parameter has no name")
        self._body = _Body.PARAMETERS
        # A missing or odd attribute: text is the reading that cannot fail.
        self._add(self._parameters.open(attributes.get("name", ""), string=attributes.get("string") != "false"))
        self._step = self._read_value

    def _value(self, text: str) -> None:
        self._add(self._parameters.value(text))

    def _read_value(self) -> bool:
        start = at = self._at
        while (at := self._text.find("<", at)) >= 0:
            name = self._closing_name(at)
            if name is None:
                at += 1
                continue
            self._value(self._text[start:at])
            self._at = at
            return name != _HOLD and self._end_value(name)
        self._value(self._text[start:])
        self._at = len(self._text)
        return False

    def _closing_name(self, at: int) -> str | None:
        """The closing tag's name (or EOS) at this place, `_HOLD` if it may yet become one, None if this is data."""
        mark = self._mark_at(at, (EOS, CLOSE_TAG))
        if mark != CLOSE_TAG:
            return mark
        after = at + len(CLOSE_TAG)
        for name in _CLOSE_NAMES:
            if self._text.startswith(name, after):
                return name
        rest = self._text[after : after + len(_CLOSE_NAMES[0])]
        return _HOLD if any(name.startswith(rest) for name in _CLOSE_NAMES) else None

    def _end_value(self, name: str) -> bool:
        if name == EOS:
            self._end_reply()
            return True
        if name == PARAMETER + ">":
            self._at += len(CLOSE_TAG) + len(name)
        else:
            self._note("a parameter is not closed")
        self._add(self._parameters.close())
        self._step = self._read_body
        return True

    def _read_object(self) -> bool:
        while not self._object.complete:
            at = self._text.find("<", self._at)
            stop = len(self._text) if at < 0 else at
            self._at += self._object.feed(self._text[self._at : stop])
            if self._at < stop or self._object.complete:
                break
            if at < 0:
                return False
            mark = self._mark_at(at, (EOS,) if self._object.in_string else _BLOCK_MARKS)
            if mark == _HOLD:
                return False
            if mark is not None:
                break
            self._at += self._object.feed("<")
        self._step = self._read_body
        return True


def _is_tag(header: str, name: str) -> bool:
    return header == name or header.startswith(name + " ")


def _attributes(text: str) -> dict[str, str]:
    """`name="f" string="true"` as a dictionary; an unfinished one is left out."""
    parts = text.split('"')
    return {key.strip().removesuffix("=").strip(): value for key, value in zip(parts[0::2], parts[1::2], strict=False)}
