"""Grammars of formats and calls: what follows them parses as meant, what breaks them is refused token by token."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import Grammar, GrammarError
from kvist.server.errors import ApiError
from kvist.server.grammars import OutputFormat, calls_grammar, format_grammar
from kvist.text import ParsedCall, ToolCall, ToolDefinition, parse
from kvist.text.marks import DSML, END_THINK
from kvist.text.tool_text import calls_text
from tests.server_fakes import END_ID, TOKENIZER

VOCABULARY = GrammarVocabulary(TOKENIZER, [END_ID])
MARKS = {mark: TOKENIZER.special_id(mark) for mark in (DSML, END_THINK)}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
    },
    "required": ["city", "unit"],
}
REFERRING = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/flag"}},
    "$defs": {"flag": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    ToolDefinition(name="weather", parameters=WEATHER),
    ToolDefinition(name="odd", parameters=REFERRING),
    ToolDefinition(name="bare"),
]


def follows(grammar: Grammar, text: str, *, ended: bool = True) -> bool:
    """Whether every token of the text, and the end behind it, is allowed."""
    constraint = Constraint(VOCABULARY, grammar)
    for token in [*TOKENIZER.encode(text, allow_special=True), *([END_ID] if ended else [])]:
        if not np.unpackbits(constraint.mask(), bitorder="little")[token]:
            return False
        constraint.accept(token)
    return True


def walk(grammar: Grammar, seed: int, limit: int = 400) -> str | None:
    """A random text of the grammar; marks are taken where they are allowed, so that it comes to an end."""
    constraint, rng = Constraint(VOCABULARY, grammar), random.Random(seed)
    ids: list[int] = []
    closing = TOKENIZER.encode("</")
    for _ in range(limit):
        allowed = np.flatnonzero(np.unpackbits(constraint.mask(), bitorder="little")).tolist()
        if END_ID in allowed:
            return TOKENIZER.decode(ids)
        marks = [mark for mark in MARKS.values() if mark in allowed]
        free = len(allowed) > 1000
        if marks and (not free or rng.random() < 0.3):
            token = marks[0]
        elif free and rng.random() < 0.3:
            token = closing[0]
        else:
            token = rng.choice(allowed)
        constraint.accept(token)
        ids.append(token)
    return None


def as_written(*calls: ToolCall) -> str:
    """Calls in the spelling of the prompt format."""
    return "".join(calls_text(calls))


@pytest.mark.parametrize("reasoning", [False, True])
def test_random_texts_of_forced_calls_are_calls(reasoning: bool) -> None:
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=False, reasoning=reasoning)
    seen = set()
    for seed in range(12):
        text = walk(grammar, seed)
        if text is None:
            continue
        reply = parse(text, reasoning=reasoning)
        (call,) = reply.tool_calls
        assert not call.problem, text
        arguments = json.loads(call.arguments)
        if call.name == "weather":
            assert {"city", "unit"} <= set(arguments) <= set(WEATHER["properties"])  # type: ignore[call-overload]
            assert arguments["unit"] in ("C", "F")
            assert 1 <= arguments.get("days", 1) <= 9
            assert len(arguments.get("code", "ABC")) == 3
        elif call.name == "odd":
            assert isinstance(arguments["a"], bool)
        else:
            assert arguments == {}
        assert not reply.content
        seen.add(call.name)
    assert seen == {"weather", "odd", "bare"}


def test_the_prompt_format_s_own_spelling_is_allowed() -> None:
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=True, reasoning=False)
    paris = ToolCall(name="weather", arguments='{"city": "Paris </b> é", "unit": "C", "days": 3}')
    text = as_written(paris, ToolCall(name="bare"), paris)
    assert follows(grammar, text)
    assert [call.name for call in parse(text, reasoning=False).tool_calls] == ["weather", "bare", "weather"]
    single = calls_grammar(TOOLS, MARKS, forced=True, parallel=False, reasoning=False)
    assert follows(single, as_written(paris))
    assert not follows(single, as_written(paris, paris))


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "x"},
        {"city": "x", "unit": "K"},
        {"city": "x", "unit": "C", "days": 0},
        {"city": "x", "unit": "C", "more": 1},
    ],
)
def test_calls_against_their_schema_are_not_allowed(arguments: dict[str, object]) -> None:
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=True, reasoning=False)
    assert not follows(grammar, as_written(ToolCall(name="weather", arguments=json.dumps(arguments))))


def test_free_choice_with_strict_tools() -> None:
    """Text of any kind, or text that ends in calls that follow their schema."""
    grammar = calls_grammar(TOOLS, MARKS, forced=False, parallel=True, reasoning=True)
    good = as_written(ToolCall(name="weather", arguments='{"city": "Paris", "unit": "C"}'))
    bad = as_written(ToolCall(name="weather", arguments='{"city": "Paris", "unit": "K"}'))
    assert follows(grammar, "hm</think>just text \n\n<")
    assert follows(grammar, "hm</think>")
    assert follows(grammar, f"hm</think>so:{good}")
    assert follows(grammar, f"</think>{good}")
    assert not follows(grammar, f"hm</think>so:{bad}")
    assert not follows(grammar, "never closed")
    assert parse(f"hm</think>so:{good}", reasoning=True).tool_calls == (
        ParsedCall(name="weather", arguments='{"city": "Paris", "unit": "C"}'),
    )


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [
        (OutputFormat(kind="json_schema", source=REFERRING), '{"a": true}', '{"a": 1}'),
        (OutputFormat(kind="json_schema", source=True), "[1]", "[1"),
        (OutputFormat(kind="regex", source=r"a/b\/c\d+"), "a/b/c42", "a/b/c"),
        (OutputFormat(kind="regex", source="x\ny"), "x\ny", "x y"),
    ],
)
def test_formats_with_and_without_reasoning(output: OutputFormat, good: str, bad: str) -> None:
    plain = format_grammar(output, MARKS, reasoning=False)
    assert follows(plain, good)
    assert not follows(plain, bad)
    behind = format_grammar(output, MARKS, reasoning=True)
    assert follows(behind, f"thought {bad} {good}</think>{good}")
    assert not follows(behind, f"thought</think>{bad}")
    assert not follows(behind, good)


def test_what_cannot_be_made() -> None:
    with pytest.raises(ApiError, match="switch thinking off"):
        format_grammar(OutputFormat(kind="lark", source='start: "a"'), MARKS, reasoning=True)
    with pytest.raises(ApiError, match="tokenizer has no"):
        calls_grammar(TOOLS, {}, forced=True, parallel=True, reasoning=False)
    with pytest.raises(GrammarError, match="JSON object"):
        format_grammar(OutputFormat(kind="json_schema", source=[1]), MARKS, reasoning=True)


def test_a_client_cannot_loosen_white_space() -> None:
    """Our bound on white space stands behind what a schema says."""
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*"}}
    source = format_grammar(OutputFormat(kind="json_schema", source=schema), MARKS, reasoning=True).source
    assert source.count("x-guidance") == 1
    assert "{0,32}" in source
