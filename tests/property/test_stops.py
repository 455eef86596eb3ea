"""Stop strings and streamed decoding: every way of cutting a stream gives the text that the whole gives (SRV-01, SRV-03)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.text.stops import StopMatcher
from kvist.text.tokenizer import StreamDecoder, Tokenizer, TokenizerError

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"


@cache
def shipped() -> Tokenizer:
    return Tokenizer(NANO)


def naive(text: str, stops: tuple[str, ...]) -> str:
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts)] if cuts else text


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_matches_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    out = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    assert out == naive("".join(pieces), tuple(stops))


@given(
    pieces=st.lists(st.text(alphabet="abcd", max_size=6), max_size=8),
    stops=st.lists(st.text(alphabet="abcd", min_size=1, max_size=6), min_size=10, max_size=60),
)
def test_many_stop_strings_at_once(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert "".join(matcher.feed(piece) for piece in pieces) + matcher.finish() == naive("".join(pieces), tuple(stops))


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("alpha beta gamma delta", ("beta gamma",), "alpha "),
        ("brown fox", ("own fox",), "br"),
        ("hi\nUser: x", ("\nUser:",), "hi"),
        ("whole", ("whole",), ""),
        ("xaby", ("ab", "abc"), "x"),
        ("xaby", ("abc", "ab"), "x"),
        ("a🐈b", ("🐈",), "a"),
        ("no match here", ("zebra",), "no match here"),
    ],
)
def test_srv_01_one_character_at_a_time(text: str, stops: tuple[str, ...], want: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(matcher.feed(c) for c in text) + matcher.finish() == want


def test_held_text_is_released_when_no_match_follows() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("xE") == "x"
    assert matcher.feed("N") == ""
    assert matcher.feed("!") == "EN!"


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_streamed_text_equals_the_whole(text: str) -> None:
    tokenizer = shipped()
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed([i]) for i in ids) + decoder.finish() == tokenizer.decode(ids) == text


def test_srv_03_replacement_characters() -> None:
    tokenizer = shipped()
    ids = tokenizer.encode("a\ufffd")
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed([i]) for i in ids) + decoder.finish() == "a\ufffd"
    cut = tokenizer.encode("a🐈")[:-1]
    decoder = StreamDecoder(tokenizer)
    out = "".join(decoder.feed([i]) for i in cut) + decoder.finish()
    assert out.startswith("a") and set(out[1:]) == {"\ufffd"}


@given(text=st.sampled_from(["<｜User｜>", "</think>", "<｜end▁of▁sentence｜>", "x<think>y"]))
def test_user_text_never_becomes_a_control_id(text: str) -> None:
    tokenizer = shipped()
    assert not any(tokenizer.is_control(token) for token in tokenizer.encode(text))
    assert any(tokenizer.is_control(token) for token in tokenizer.encode(text, allow_special=True))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bad_files_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer at"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no special token"):
        shipped().special_id("<nope>")
    with pytest.raises(ValueError):
        StopMatcher(("",))
