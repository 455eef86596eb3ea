"""What a reply is made of: the events of its stream, and the whole reply they add up to.

Owns these records and their sum. Must not know how a reply is spelled or parsed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer that the user sees."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Call number `index` (from 0) of the function `name`, once a call; a namespace shows as `ns::name`."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArgumentsDelta:
    """More of the JSON text of a call's arguments; the deltas of one call concatenate to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete. `problem` says what was wrong with its markup, in words; empty if nothing was."""

    index: int
    problem: str = ""


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """A tool call of a reply: `arguments` is the text of a JSON object, also where `problem` is set."""

    name: str
    arguments: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply, taken apart."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedCall, ...] = ()


def coalesce(events: Iterable[Event]) -> list[Event]:
    """The same stream with neighbouring deltas of one kind joined: independent of how the text was cut into pieces."""
    groups: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallStart | ToolCallEnd):
            groups.append((event, []))
        elif groups and groups[-1][1] and _same_target(groups[-1][0], event):
            groups[-1][1].append(event.text)
        else:
            groups.append((event, [event.text]))
    return [_with_text(first, "".join(texts)) if texts else first for first, texts in groups]


def _same_target(first: Event, second: Event) -> bool:
    if isinstance(first, ToolArgumentsDelta) and isinstance(second, ToolArgumentsDelta):
        return first.index == second.index
    return type(first) is type(second)


def _with_text(event: Event, text: str) -> Event:
    if isinstance(event, ToolArgumentsDelta):
        return ToolArgumentsDelta(event.index, text)
    return type(event)(text) if isinstance(event, ReasoningDelta | ContentDelta) else event


def collect(events: Iterable[Event]) -> Reply:
    """The reply that a complete stream of events describes."""
    reasoning, content = [], []
    names: list[str] = []
    arguments: list[list[str]] = []
    problems: list[str] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, name):
                names.append(name)
                arguments.append([])
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(_, problem):
                problems.append(problem)
    calls = zip(names, arguments, problems, strict=True)
    return Reply(
        reasoning="".join(reasoning),
        content="".join(content),
        tool_calls=tuple(ParsedCall(name=n, arguments="".join(a), problem=p) for n, a, p in calls),
    )
