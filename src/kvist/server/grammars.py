"""Grammars that a request asks for: response formats, and tool calls in the markup of the prompt format.

Writes llguidance's Lark dialect, where `<[7]>` is the control token of id 7. They say nothing of reasoning: where a reply begins
with it, the engine lets them begin behind it (`marker`). Must not know requests or HTTP. Source: facts section 12 for the markup;
bug case PAR-05 for the JSON form of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvist.engine.sampling.grammar_text import Grammar, GrammarError
from kvist.server.errors import ApiError
from kvist.text import ToolDefinition
from kvist.text.marks import BAR, CALLS, DSML, END_THINK, INVOKE, PARAMETER
from kvist.text.messages import qualified_name

_TIGHT = {"whitespace_flexible": False}
_BOUNDED_STRING_KEYS = ("pattern", "format", "minLength", "maxLength")


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """What the content must be: a JSON value of a schema, a text that a regular expression matches, or a Lark grammar's."""

    kind: Literal["json_schema", "regex", "lark"]
    source: Any


def format_grammar(output: OutputFormat) -> Grammar:
    """The grammar of content of this format. Raises GrammarError."""
    if output.kind == "json_schema":
        return Grammar.json_schema(output.source)
    return Grammar.regex(output.source) if output.kind == "regex" else Grammar.lark(output.source)


def marker(marks: Mapping[str, int]) -> tuple[int, ...]:
    """The ids behind which a grammar begins where a reply starts with reasoning. Raises ApiError for a model without them."""
    return (_mark(marks, END_THINK),)


def needs_call_grammar(tools: Sequence[ToolDefinition], strict: frozenset[str], kind: str, parallel: bool) -> bool:
    """Whether free choice needs a grammar all the same: strict schemas, or at most one call."""
    return kind == "auto" and bool(tools) and (bool(strict) or not parallel)


def calls_grammar(tools: Sequence[ToolDefinition], marks: Mapping[str, int], *, forced: bool, parallel: bool) -> Grammar:
    """A reply that calls `tools` by their schemas. `forced`: nothing but calls; else free text that may end in calls."""
    dsml = f"<[{_mark(marks, DSML)}]>"
    rules = [_call_rule(number, tool, dsml) for number, tool in enumerate(tools)]
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    many = "+" if parallel else ""
    block = f'{dsml} {_quoted(f"{CALLS}>" + chr(10))} call{many} "</" {dsml} {_quoted(f"{CALLS}>")}'
    start = f"start: {_quoted(chr(10) * 2 + '<')} {block}" if forced else f"start: TEXT | TEXT_BEFORE {block}"
    lexemes = ["TEXT: /(?s:.*)/", r"TEXT_BEFORE: /(?s:.*)\n\n</", r"VALUE: /(?s:.*)<\//"]
    used = [lexeme for lexeme in lexemes if any(lexeme.split(":")[0] in line.split() for line in [start, *_lines(rules)])]
    return Grammar.lark("\n".join([start, f"call: {names}", *rules, *used, ""]))


def _lines(rules: Sequence[str]) -> list[str]:
    return [line for rule in rules for line in rule.split("\n")]


def _call_rule(number: int, tool: ToolDefinition, dsml: str) -> str:
    """Rules of one tool: parameter tags where the schema is a plain object, else the JSON object form."""
    name = qualified_name(tool.name, tool.namespace)
    opening = _quoted(f'{INVOKE} name="{name}">\n')
    closing = f'"</" {dsml} {_quoted(f"{INVOKE}>" + chr(10))}'
    schema = tool.parameters or {"type": "object", "properties": {}}
    body: list[str] = []
    extra: list[str] = []
    if not _has_plain_parameters(schema):
        body = [f"object_{number}", '"\\n"']
        extra = [f"object_{number}: {_json_rule(schema)}"]
    else:
        needed = set(schema.get("required", ()))
        for at, (key, value) in enumerate(schema.get("properties", {}).items()):
            rule = f"p_{number}_{at}"
            body.append(rule if key in needed else f"{rule}?")
            extra += _parameter_rules(rule, key, value, dsml)
        if not needed:
            body.append('"\\n"?')  # the prompt format writes an empty body as an empty line
    return "\n".join([f'call_{number}: "<" {dsml} {opening} {" ".join(body)} {closing}', *extra])


def _parameter_rules(rule: str, name: str, schema: Any, dsml: str) -> list[str]:
    """`<mark parameter name="x" string="true">text</mark parameter>`, or JSON with string="false"."""
    closing = f"{dsml} {_quoted(f'{PARAMETER}>' + chr(10))}"
    choices = _choices(schema)
    is_text = choices is not None or _is_free_text(schema)
    opening = _quoted(f'{PARAMETER} name="{name}" string="{str(is_text).lower()}">')
    head = f'{rule}: "<" {dsml} {opening}'
    if choices is not None:
        return [f"{head} ({' | '.join(_quoted(choice + '</') for choice in choices)}) {closing}"]
    if is_text:
        return [f"{head} VALUE {closing}"]
    return [f'{head} {rule}_json "</" {closing}', f"{rule}_json: {_json_rule(schema)}"]


def _has_plain_parameters(schema: Mapping[str, Any]) -> bool:
    """An object whose properties can be written one by one: no references, combinations or conditions."""
    known = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "strict"}
    properties = schema.get("properties", {})
    if schema.get("type") != "object" or set(schema) - known or not isinstance(properties, Mapping):
        return False
    if set(schema.get("required", ())) - set(properties):
        return False
    plain = all(name and name.isprintable() and not set(name) & set(f'"<>{BAR}') for name in properties)
    return plain and "$ref" not in json.dumps(properties)


def _choices(schema: Any) -> list[str] | None:
    """The texts of an enumeration of strings that tags can carry."""
    values = [schema["const"]] if isinstance(schema, Mapping) and "const" in schema else None
    if isinstance(schema, Mapping) and values is None:
        values = schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    fit = all(isinstance(value, str) and "<" not in value and BAR not in value for value in values)
    return values if fit else None


def _is_free_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return False
    return not any(key in schema for key in (*_BOUNDED_STRING_KEYS, "enum", "const", "anyOf", "oneOf", "allOf", "not"))


def _json_rule(schema: Any) -> str:
    """`%json` without white space. A schema that is no object or true is refused by the compiler, by name."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise GrammarError(f"a schema is a JSON object, got {type(schema).__name__}; wrap it")
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': _TIGHT})}"
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}; flatten or correct it") from error


def _mark(marks: Mapping[str, int], mark: str) -> int:
    if mark not in marks:
        raise ApiError("invalid_grammar", f"this model's tokenizer has no {mark!r}, so that such a reply cannot be forced")
    return marks[mark]


def _quoted(text: str) -> str:
    """A Lark string literal: JSON's escapes are its escapes too."""
    return json.dumps(text, ensure_ascii=False)
