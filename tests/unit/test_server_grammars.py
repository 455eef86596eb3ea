"""Grammars of formats and calls: what follows them parses as meant, what breaks them is refused token by token."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import Grammar, GrammarError
from kvist.server.errors import ApiError
from kvist.server.grammars import OutputFormat, calls_grammar, format_grammar, marker
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


def state_of(grammar: Grammar, reasoning: bool) -> Constraint:
    """The grammar as the engine begins with it."""
    return Constraint(VOCABULARY, grammar, start_after=marker(MARKS) if reasoning else ())


def follows(grammar: Grammar, text: str, *, reasoning: bool = False) -> bool:
    """Whether every token of the text, and the end behind it, is allowed."""
    constraint = state_of(grammar, reasoning)
    for token in [*TOKENIZER.encode(text, allow_special=True), END_ID]:
        if not np.unpackbits(constraint.mask(), bitorder="little")[token]:
            return False
        constraint.accept(token)
    return True


def walk(grammar: Grammar, seed: int, reasoning: bool, limit: int = 400) -> str | None:
    """A random text of the grammar; marks are taken where they are allowed, so that it comes to an end."""
    constraint, rng = state_of(grammar, reasoning), random.Random(seed)
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
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=False)
    seen = set()
    for seed in range(12):
        text = walk(grammar, seed, reasoning)
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
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=True)
    paris = ToolCall(name="weather", arguments='{"city": "Paris </b> é", "unit": "C", "days": 3}')
    text = as_written(paris, ToolCall(name="bare"), paris)
    assert follows(grammar, text)
    assert [call.name for call in parse(text, reasoning=False).tool_calls] == ["weather", "bare", "weather"]
    single = calls_grammar(TOOLS, MARKS, forced=True, parallel=False)
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
    grammar = calls_grammar(TOOLS, MARKS, forced=True, parallel=True)
    assert not follows(grammar, as_written(ToolCall(name="weather", arguments=json.dumps(arguments))))


def test_free_choice_with_strict_tools() -> None:
    """Text of any kind, or text that ends in calls that follow their schema."""
    grammar = calls_grammar(TOOLS, MARKS, forced=False, parallel=True)
    good = as_written(ToolCall(name="weather", arguments='{"city": "Paris", "unit": "C"}'))
    bad = as_written(ToolCall(name="weather", arguments='{"city": "Paris", "unit": "K"}'))
    assert follows(grammar, "hm</think>just text \n\n<", reasoning=True)
    assert follows(grammar, "hm</think>", reasoning=True)
    assert follows(grammar, f"hm</think>so:{good}", reasoning=True)
    assert follows(grammar, f"</think>{good}", reasoning=True)
    assert not follows(grammar, f"hm</think>so:{bad}", reasoning=True)
    assert not follows(grammar, "never closed", reasoning=True)
    assert not follows(grammar, f"a call while thinking{good}</think>", reasoning=True)
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
        (OutputFormat(kind="lark", source='start: "yes" | "no"'), "yes", "maybe"),
    ],
)
def test_formats_with_and_without_reasoning(output: OutputFormat, good: str, bad: str) -> None:
    grammar = format_grammar(output)
    assert follows(grammar, good)
    assert not follows(grammar, bad)
    assert follows(grammar, f"thought {bad} {good}</think>{good}", reasoning=True)
    assert not follows(grammar, f"thought</think>{bad}", reasoning=True)
    assert not follows(grammar, good, reasoning=True)


def test_what_cannot_be_made() -> None:
    with pytest.raises(ApiError, match="tokenizer has no"):
        calls_grammar(TOOLS, {}, forced=True, parallel=True)
    with pytest.raises(ApiError, match="tokenizer has no '</think>'"):
        marker({})
    with pytest.raises(GrammarError, match="JSON object"):
        Constraint(VOCABULARY, format_grammar(OutputFormat(kind="json_schema", source=[1])))


def test_a_client_cannot_loosen_white_space() -> None:
    """Our bound on white space stands above what a schema says."""
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "[ ]*"}}
    grammar = format_grammar(OutputFormat(kind="json_schema", source=schema))
    assert follows(grammar, "{" + " " * 32 + "}")
    assert not follows(grammar, "{" + " " * 33 + "}")
