"""Tokenises the built text: uint16 ids per tier and split, with the documents' offsets, sources and byte counts.

Writes `tokens/{tier}.{split}.u16`, `.offsets.npy`, `.sources.npy`, `.bytes.npy` and `meta.json`.
Knows files of ids, not models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kvist.train.corpus.build import SPLITS, Document, read_documents
from kvist.train.corpus.sources import SOURCES, TIERS

_BATCH = 512
_SOURCE_INDEX = {source.name: index for index, source in enumerate(SOURCES)}


@dataclass(frozen=True)
class TokenSet:
    """The documents of one tier and split.

    ids: u16 [tokens], BOS before and EOS after each document; offsets: i64 [documents + 1] into ids;
    sources: u8 [documents], index into meta.json's "sources"; utf8_bytes: i32 [documents], the text's size.
    """

    ids: np.ndarray
    offsets: np.ndarray
    sources: np.ndarray
    utf8_bytes: np.ndarray

    def write(self, folder: Path, name: str) -> None:
        """Stores the set's four arrays as `name`.* in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.ids.astype("<u2").tofile(folder / f"{name}.u16")
        np.save(folder / f"{name}.offsets.npy", self.offsets)
        np.save(folder / f"{name}.sources.npy", self.sources)
        np.save(folder / f"{name}.bytes.npy", self.utf8_bytes)


def encode_documents(documents: Iterator[Document], tokenizer: Tokenizer, bos: int, eos: int) -> TokenSet:
    """Tokenises documents in their order; each gets BOS and EOS of its own."""
    pieces: list[np.ndarray] = []
    sources: list[int] = []
    sizes: list[int] = []
    while batch := list(islice(documents, _BATCH)):
        encodings = tokenizer.encode_batch_fast([d.text for d in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            pieces.append(np.array([bos, *encoding.ids, eos], np.uint16))
            sources.append(_SOURCE_INDEX[document.source])
            sizes.append(len(document.text.encode()))
    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
    ids = np.concatenate([np.empty(0, np.uint16), *pieces])
    return TokenSet(ids, offsets, np.array(sources, np.uint8), np.array(sizes, np.int32))


def _figures(tokens: TokenSet) -> dict[str, object]:
    lengths = np.diff(tokens.offsets)
    by_source = {}
    for index in np.unique(tokens.sources):
        mine = tokens.sources == index
        by_source[SOURCES[index].name] = {
            "documents": int(mine.sum()),
            "utf8_bytes": int(tokens.utf8_bytes[mine].sum()),
            "tokens": int(lengths[mine].sum()),
        }
    return {
        "documents": len(lengths),
        "tokens": len(tokens.ids),
        "utf8_bytes": int(tokens.utf8_bytes.sum()),
        "by_source": by_source,
    }


def tokenise(out: Path, tokenizer_file: Path) -> dict[str, object]:
    """Tokenises every tier and split of OUT/text into OUT/tokens; writes `meta.json` and returns its figures.

    Token counts include BOS and EOS; byte counts are of the text alone, so bits per byte of a set is its loss in bits
    over all targets divided by `utf8_bytes`.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    special = json.loads(tokenizer_file.with_name("special_tokens.json").read_text())
    sets: dict[str, object] = {}
    for tier in TIERS:
        for split in SPLITS:
            documents = read_documents(out, tier, split)
            tokens = encode_documents(documents, tokenizer, special["ids"]["bos"], special["ids"]["eos"])
            tokens.write(out / "tokens", f"{tier}.{split}")
            sets[f"{tier}.{split}"] = _figures(tokens)
    meta = {
        "vocabulary_size": special["vocabulary_size"],
        "ids": special["ids"],
        "sources": [source.name for source in SOURCES],
        "sets": sets,
    }
    (out / "tokens" / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return sets
