"""Grammars over the shipped tokenizer: what is allowed, going back, reasoning before the grammar, and every way to be wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarError,
    GrammarSupportMissing,
    GrammarTooLarge,
    GrammarUnsatisfiable,
)
from kvist.text.tokenizer import Tokenizer

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(NANO)


@pytest.fixture(scope="module")
def end(tokenizer: Tokenizer) -> int:
    return tokenizer.special_id("<｜end▁of▁sentence｜>")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, end: int) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, [end])


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def walk(state: Constraint, dice: random.Random, steps: int, end: int) -> list[int]:
    """Accept random allowed tokens until the end token or for `steps`."""
    tokens = []
    while len(tokens) < steps and end not in tokens:
        tokens.append(dice.choice(sorted(allowed(state.mask()))))
        state.accept(tokens[-1])
    return tokens


def test_masks_allow_exactly_the_tokens_that_keep_a_text_possible(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, end: int
) -> None:
    state = Constraint(vocabulary, Grammar.regex("ab|abc+"))
    can_follow = {
        t for t in range(len(tokenizer)) if "abcccccccccccc".startswith(tokenizer.decode([t])) and tokenizer.decode([t])
    }
    assert allowed(state.mask()) == {t for t in can_follow if not tokenizer.is_control(t)}
    for token in tokenizer.encode("ab"):
        state.accept(token)
    assert state.complete and not state.finished
    assert end in allowed(state.mask()) and all(set(tokenizer.decode([t])) == {"c"} for t in allowed(state.mask()) - {end})


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_out_satisfies_the_grammar(tokenizer: Tokenizer, vocabulary: GrammarVocabulary, end: int, seed: int) -> None:
    schema = {
        **PERSON,
        "properties": {"name": {"enum": ["Åsa", 'qu"ote', "\n"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    }
    tokens = walk(Constraint(vocabulary, Grammar.json_schema(schema)), random.Random(seed), 400, end)
    assert tokens[-1] == end
    value = json.loads(tokenizer.decode(tokens[:-1]))
    assert set(value) == {"name", "age"} and value["name"] in ("Åsa", 'qu"ote', "\n") and 0 <= value["age"] <= 99


def test_control_tokens_are_never_allowed(tokenizer: Tokenizer, vocabulary: GrammarVocabulary, end: int) -> None:
    free = allowed(Constraint(vocabulary, Grammar.regex(r"(?s:.*)")).mask())
    assert {t for t in free if tokenizer.is_control(t)} == {end}
    for token in tokenizer.encode("<think>"):
        assert token in free and not tokenizer.is_control(token)


@pytest.mark.parametrize("seed", range(5))
def test_going_back_and_forking_lead_to_the_same_masks(vocabulary: GrammarVocabulary, end: int, seed: int) -> None:
    dice = random.Random(seed)
    state, masks, tokens = Constraint(vocabulary, Grammar.json_schema(PERSON)), [], []
    for _ in range(120):
        if tokens and (dice.random() < 0.3 or tokens[-1] == end):
            count = dice.randrange(1, min(6, len(tokens)) + 1)
            state.rollback(count)
            del tokens[-count:], masks[-count:]
        mask = state.mask()
        fork = state.fork()
        walk(fork, dice, 3, end)
        assert np.array_equal(state.mask(), mask)
        masks.append(mask)
        tokens.append(dice.choice(sorted(allowed(mask))))
        state.accept(tokens[-1])
    again = Constraint(vocabulary, Grammar.json_schema(PERSON))
    for token, mask in zip(tokens, masks, strict=True):
        assert np.array_equal(again.mask(), mask)
        again.accept(token)
    with pytest.raises(ValueError, match=f"cannot take back {len(tokens) + 1} of {len(tokens)}"):
        state.rollback(len(tokens) + 1)


def test_masks_of_drafts_end_at_the_first_that_is_not_allowed(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    state = Constraint(vocabulary, Grammar.json_schema(PERSON))
    good = tokenizer.encode('{"name": "x"')
    masks = state.masks([*good, *tokenizer.encode("}"), *good])
    assert len(masks) == len(good) + 1
    step = Constraint(vocabulary, Grammar.json_schema(PERSON))
    for token, mask in zip([*good, None], masks, strict=True):
        assert np.array_equal(step.mask(), mask)
        if token is not None:
            step.accept(token)
    assert state.accepted == 0 and np.array_equal(state.mask(), masks[0])


def test_a_token_that_is_not_allowed_changes_nothing(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    state = Constraint(vocabulary, Grammar.json_schema(PERSON))
    before = state.mask()
    with pytest.raises(GrammarError, match="is not allowed as token 0 of this JSON schema"):
        state.accept(tokenizer.encode("x")[0])
    assert np.array_equal(state.mask(), before)


def test_a_limit_that_only_a_draft_meets_does_not_end_the_reply(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Constraint(vocabulary, Grammar.json_schema(PERSON))
    first, *drafts = tokenizer.encode('{"name": "x", "age": 3')
    state.accept(first)
    mask, fill = state.mask(), Constraint._fill

    def fails(self: Constraint, row: np.ndarray) -> None:
        if self.accepted == 3:
            self._matcher.consume_token(end)  # not allowed here: the library's matcher is of no use from now on
            self._raise_on_error()
        fill(self, row)

    monkeypatch.setattr(Constraint, "_fill", fails)
    assert len(state.masks(drafts)) == 2
    monkeypatch.undo()
    assert state.accepted == 1 and np.array_equal(state.mask(), mask)
    assert len(state.masks(drafts)) == len(drafts) + 1


def test_reasoning_is_free_and_the_grammar_follows(tokenizer: Tokenizer, vocabulary: GrammarVocabulary, end: int) -> None:
    mark = tokenizer.special_id("</think>")
    state = Constraint(vocabulary, Grammar.regex("yes|no"), start_after=[mark])
    free = {token for token in range(len(tokenizer)) if not tokenizer.is_control(token)} - {end} | {mark}
    thought, answer = tokenizer.encode("maybe } ["), tokenizer.encode("yes")
    masks = state.masks([*thought, mark, *answer, *thought])
    assert len(masks) == len(thought) + 1 + len(answer) + 1
    assert all(allowed(mask) == free for mask in masks[: len(thought) + 1])
    assert len(state.masks([thought[0], end, mark])) == 2, "a reply does not end before its grammar has begun"
    with pytest.raises(GrammarError, match=f"token {end} is not allowed"):
        state.accept(end)
    plain = Constraint(vocabulary, Grammar.regex("yes|no"))
    assert np.array_equal(masks[len(thought) + 1], plain.mask())
    for token in [*thought, mark, *answer]:
        assert not state.complete
        state.accept(token)
    assert state.complete and state.finished
    state.rollback(len(answer) + 1)
    assert allowed(state.mask()) == free and not state.complete
    state.accept(mark)
    assert np.array_equal(state.mask(), plain.mask())


def test_a_marker_of_several_tokens(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    """It overlaps itself, is taken back in the middle, and is not looked for again once the grammar has begun."""
    a, b, c = tokenizer.encode("abc")[0], tokenizer.encode("x")[0], tokenizer.encode("9")[0]
    marker = [a, b, a, c]
    state = Constraint(vocabulary, Grammar.regex("[abx9]{1,40}"), start_after=marker)
    plain = Constraint(vocabulary, Grammar.regex("[abx9]{1,40}"))
    way = [a, b, a, b, a, c]
    masks = state.masks(way)
    assert [np.array_equal(mask, plain.mask()) for mask in masks] == [False] * 6 + [True]
    for token in way[:5]:
        state.accept(token)
    state.rollback(2)
    for token in (b, a, c):
        assert not np.array_equal(state.mask(), plain.mask())
        state.accept(token)
    assert np.array_equal(state.mask(), plain.mask())
    copy = state.fork()
    for other in (state, copy):
        other.rollback(1)
        assert not np.array_equal(other.mask(), plain.mask())
        other.accept(c)
        assert np.array_equal(other.mask(), plain.mask())
    with pytest.raises(ValueError, match="token id 99999"):
        Constraint(vocabulary, Grammar.regex("a"), start_after=[a, 99999])


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar", "error", "message"),
    [
        (Grammar.json_schema(False), GrammarUnsatisfiable, "no text .* satisfies this JSON schema.*false"),
        (Grammar.json_schema({"enum": []}), GrammarUnsatisfiable, "no text"),
        (Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), GrammarUnsatisfiable, "incompatible types"),
        (Grammar.json_schema({"type": "string", "minLength": 5, "maxLength": 3}), GrammarUnsatisfiable, "minLength"),
        (
            Grammar.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
            GrammarUnsatisfiable,
            "infinitely deep",
        ),
        (Grammar.json_schema({"not": {"type": "string"}}), GrammarError, 'Unimplemented keys: \\["not"\\]; correct or leave out'),
        (Grammar.json_schema('{"const": "\\ud800"}'), GrammarError, "the schema cannot be read: .*hex escape"),
        (Grammar.json_schema({"$ref": "http://127.0.0.1:9/x"}), GrammarError, "does not fetch"),
        (Grammar.json_schema("{"), GrammarError, "the schema is no JSON"),
        (Grammar.json_schema("3"), GrammarError, "a schema is a JSON object or a boolean, got int"),
        (Grammar.json_schema(nested(5000)), GrammarTooLarge, "nested too deeply"),
        (Grammar.json_schema(nested(300)), GrammarTooLarge, "recursion limit"),
        (Grammar.regex("("), GrammarError, "regular expression cannot be compiled.*unclosed group"),
        (Grammar.regex("(?=a)b"), GrammarError, "look-ahead"),
        (Grammar.regex(r"[^\s\S]"), GrammarUnsatisfiable, "no text .* satisfies this regular expression"),
        (Grammar.lark("start: other"), GrammarError, "unknown name"),
        (Grammar.lark("start: start 'a'"), GrammarError, "Lark grammar"),
        (Grammar.lark('start: start "a"'), GrammarUnsatisfiable, "no text"),
        (Grammar.lark('start: "a" start'), GrammarTooLarge, "limit"),
        (Grammar.lark("start: " + "|".join(['"a"'] * 12000)), GrammarTooLarge, "max is"),
    ],
)
def test_bad_grammars(vocabulary: GrammarVocabulary, grammar: Grammar, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Constraint(vocabulary, grammar)
    assert type(caught.value) is error and len(str(caught.value)) < 700


def test_schemas_that_end_are_not_refused(vocabulary: GrammarVocabulary) -> None:
    leaf = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    for schema in (
        True,
        {"type": "object", "properties": {"a": leaf}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "string"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {
            "$defs": {"n": {"type": "array", "prefixItems": [leaf], "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
            "$ref": "#/$defs/n",
        },
    ):
        Constraint(vocabulary, Grammar.json_schema(schema))


def test_grammar_texts_have_a_limit() -> None:
    with pytest.raises(GrammarTooLarge, match=f"has {MAX_GRAMMAR_BYTES + 1} bytes, at most {MAX_GRAMMAR_BYTES}"):
        Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1))
    with pytest.raises(GrammarError, match="character 1 of the regular expression is half of a surrogate pair"):
        Grammar.regex("a\ud800")
    with pytest.raises(GrammarError, match="must be a text that is not empty"):
        Grammar.lark("")
    with pytest.raises(GrammarError, match="one of json_schema, regex, lark, got 'xml'"):
        Grammar("xml", "a")
    with pytest.raises(GrammarError, match="the schema is no JSON"):
        Grammar.json_schema({"const": object()})


def test_a_vocabulary_needs_an_end(tokenizer: Tokenizer) -> None:
    for ends in ([], [len(tokenizer)], [-1]):
        with pytest.raises(ValueError, match="without one no reply can end"):
            GrammarVocabulary(tokenizer, ends)


HOSTILE = """
from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import Grammar
from kvist.text.tokenizer import Tokenizer
import sys
rules = "".join(f"{name}{i}:{name}{i + 1}\\n" for name in [sys.argv[2]] for i in range(4400))
text = f"start: {sys.argv[2]}0\\n{rules}{sys.argv[2]}4400:\\"b\\""
vocabulary = GrammarVocabulary(Tokenizer(sys.argv[1]), [1])
state = Constraint(vocabulary, Grammar.lark(text))
state.masks([5, 6])
state.fork().rollback(0)
print("alive")
"""


@pytest.mark.parametrize("name", ["q", "Q"])
def test_a_chain_of_rules_does_not_exhaust_the_stack(name: str) -> None:
    # in a process of its own: overflowing the library's stack would end it
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(NANO), name], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "alive", (done.returncode, done.stderr[-500:])


def test_without_the_library_a_grammar_is_refused_by_name(
    tokenizer: Tokenizer, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarSupportMissing, match=r"pip install '\.\[grammar\]'"):
        GrammarVocabulary(tokenizer, [end])
