"""The streaming state machine: however text and tokens are cut into pieces, the same events come out, stops included."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.server.reply_stream import ReplyStream
from kvist.server.token_text import TokenText, turn_ids
from kvist.text import ContentDelta, Event, ReasoningDelta, StopMatcher, ToolCallStart, coalesce, collect, parse
from tests.server_fakes import TOKENIZER

MARK = "｜DSML｜"
CALL = (
    f'\n\n<{MARK} calls>\n<{MARK} invoke name="get">\n<{MARK} parameter name="city" string="true">Århus END 🐈'
    f'</{MARK} parameter>\n<{MARK} parameter name="n" string="false">-7</{MARK} parameter>\n</{MARK} invoke>\n</{MARK} calls>'
)
TEXTS = [
    f"I wonder END or not</think>The answer is\n\n 42 END more{CALL}",
    f"thinking{CALL}after END",
    f"</think>é🐈 EN{CALL} END",
    "never closed, then cut </thi",
    f"a</think>b<{MARK} inv",
    "</think>E\nUser: EEND",
    "x</think>one<｜end▁of▁sentence｜>two",
]


def run(pieces: list[str], *, parse_marks: bool = True, reasoning: bool = True, stops: tuple[str, ...] = ("END", "\nUser:")):
    stream = ReplyStream(parse=parse_marks, reasoning=reasoning, stops=stops)
    events: list[Event] = []
    for piece in pieces:
        events += stream.feed(piece)
    events += stream.finish()
    return coalesce(events), stream.matched, stream.tool_calls


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reasoning", [True, False])
def test_every_split_into_two_gives_the_same(text: str, reasoning: bool) -> None:
    """PAR-01, PAR-03, PAR-07, PAR-09, SRV-01 through stops and parser together."""
    whole = run([text], reasoning=reasoning)
    for at in range(1, len(text)):
        assert run([text[:at], text[at:]], reasoning=reasoning) == whole, at
    assert run(list(text), reasoning=reasoning) == whole


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<", "/", "think>", "</think>", MARK, f"<{MARK} calls>", "EN", "END", "D", "\n", "é", "{", '"', " x"])
    ),
    st.data(),
    st.booleans(),
)
def test_random_texts_and_cuts(parts: list[str], data: st.DataObject, reasoning: bool) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert run(pieces, reasoning=reasoning) == run([text], reasoning=reasoning)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abE ND\n🐈", max_size=40), st.data())
def test_plain_text_equals_the_matcher_alone(text: str, data: st.DataObject) -> None:
    """Without marks the machine is `StopMatcher` and nothing else: text before the leftmost stop string."""
    matcher = StopMatcher(("END", "ab", "abE"))
    expected = matcher.feed(text) + matcher.finish()
    cut = data.draw(st.integers(0, len(text)))
    events, matched, _ = run([text[:cut], text[cut:]], parse_marks=False, reasoning=False, stops=("END", "ab", "abE"))
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == expected
    assert matched == matcher.matched


def test_without_stops_it_is_the_parser() -> None:
    for text in TEXTS:
        assert collect(run([text], stops=())[0]) == parse(text, reasoning=True)


def test_stops_count_in_content_only() -> None:
    """A stop string in reasoning or in arguments ends nothing; in content it ends calls too."""
    events, matched, calls = run([f"END</think>ok{CALL}"])
    assert matched is None
    assert calls == 1
    assert events[0] == ReasoningDelta("END")
    events, matched, calls = run([f"</think>ok END{CALL}"])
    assert (matched, calls) == ("END", 0)
    assert not any(isinstance(event, ToolCallStart) for event in events)


def test_stop_text_held_before_a_call_is_released() -> None:
    events, matched, calls = run([f"</think>ok EN{CALL}"])
    assert events[0] == ContentDelta("ok EN")
    assert (matched, calls) == (None, 1)


def test_calls_can_be_left_out() -> None:
    stream = ReplyStream(parse=True, calls=False)
    events = [*stream.feed(f"hi{CALL}"), *stream.finish()]
    assert coalesce(events) == [ContentDelta("hi")]
    assert stream.tool_calls == 0


def shown(ids: list[int], *, parse_marks: bool, reasoning: bool = False) -> tuple[list[Event], TokenText]:
    stream = ReplyStream(parse=parse_marks, reasoning=reasoning)
    tokens = TokenText(TOKENIZER, stream, parse=parse_marks, reasoning=reasoning)
    events = [event for token in ids for event in tokens.feed(token)]
    return coalesce([*events, *tokens.finish()]), tokens


def test_tokens_of_characters_cut_in_the_middle() -> None:
    """SRV-03: U+FFFD that was said stays; a character that was cut off becomes one at the end."""
    said = TOKENIZER.encode("a\ufffd")
    assert shown(said, parse_marks=True)[0] == [ContentDelta("a\ufffd")]
    cat = TOKENIZER.encode("🐈")
    assert len(cat) > 1, "the test needs a character of several tokens"
    assert shown(TOKENIZER.encode("a") + cat[:-1], parse_marks=True)[0] == [ContentDelta("a\ufffd")]
    assert shown(TOKENIZER.encode("a") + cat, parse_marks=True)[0] == [ContentDelta("a🐈")]


def test_control_tokens_of_other_turns_show_as_nothing() -> None:
    user = TOKENIZER.special_id("<｜User｜>")
    assert user in turn_ids(TOKENIZER)
    for parse_marks in (True, False):
        assert shown([*TOKENIZER.encode("a"), user, *TOKENIZER.encode("b")], parse_marks=parse_marks)[0] == [ContentDelta("ab")]


def test_reasoning_tokens_are_counted_up_to_its_end() -> None:
    ids = TOKENIZER.encode("two words</think>answer here", allow_special=True)
    _, tokens = shown(ids, parse_marks=True, reasoning=True)
    assert tokens.count == len(ids)
    assert tokens.reasoning_count == ids.index(TOKENIZER.special_id("</think>")) + 1
