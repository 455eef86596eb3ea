"""Replies of any content: every division gives the same events, no mark shows, and a parser gives back what was encoded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.text import (
    Event,
    Message,
    ReplyParser,
    Tokenizer,
    ToolCall,
    coalesce,
    collect,
    encode_chat,
    parse,
)

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"
EOS = "<｜end▁of▁sentence｜>"

# Whole marks, pieces of marks and text.
FRAGMENTS = [
    "<think>", "</think>", EOS, "<｜DSML｜ calls>", "</｜DSML｜ calls>", "<｜DSML｜ invoke name=\"f\">", "</｜DSML｜ invoke>",
    "<｜DSML｜ parameter name=\"a\" string=\"true\">", "<｜DSML｜ parameter name=\"b\" string=\"false\">",
    "</｜DSML｜ parameter>",
    "<｜DSML｜ parameter name=\"c\">", "｜DSML｜", "<｜DSML｜", "</｜DSML｜ inv", "<｜", "</", "<", "｜",
    "{\"k\": \"", "\"}", "{}", "{", "}",
    "\\", "7", "[1, 2]", "\n", "\n\n", " ", "word", "é🐈", ">", "\"",
]  # fmt: skip

MARKS = ("<think>", "</think>", "｜DSML｜", EOS)


@st.composite
def joinable(draw: st.DrawFn) -> str:
    """A mark cut in two by things that are dropped: further marks, some of them cut in the same way."""
    mark = draw(st.sampled_from(MARKS))
    for _ in range(draw(st.integers(1, 3))):
        outer = draw(st.sampled_from(MARKS))
        at = draw(st.integers(1, len(outer) - 1))
        mark = outer[:at] + mark + outer[at:]
    return mark


HALVES = st.sampled_from([half for mark in MARKS for at in range(1, len(mark)) for half in (mark[:at], mark[at:])])
PIECES = st.sampled_from(FRAGMENTS) | joinable() | HALVES


def events_of(pieces: list[str], reasoning: bool) -> list[Event]:
    parser = ReplyParser(reasoning=reasoning)
    return coalesce([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


@settings(max_examples=150, deadline=None)
@given(fragments=st.lists(PIECES, max_size=14), reasoning=st.booleans())
def test_every_division_in_two_and_single_characters(fragments: list[str], reasoning: bool) -> None:
    text = "".join(fragments)
    whole = events_of([text], reasoning)
    assert events_of(list(text), reasoning) == whole
    for at in range(len(text)):
        assert events_of([text[:at], text[at:]], reasoning) == whole


@settings(max_examples=400, deadline=None)
@given(fragments=st.lists(PIECES, max_size=40), reasoning=st.booleans(), data=st.data())
def test_any_division_and_what_always_holds(fragments: list[str], reasoning: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = events_of([text], reasoning)
    assert events_of(pieces, reasoning) == whole
    reply = collect(whole)
    assert reply == parse(text, reasoning=reasoning)
    for mark in MARKS:
        assert mark not in reply.reasoning
        assert mark not in reply.content
    if not reasoning:
        assert reply.reasoning == ""
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(NANO)


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<｜"), max_size=20)
HARD_WORDS = st.sampled_from(
    ["｜DSML｜", "</｜DSML｜ parameter>", "<｜DSML｜ calls>", EOS, "</think>", "</", "<", "｜", "\\uff5c", '"', "\n\n", "\ud800"]
)
VALUES = st.lists(WORDS | HARD_WORDS, max_size=3).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=json.dumps(arguments)),
    st.from_regex(r"([a-z]{1,5}::)?[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    st.dictionaries(VALUES, JSON_VALUES, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(reasoning=WORDS, content=WORDS, calls=st.lists(CALLS, max_size=3), thinking=st.booleans())
def test_the_parser_undoes_the_encoder(reasoning: str, content: str, calls: list[ToolCall], thinking: bool) -> None:
    question = Message(role="user", content="?")
    answer = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))
    prompt = encode_chat(tokenizer(), [question], thinking=thinking)
    whole = encode_chat(tokenizer(), [question, answer], thinking=thinking, add_generation_prompt=False)
    count = len(prompt.token_ids)
    assert whole.token_ids[:count] == prompt.token_ids
    text = tokenizer().decode(whole.token_ids[count:])
    assert whole.text == prompt.text + text
    assert text.endswith(EOS)
    reply = parse(text, reasoning=prompt.in_reasoning)
    assert reply.reasoning == (reasoning if thinking else "")
    assert reply.content == content
    assert [(call.name, json.loads(call.arguments), call.problem) for call in reply.tool_calls] == [
        (call.name, json.loads(call.arguments), "") for call in calls
    ]
    # Nothing that a client or the model wrote became a control token.
    control = [token for token in whole.token_ids if tokenizer().is_control(token)]
    allowed = {tokenizer().special_id(mark) for mark in ("｜DSML｜", "</think>", "<think>", "<｜User｜>", "<｜Assistant｜>", EOS)}
    allowed |= {tokenizer().special_id(mark) for mark in ("<｜begin▁of▁sentence｜>", "<｜System｜>")}
    assert set(control) <= allowed
    assert control.count(tokenizer().special_id(EOS)) == 1
    assert control.count(tokenizer().special_id("</think>")) == 1
