"""How tools and calls are written in a prompt: the description of the tools, and the markup of an assistant's calls.

Owns this text. Must not know turns or tokens; marks are spelled out here, and the prompt writer turns those of `Markup` into
control tokens while values stay plain. Source: facts section 12; bug cases PAR-05, PAR-11.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvist.text.marks import BAR, CALLS, CLOSE_TAG, DSML, EOS, INVOKE, OPEN_TAG, PARAMETER
from kvist.text.messages import PromptError, ToolCall, ToolDefinition, ToolNamespace, qualified_name


class Markup(str):
    """Text of our own, in which a spelled mark means the control token. Plain `str` never does."""

    __slots__ = ()


SCHEMAS = "{schemas}"

TOOL_INSTRUCTIONS = f"""## Tools

Tools can be called in this conversation. To call one or more of them, end the reply with a blank line and a block like this:

{OPEN_TAG}{CALLS}>
{OPEN_TAG}{INVOKE} name="TOOL">
{OPEN_TAG}{PARAMETER} name="PARAMETER" string="true|false">VALUE{CLOSE_TAG}{PARAMETER}>
...
{CLOSE_TAG}{INVOKE}>
{OPEN_TAG}{INVOKE} name="ANOTHER_TOOL">
...
{CLOSE_TAG}{INVOKE}>
{CLOSE_TAG}{CALLS}>

Text is given as it stands, with string="true". Numbers, booleans, lists, objects and null are given as JSON, with string="false".

Where the reply begins with reasoning, all of it comes before the answer and the calls, between <think> and </think>.

### Schemas of the tools

{SCHEMAS}

Names and parameters of a call must follow these schemas.
"""
"""The heading, the markup and one schema a line are the release's; the sentences are ours. Callers may pass their own."""


def tools_text(tools: Sequence[ToolDefinition], instructions: str = TOOL_INSTRUCTIONS) -> Iterator[str]:
    """Pieces of the description of `tools`. Raises `PromptError` if `instructions` has not exactly one `{schemas}`."""
    if instructions.count(SCHEMAS) != 1:
        raise PromptError(f"tool instructions hold {instructions.count(SCHEMAS)} times {SCHEMAS}; they need it exactly once")
    before, _, after = instructions.partition(SCHEMAS)
    yield Markup(before)
    yield "\n".join(_schema(tool) for tool in tools)
    yield Markup(after)


def _schema(tool: ToolDefinition) -> str:
    description = tool.description
    if isinstance(tool.namespace, ToolNamespace) and tool.namespace.description:
        description = f"{tool.namespace.description}\n{description}"
    shown: dict[str, Any] = {"name": qualified_name(tool.name, tool.namespace)}
    if description:
        shown["description"] = description
    if tool.parameters is not None:
        shown["parameters"] = tool.parameters
    try:
        return json.dumps({**shown, **tool.extra}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the schema of tool {tool.name!r} is no JSON: {error}") from error


def calls_text(calls: Sequence[ToolCall]) -> Iterator[str]:
    """Pieces of the block of calls that ends an assistant's turn, with the blank line before it.

    Arguments that parameter tags cannot carry (a value that holds a mark, a name with quotes) are written in the other legal
    form, as one JSON object, with the bars of marks escaped: what comes back from a parser is then always what went in.
    """
    yield Markup(f"\n\n{OPEN_TAG}{CALLS}>")
    for call in calls:
        yield Markup(f'\n{OPEN_TAG}{INVOKE} name="')
        yield qualified_name(call.name, call.namespace)
        yield Markup('">\n')
        yield from _body(call)
        yield Markup(f"\n{CLOSE_TAG}{INVOKE}>")
    yield Markup(f"\n{CLOSE_TAG}{CALLS}>")


def _body(call: ToolCall) -> Iterator[str]:
    arguments = _arguments(call.arguments)
    if not all(_fits_name(name) and (not isinstance(value, str) or _fits_value(value)) for name, value in arguments.items()):
        yield _json(arguments)
        return
    for at, (name, value) in enumerate(arguments.items()):
        is_text = isinstance(value, str)
        yield Markup(("\n" if at else "") + f'{OPEN_TAG}{PARAMETER} name="')
        yield name
        yield Markup(f'" string="{str(is_text).lower()}">')
        yield value if is_text else _json(value)
        yield Markup(f"{CLOSE_TAG}{PARAMETER}>")


def _arguments(text: str) -> dict[str, Any]:
    """The object that `text` is, also if some client put it in quotes once more; else the text under the key "arguments"."""
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value, parse_float=_finite, parse_constant=_finite)
            except (ValueError, RecursionError):
                break
    return value if isinstance(value, dict) else {"arguments": text}


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no JSON number that can be written again")
    return value


def _fits_name(name: str) -> bool:
    return len(name) <= 128 and name.isprintable() and not any(character in f'"<>{BAR}' for character in name)


def _fits_value(value: str) -> bool:
    return DSML not in value and EOS not in value and _is_unicode(value)


def _json(value: Any) -> str:
    """JSON in which no mark can be read, and which has a UTF-8 form even if a string in it has none."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text = text if _is_unicode(text) else json.dumps(value)
    except RecursionError as error:
        raise PromptError("the arguments of a tool call are nested too deeply; flatten them or leave out the call") from error
    return text if _fits_value(text) else text.replace(BAR, f"\\u{ord(BAR):04x}")


def _is_unicode(text: str) -> bool:
    """Whether the text has a UTF-8 form, that is, no half of a surrogate pair (JSON can escape one)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
