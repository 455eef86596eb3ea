"""A conversation as data: messages, content blocks, tools, calls, reasoning effort.

Owns these records and what is legal in each. Must not know how a prompt spells them, tokens, or any client's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from kvist.text.marks import BAR, TASKS

Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]

EFFORT_NAMES: dict[str, int] = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
"""Reasoning effort by name. `xhigh` is no tier of the release; it is taken as `high`, as the publisher's recipe does."""

DEFAULT_EFFORT = EFFORT_NAMES["high"]

_NUMBER = re.compile("[1-9][0-9]?|100")


class PromptError(ValueError):
    """A conversation that the prompt format cannot express; the message names the offending part and the way out."""


def resolve_effort(effort: str | int | None) -> int:
    """Reasoning effort 1..100 from a name, a number or None (the default, 75).

    A number may also come as its decimal text ("75", without sign, blanks or leading zeros) and counts as given.
    Raises `PromptError` for anything else. Source: bug case ENC-01.
    """
    if effort is None:
        return DEFAULT_EFFORT
    if isinstance(effort, str) and effort in EFFORT_NAMES:
        return EFFORT_NAMES[effort]
    if isinstance(effort, str) and _NUMBER.fullmatch(effort):
        return int(effort)
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    raise PromptError(f"reasoning effort {effort!r} is unknown: use {', '.join(EFFORT_NAMES)} or a whole number from 1 to 100")


@dataclass(frozen=True)
class ContentText:
    """A block of text."""

    text: str


@dataclass(frozen=True)
class ContentImage:
    """A picture; `image` is whatever the caller wants back beside its place in the prompt (a path, bytes, a decoded image)."""

    image: Any


Content = str | tuple[ContentText | ContentImage, ...]


@dataclass(frozen=True)
class ToolNamespace:
    """A group of tools; its description stands before that of each of its tools."""

    name: str
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolDefinition:
    """A function that the model may call. `parameters` is its JSON schema; `extra` holds further keys for the model to see."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    namespace: ToolNamespace | str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call in an assistant's turn. `arguments` is JSON text; anything but an object is passed on under the key "arguments"."""

    name: str
    arguments: str = "{}"
    id: str = ""
    namespace: str | None = None


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. `reasoning` and `tool_calls` belong to assistants, `tools` to system and developer messages.

    `tool_call_id` of a tool message names the call that it answers; `task` asks for one of the release's internal one-word
    tasks instead of an answer. Raises `PromptError` for a field that the role cannot have.
    """

    role: Role
    content: Content = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    tool_call_id: str = ""
    task: str | None = None

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise PromptError(f"role {self.role!r} is unknown: use one of {', '.join(get_args(Role))}")
        owners: dict[str, tuple[str, ...]] = {
            "reasoning": ("assistant",),
            "tool_calls": ("assistant",),
            "tools": ("system", "developer"),
            "tool_call_id": ("tool",),
            "task": ("user", "developer", "assistant"),
        }
        for name, roles in owners.items():
            if getattr(self, name) and self.role not in roles:
                raise PromptError(f"a {self.role} message cannot have {name}; only {' and '.join(roles)} messages can")
        if self.task is not None and self.task not in TASKS:
            raise PromptError(f"task {self.task!r} is unknown: use one of {', '.join(TASKS)}")


def qualified_name(name: str, namespace: ToolNamespace | str | None = None) -> str:
    """`ns::name`, or `name` where there is no namespace; a name that is qualified already must agree with `namespace`.

    Raises `PromptError` for a name that a call tag cannot carry.
    """
    own, separator, bare = name.rpartition("::")
    group = namespace.name if isinstance(namespace, ToolNamespace) else namespace
    if separator and group not in (None, own):
        raise PromptError(f"tool name {name!r} contradicts its namespace {group!r}; give one of the two")
    group = own if separator else group
    if "::" in (group or ""):
        raise PromptError(f"tool name {name!r} with namespace {group!r} has more than one '::'; namespaces do not nest")
    for part in (bare, group):
        if part is not None and (not part or any(character in f'"<>{BAR}' or not character.isprintable() for character in part)):
            raise PromptError(
                f"tool name {name!r}: {part!r} cannot stand in a call tag; "
                f"use a name without quotes, angle brackets, {BAR} and control characters, of at least one character"
            )
    return bare if group is None else f"{group}::{bare}"
