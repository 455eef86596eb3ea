"""A `tokenizer.json` as the model sees it: text to ids, ids to text piece by piece, control tokens by the file's names.

Must not know prompts' formats or the model. Text from users never turns into control ids: an added token is matched only
where the caller asks for it (`control`).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

REPLACEMENT = "\ufffd"
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


class TokenizerError(ValueError):
    """A tokenizer file that is missing or broken, or a token it does not have."""


class Tokenizer:
    """Byte-level BPE with added tokens. `path` is a `tokenizer.json` or the folder that holds it."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise TokenizerError(f"no tokenizer at {file}")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            self._fast = FastTokenizer.from_str(json.dumps(data))
            # The same file without its added tokens: what user text is cut with, so that no text becomes a control id.
            plain = {**data, "added_tokens": []}
            self._plain = FastTokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file} is not a tokenizer: {error}") from error
        self.path = file
        self._added = {token["content"]: int(token["id"]) for token in data.get("added_tokens", [])}
        self._special = {int(token["id"]) for token in data.get("added_tokens", []) if token.get("special")}

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Every added token's text and id."""
        return dict(self._added)

    def control(self, name: str) -> int:
        """The id of an added token by its text. Raises TokenizerError that lists near names if there is none."""
        if name not in self._added:
            raise TokenizerError(f"{self.path} has no token {name!r}; it has {', '.join(sorted(self._added)[:12])}, ...")
        return self._added[name]

    @property
    def begin_id(self) -> int:
        """The token every text starts with."""
        return self.control(BEGIN)

    @property
    def end_id(self) -> int:
        """The token that ends a text."""
        return self.control(END)

    def encode(self, text: str, *, begin: bool = False, control: bool = False) -> list[int]:
        """Ids of a text. `begin` puts the begin token first; `control` lets added tokens in the text become their ids."""
        fast = self._fast if control else self._plain
        ids = list(fast.encode(text, add_special_tokens=False).ids)
        return [self.begin_id, *ids] if begin else ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no whole character become U+FFFD. Raises TokenizerError for an unknown id."""
        unknown = [index for index in ids if not 0 <= index < len(self)]
        if unknown:
            raise TokenizerError(f"token id {unknown[0]} is outside 0..{len(self) - 1}")
        return str(self._fast.decode(ids, skip_special_tokens=skip_special))


class StreamDecoder:
    """Ids one at a time to text as soon as it is certain. What is fed and what comes out agree byte for byte in the end.

    Text is held only while the last token's bytes may be an unfinished character. A character U+FFFD that a token spells
    out in full comes through; unfinished bytes at the end become one replacement character.
    """

    MAX_HELD = 6  # more tokens than a character of four bytes can be spread over

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        """The text that this token makes certain, possibly empty."""
        self._held.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._held) < self.MAX_HELD and self._unfinished(self._held[-1]):
            return ""
        self._context, self._held = self._held[-self.MAX_HELD :], []
        return text

    def finish(self) -> str:
        """What is still held, unfinished bytes replaced."""
        text = self._new_text() if self._held else ""
        self._context, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _unfinished(self, token: int) -> bool:
        """True unless the token spells its replacement character itself."""
        return self._tokenizer.encode(self._tokenizer.decode([token])) != [token]
