"""The tokenizer of a checkpoint: text to ids and back, with the line between plain text and control tokens kept strict.

Owns the reading of `tokenizer.json` (byte-level BPE, as in the release) and incremental decoding. Must not know prompts,
roles or models: control tokens are addressed by the spelling the file has, or by id. Source: facts sections 12 and 13.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Library

MAX_FILE_BYTES = 128 << 20
"""More than ten times the released file."""
_LONG = 4096
"""Characters from which on a text is encoded beside other threads; a short one would only wait for the library's own."""


class TokenizerError(ValueError):
    """A tokenizer file, a token id or a text that cannot be used; the message names it and the way out."""


class MissingSpecialToken(TokenizerError):
    """The tokenizer file has no added token of the spelling that was asked for."""


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for every byte: most of Latin-1 stands for itself, the rest moves past U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    table = {chr(byte): byte for byte in visible}
    table.update({chr(0x100 + at): byte for at, byte in enumerate(hidden)})
    return table


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A `tokenizer.json`, read once. Immutable and safe to share between threads; `len()` counts added tokens too.

    Added tokens (`<think>`, `<｜User｜>`, placeholders, ...) are this class's control tokens: plain text never turns into
    one, whatever it spells, because it is encoded by a second copy of the tokenizer that has none.
    """

    def __init__(self, file: str | Path) -> None:
        """Reads `file`, a `tokenizer.json` or a folder that holds one. Raises `TokenizerError` if it is missing or unusable."""
        path = Path(file)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        state, self._with_control = _read(self.path)
        self._control_ids = _control_ids(self.path, state, self._with_control)
        self._plain = _without_control(state)
        self._size = self._with_control.get_vocab_size(with_added_tokens=True)
        self._bytes = [self._spelled(token) for token in range(self._size)]
        self._control = frozenset(self._control_ids.values())
        self.longest = max(map(len, self._bytes), default=1)
        """Bytes of the longest token: a text of more than `n * longest` characters has more than `n` tokens."""

    def __len__(self) -> int:
        return self._size

    def _spelled(self, token: int) -> bytes:
        text = self._with_control.id_to_token(token)
        if text is None:  # a hole in the file's numbering decodes to nothing
            return b""
        # An added token is text as it stands; `É` in one is not byte 0xC9.
        if text in self._control_ids or any(character not in _BYTE_OF for character in text):
            return text.encode()
        return bytes(_BYTE_OF[character] for character in text)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`, nothing added in front or behind.

        With `allow_special` the spelling of an added token becomes that token: only for text that no user, document or
        tool wrote. Raises `TokenizerError` for a text that is no valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} of the text is {text[error.start]!r}, half of a surrogate pair: "
                "it has no UTF-8 form; send the whole character or leave it out"
            ) from error
        library = self._with_control if allow_special else self._plain
        if len(text) < _LONG:
            return list(library.encode(text, add_special_tokens=False).ids)
        # The same ids in a third of the time, and other threads go on meanwhile: `encode` holds Python's lock throughout.
        return list(library.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. `skip_control` leaves out added tokens.

        Equal to the concatenation of what a `StreamDecoder` gives. Raises `TokenizerError` for an id outside the vocabulary.
        """
        stream = StreamDecoder(self, skip_control=skip_control)
        return stream.feed(ids) + stream.finish()

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that `token` stands for, perhaps part of a character. Raises `TokenizerError` if out of range."""
        if not 0 <= token < self._size:
            raise TokenizerError(f"token id {token} is outside 0..{self._size - 1} of {self.path}")
        return self._bytes[token]

    def is_control(self, token: int) -> bool:
        """Whether `token` is an added token."""
        return token in self._control

    def special_id(self, spelling: str) -> int:
        """Id of the added token that the file spells so. Raises `MissingSpecialToken`."""
        found = self._control_ids.get(spelling)
        if found is None:
            raise MissingSpecialToken(
                f"{self.path} has no special token {spelling!r} (it has {len(self._control_ids)} others): "
                "this tokenizer belongs to another release; use the one beside the model's weights"
            )
        return found

    def has_special(self, spelling: str) -> bool:
        """Whether the file has an added token of this spelling."""
        return spelling in self._control_ids


def read_tokenizer_file(path: Path) -> bytes:
    """The bytes of a `tokenizer.json`. Raises `TokenizerError` if it is missing, no plain file, or larger than any could be."""
    try:
        if path.exists() and not path.is_file():
            raise TokenizerError(f"{path} cannot be read as a tokenizer: it is no plain file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} has {size} bytes; a tokenizer has at most {MAX_FILE_BYTES}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TokenizerError(
            f"no tokenizer at {path}: a model folder holds tokenizer.json beside its config.json; copy it there"
        ) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error


def read_library(path: Path) -> tuple[str, _Library]:
    """The text of a `tokenizer.json` and the library's tokenizer made from it. Raises `TokenizerError`."""
    try:
        text = read_tokenizer_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    try:
        return text, _Library.from_str(text)
    except BaseException as error:
        # The library raises plain Exception for most problems; a panic of its Rust code is not even that.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path} is not a tokenizer: {error}; fetch it again") from error


def _read(path: Path) -> tuple[dict[str, Any], _Library]:
    text, library = read_library(path)
    state: dict[str, Any] = json.loads(text)
    kinds = state["model"].get("type"), (state.get("decoder") or {}).get("type")
    if kinds != ("BPE", "ByteLevel"):
        raise TokenizerError(
            f"{path} has model {kinds[0]} and decoder {kinds[1]}; this model family uses byte-level BPE (BPE, ByteLevel)"
        )
    return state, library


def _control_ids(path: Path, state: dict[str, Any], library: _Library) -> dict[str, int]:
    """Ids of the added tokens by spelling; refuses files in which they are not the file's, or are ordinary text too."""
    model = state["model"]
    merges = (merge if isinstance(merge, list) else merge.split(" ") for merge in model.get("merges", []))
    ordinary = {piece for merge in merges for piece in (*merge, "".join(merge))} | set(_BYTE_OF)
    ids: dict[str, int] = {}
    for token in state.get("added_tokens", []):
        text: str = token["content"]
        number = library.token_to_id(text)
        if number is None or number != token["id"]:
            raise TokenizerError(
                f"{path} gives added token {text!r} the id {token['id']}, but its place is {number}: renumber it"
            )
        if text in ordinary:
            raise TokenizerError(f"{path} has {text!r} both as an added token and as a piece of ordinary text; remove one")
        ids[text] = number
    return ids


def _without_control(state: dict[str, Any]) -> _Library:
    """The same tokenizer without added tokens, so that no text can match one.

    They leave the BPE vocabulary too (some files list them there): a BPE that looks whole words up would find them.
    """
    model = dict(state["model"])
    added = {token["content"] for token in state.get("added_tokens", [])}
    model["vocab"] = {text: number for text, number in model["vocab"].items() if text not in added}
    if model.get("unk_token") in added:
        model["unk_token"] = None
    return _Library.from_str(json.dumps({**state, "model": model, "added_tokens": [], "post_processor": None}))


class StreamDecoder:
    """Turns a stream of ids into text as early as UTF-8 allows: only the bytes of an unfinished character are held.

    A character that really is U+FFFD is complete and passes at once; an unfinished one is given up as U+FFFD when a control
    token or the end follows. One per reply; not thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Text that became certain with `ids`, perhaps empty. Raises `TokenizerError` for an id outside the vocabulary."""
        pieces = []
        for token in ids:
            spelled = self._tokenizer.token_bytes(token)
            if self._tokenizer.is_control(token):
                pieces.append(self.finish())
                if self._skip_control:
                    continue
            pieces.append(self._utf8.decode(spelled))
        return "".join(pieces)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing. The decoder can be used again afterwards."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
