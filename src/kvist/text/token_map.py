"""Engram's token map: which token ids count as the same word form. Owns the normalisation and the order of classes.

Must not know hashing, tables or the model; works on a `tokenizer.json` alone. Source: facts section 8; report 2.4.2.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

_LONE_SPACE = "\ue000"
_UNDECODABLE = "\ufffd"


def token_map(file: str | Path) -> list[int]:
    """Class of every token id 0..n-1 of a `tokenizer.json`, added tokens included; classes count up in order of first id.

    Ids whose text differs only in case, accents, compatibility forms or surrounding space share a class. A token that is no
    whole text (part of a character) is its own class. ValueError if the file is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every problem
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    classes: dict[str, int] = {}
    normaliser = _normaliser()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return [classes.setdefault(_key(tokenizer, normaliser, token), len(classes)) for token in range(size)]


def _key(tokenizer: Tokenizer, normaliser: normalizers.Normalizer, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
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
