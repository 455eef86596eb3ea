"""The reply parser's rules, each on the smallest reply that shows it: bug cases PAR-01, 03, 05, 07, 09."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

import pytest

from kvist.text import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ReplyParser,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    coalesce,
    collect,
    parse,
)

EOS = "<｜end▁of▁sentence｜>"
CITY = '<｜DSML｜ parameter name="city" string="false">{}</｜DSML｜ parameter>'


def invoke(name: str, *body: str) -> str:
    return "\n".join([f'<｜DSML｜ invoke name="{name}">', *body, "</｜DSML｜ invoke>"])


def block(*calls: str) -> str:
    return "\n".join(["<｜DSML｜ calls>", *calls, "</｜DSML｜ calls>"])


TWO_CALLS = block(invoke("weather", CITY.format(42)), invoke("weather", CITY.format(-7)))


def in_pieces(pieces: Iterable[str], *, reasoning: bool) -> list[Event]:
    parser = ReplyParser(reasoning=reasoning)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return coalesce([*events, *parser.finish()])


def divisions(text: str) -> Iterator[list[str]]:
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield from (
        [text[:first], text[first:second], text[second:]]
        for first in range(0, len(text), 5)
        for second in range(first, len(text), 5)
    )


def same_in_every_division(text: str, *, reasoning: bool) -> Reply:
    """The reply, after checking that every division of its text gives the same events."""
    whole = in_pieces([text], reasoning=reasoning)
    for pieces in divisions(text):
        assert in_pieces(pieces, reasoning=reasoning) == whole, pieces
    reply = parse(text, reasoning=reasoning)
    assert reply == collect(whole)
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    return reply


def test_par_01_two_calls_in_every_division():
    reply = same_in_every_division("I look it up.\n\n" + TWO_CALLS, reasoning=False)
    assert reply.content == "I look it up."
    assert [(call.name, call.arguments, call.problem) for call in reply.tool_calls] == [
        ("weather", '{"city": 42}', ""),
        ("weather", '{"city": -7}', ""),
    ]
    events = in_pieces([TWO_CALLS], reasoning=False)
    assert events == [
        ToolCallStart(0, "weather"),
        ToolArgumentsDelta(0, '{"city": 42}'),
        ToolCallEnd(0),
        ToolCallStart(1, "weather"),
        ToolArgumentsDelta(1, '{"city": -7}'),
        ToolCallEnd(1),
    ]


def test_text_streams_at_once_and_string_arguments_as_they_come():
    parser = ReplyParser(reasoning=True)
    assert parser.feed("Let me") == [ReasoningDelta("Let me")]
    assert parser.feed("</think>") == []
    assert parser.feed("Yes") == [ContentDelta("Yes")]
    assert parser.feed('\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="ns::say">\n') == [ToolCallStart(0, "ns::say")]
    assert parser.feed('<｜DSML｜ parameter name="text" string="true">a "b"\n') == [
        ToolArgumentsDelta(0, '{"text": "'),
        ToolArgumentsDelta(0, 'a \\"b\\"\\n'),
    ]
    assert parser.feed("c</") == [ToolArgumentsDelta(0, "c")]


def test_values_are_raw_text_or_json():
    body = [
        '<｜DSML｜ parameter name="text" string="true">  1 < 2 </b>\n"x" \\ é🐈 </｜DSML｜ parameter>',
        '<｜DSML｜ parameter name="list" string="false"> [1, {"a": null}] </｜DSML｜ parameter>',
        '<｜DSML｜ parameter name="empty" string="true"></｜DSML｜ parameter>',
    ]
    reply = same_in_every_division(block(invoke("f", *body)), reasoning=False)
    assert json.loads(reply.tool_calls[0].arguments) == {
        "text": '  1 < 2 </b>\n"x" \\ é🐈 ',
        "list": [1, {"a": None}],
        "empty": "",
    }
    assert reply.tool_calls[0].problem == ""


@pytest.mark.parametrize(
    ("value", "kept"), [("tomorrow", "tomorrow"), ("NaN", "NaN"), ("", ""), ("[1, 2", "[1, 2"), ("[" * 5000, "[" * 5000)]
)
def test_a_value_that_should_be_json_and_is_not_stays_as_text(value, kept):
    reply = parse(block(invoke("f", CITY.format(value))), reasoning=False)
    assert json.loads(reply.tool_calls[0].arguments) == {"city": kept}
    assert "not valid JSON" in reply.tool_calls[0].problem


def test_the_first_of_two_equal_parameters_counts():
    reply = same_in_every_division(block(invoke("f", CITY.format(1), CITY.format(2))), reasoning=False)
    assert reply.tool_calls[0].arguments == '{"city": 1}'
    assert "twice" in reply.tool_calls[0].problem


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("think hard\n\n" + TWO_CALLS, "think hard", "", 2),  # no end-of-thinking mark
        ("think hard</think>\n\n" + TWO_CALLS, "think hard", "", 2),
        ("a</think>see <｜DSML｜ here", "a", "see  here", 0),
        ("a</think>see ｜DSML｜ and </｜DSML｜ invoke> too", "a", "see  and  too", 0),
        ('a</think>x<｜DSML｜ invoke name="f">y</｜DSML｜ invoke>z', "a", "xyz", 0),
        ('a</think>x<｜DSML｜ invoke name="f"\ny', "a", 'x name="f"\ny', 0),
        ("one<think>two</think>three", "onetwo", "three", 0),
        ("<think>two</think>three", "two", "three", 0),
        ("one</think>two</think>three<think>four", "one", "twothreefour", 0),
        ("r</think>before\n\n" + TWO_CALLS + "\n\nafter\n", "r", "before\n\nafter\n", 2),
        ("r</think>" + TWO_CALLS + "  \nafter", "r", "after", 2),
        ("r</think>" + TWO_CALLS + "mid\n\n" + TWO_CALLS + "after", "r", "mid", 2),
        ("r</think>b" + EOS + "c</think>d" + TWO_CALLS, "r", "b", 0),
        ("r</think>\n\n\n" + TWO_CALLS, "r", "\n", 2),
        ("r\n\n</think>b\n\n", "r\n\n", "b\n\n", 0),
        ("r</think>ends in a bar ｜", "r", "ends in a bar ｜", 0),
        ("r</think>1 < 2 <b> </i", "r", "1 < 2 <b> </i", 0),
        ("r</think>cut <｜DSML｜ cal", "r", "cut ", 0),
        ("r</think>cut <｜end▁of", "r", "cut ", 0),
    ],
)
def test_par_03_boundaries(text, reasoning, content, calls):
    reply = same_in_every_division(text, reasoning=True)
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("｜</think>DSML｜", ""),
        ("<thi</think>nk>", ""),
        ("a<｜end▁of<think>▁sentence｜>b", "ab"),
        ("x<thi<th</think>ink></think>nk>y", "xy"),  # joins twice
        ("<<</think>think>think>", ""),
        ("<thi</think>s", "<this"),  # joins to no mark: text
        ("a<｜DS<think>", "a"),  # a half at the end
        ("<｜DS</think>ML｜ calls>", " calls>"),  # what joins opens nothing
    ],
)
def test_par_03_dropping_a_mark_joins_no_other(text, content):
    assert same_in_every_division(text, reasoning=False) == Reply(content=content)


def test_par_03_halves_in_reasoning_do_not_reach_content():
    assert same_in_every_division("a<th<think>ink>b<thi</think>nk>c", reasoning=True) == Reply(reasoning="ab<thi", content="nk>c")


OBJECT = {"value": "café 🐈", "deep": {"a": [{"b": "}{"}], "q": 'say "hi" \\'}, "tag": "</｜DSML｜ invoke></｜DSML｜ calls>"}


def test_par_05_a_json_object_as_body():
    text = block(invoke("inspect", json.dumps(OBJECT, ensure_ascii=False)), invoke("inspect", "{}"))
    reply = same_in_every_division(text, reasoning=False)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == [OBJECT, {}]
    assert {call.problem for call in reply.tool_calls} == {""}
    raw = text.encode()
    for at in range(len(raw)):  # cut at every byte, decoded as a stream would be
        held = len(raw[:at]) - len(raw[:at].decode(errors="ignore").encode())
        pieces = [raw[: at - held].decode(), raw[at - held :].decode()]
        assert collect(in_pieces(pieces, reasoning=False)) == reply


@pytest.mark.parametrize(
    ("body", "arguments", "problem"),
    [
        ('{"a": 1} junk', {"a": 1}, "left out"),
        ('{"a": 1,}', {"arguments": '{"a": 1,}'}, "not valid JSON"),
        ('{"a": {"b": 1}', {"arguments": '{"a": {"b": 1}\n'}, "not valid JSON"),
        ("junk { more", {}, "left out"),
        ("", {}, ""),
        (CITY.format(1) + " junk " + CITY.format(2).replace("city", "town"), {"city": 1, "town": 2}, "left out"),
        ('<｜DSML｜ parameter name="a" string="true">x', {"a": "x\n"}, "not closed"),
        ('<｜DSML｜ parameter string="true">x</｜DSML｜ parameter>', {"": "x"}, "no name"),
    ],
)
def test_par_05_faulty_bodies_have_a_defined_result(body, arguments, problem):
    text = block(invoke("f", body), invoke("g", CITY.format(3)))
    reply = same_in_every_division(text, reasoning=False)
    assert [call.name for call in reply.tool_calls] == ["f", "g"]
    assert json.loads(reply.tool_calls[0].arguments) == arguments
    assert problem in reply.tool_calls[0].problem
    assert bool(problem) == bool(reply.tool_calls[0].problem)
    assert reply.tool_calls[1].arguments == '{"city": 3}'


def test_an_unclosed_json_string_ends_with_the_reply():
    reply = same_in_every_division(block(invoke("f", '{"a": "open')), reasoning=False)
    assert json.loads(reply.tool_calls[0].arguments)["arguments"].startswith('{"a": "open\n</｜DSML｜')
    assert "ended inside the call" in reply.tool_calls[0].problem


def test_a_call_without_name_and_one_that_is_not_closed():
    text = "<｜DSML｜ calls>\n<｜DSML｜ invoke>\n" + CITY.format(1) + "\n" + invoke("g", CITY.format(2)) + "\n</｜DSML｜ calls>"
    reply = same_in_every_division(text, reasoning=False)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("", '{"city": 1}'), ("g", '{"city": 2}')]
    assert "no name" in reply.tool_calls[0].problem


@pytest.mark.parametrize("tail", ["", EOS])
def test_par_07_reasoning_that_never_closes(tail):
    text = "Good morning! How can I help you today?"
    assert same_in_every_division(text + tail, reasoning=True) == Reply(reasoning=text)
    assert same_in_every_division(text + tail, reasoning=False) == Reply(content=text)


def test_par_09_calls_before_the_end_of_thinking():
    call = invoke("get_time", '<｜DSML｜ parameter name="city" string="true">Tokyo</｜DSML｜ parameter>')
    for gap in ("", "\n\n"):
        reply = same_in_every_division("Let me check the time" + gap + block(call) + "</think>", reasoning=True)
        assert (reply.reasoning, reply.content) == ("Let me check the time", "")
        assert [(c.name, c.arguments, c.problem) for c in reply.tool_calls] == [("get_time", '{"city": "Tokyo"}', "")]


def test_a_reply_cut_anywhere_has_valid_arguments_and_no_marks():
    text = "Let me see</think>So:\n\n" + TWO_CALLS + "\n" + EOS
    for end in range(len(text)):
        reply = parse(text[:end], reasoning=True)
        assert "Let me see</think>".startswith(reply.reasoning)
        assert "｜" not in reply.content + reply.reasoning
        assert "think>" not in reply.content + reply.reasoning
        for call in reply.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
    parser = ReplyParser(reasoning=True)
    parser.feed(text[:40])
    parser.finish()
    assert parser.finish() == []
    assert parser.feed("more") == []


@pytest.mark.parametrize(
    "text",
    [
        "<" * 200_000,
        "<think>" * 40_000,
        "｜DSML｜" * 40_000,
        '<｜DSML｜ invoke name="' * 10_000,
        "<｜DSML｜ calls>" + "<｜DSML｜ x" * 20_000,
        '<｜DSML｜ calls><｜DSML｜ invoke name="f">{' + '{"' * 100_000,
        '<｜DSML｜ calls><｜DSML｜ invoke name="f"><｜DSML｜ parameter name="a" string="true">' + "</｜DSML｜" * 30_000,
        "\n" * 300_000,
        "<thi" * 30_000 + "</think>" + "nk>" * 30_000,
        "<｜<｜D｜DSM</" * 15_000,
    ],
    ids=["lt", "think", "bare", "stray", "inside", "object", "value", "newlines", "joined", "halves"],
)
def test_hostile_replies_take_linear_time(text):
    began = time.perf_counter()
    whole = in_pieces([text], reasoning=False)
    assert in_pieces([text[at : at + 7] for at in range(0, len(text), 7)], reasoning=False) == whole
    assert time.perf_counter() - began < 15
