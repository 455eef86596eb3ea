"""Engram's token map: which token ids count as the same word form. Owns the normalisation and the order of classes.

Must not know hashing, tables or the model; works on a `tokenizer.json` alone. Source: facts section 8; report 2.4.2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from kvist.text.tokenizer import read_library

_LONE_SPACE = "\ue000"
_UNDECODABLE = "\ufffd"


def token_map(file: str | Path) -> npt.NDArray[np.int32]:
    """Class of every token id 0..n-1 of a `tokenizer.json`, int32 [n], added tokens included.

    Classes count up from 0 in order of first id. Ids whose text differs only in case, accents, compatibility forms or
    surrounding space share a class. A token that is no whole text (part of a character) is its own class. `TokenizerError`
    if the file is no tokenizer.
    """
    _, tokenizer = read_library(Path(file))
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
    normaliser = _normaliser()
    classes: dict[str, int] = {}
    keys = (_key(tokenizer, normaliser, token, text) for token, text in zip(ids, texts, strict=True))
    return np.fromiter((classes.setdefault(key, len(classes)) for key in keys), dtype=np.int32, count=len(ids))


def class_count(classes: npt.NDArray[np.int32]) -> int:
    """How many classes a token map has: they are numbered 0, 1, 2, ... without holes."""
    return int(classes.max(initial=-1)) + 1


def _key(tokenizer: Tokenizer, normaliser: normalizers.Normalizer, token: int, text: str) -> str:
    if _UNDECODABLE in text:
        return tokenizer.id_to_token(token) or ""
    return normaliser.normalize_str(text) or text


def _normaliser() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # A token that is one space must survive the stripping that other tokens undergo.
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
