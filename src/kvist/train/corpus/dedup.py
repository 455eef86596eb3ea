"""Exact and near-duplicate removal over whole documents, and the guard between training and held-out works.

A document is dropped when most of its text stands, line by line, in documents kept before it; training documents are
also dropped when they share runs of words with a held-out work. Lines are never removed from a kept document.
"""

from __future__ import annotations

import re
from hashlib import blake2b

import numpy as np

MIN_LINE_CHARS = 24
MAX_REPEATED_SHARE = 0.7
SHINGLE_WORDS = 8
MAX_SHINGLE_SHARE = 0.02
_WORD = re.compile(r"\w+")


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


class NearDuplicates:
    """Remembers the lines of kept documents; `admit` says whether a new document brings enough of its own.

    The share is measured in characters over distinct stripped lines of at least `MIN_LINE_CHARS`.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def admit(self, text: str) -> bool:
        """True, and the document is remembered, if at most `MAX_REPEATED_SHARE` of its line text was seen before."""
        lines = {line for raw in text.splitlines() if len(line := raw.strip()) >= MIN_LINE_CHARS}
        hashes = {_fingerprint(line): len(line) for line in lines}
        total = sum(hashes.values())
        repeated = sum(size for value, size in hashes.items() if value in self._seen)
        if total and repeated > MAX_REPEATED_SHARE * total:
            return False
        self._seen.update(hashes)
        return True


def shingle_hashes(text: str, stride: int) -> np.ndarray:
    """u64 hashes of every `stride`-th run of `SHINGLE_WORDS` lower-case words, whatever the signs and wrapping."""
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE_WORDS:
        return np.empty(0, np.uint64)
    codes = np.fromiter((_fingerprint_cached(word) for word in words), np.uint64, len(words))
    count = len(words) - SHINGLE_WORDS + 1
    mixed = np.zeros(count, np.uint64)
    for offset in range(SHINGLE_WORDS):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + count]
    return mixed[::stride]


_WORD_CODES: dict[str, int] = {}


def _fingerprint_cached(word: str) -> int:
    code = _WORD_CODES.get(word)
    if code is None:
        code = _WORD_CODES[word] = _fingerprint(word)
    return code


class HeldOutGuard:
    """Word runs of the held-out works; `overlap` is the share of a document's runs that occur in them."""

    def __init__(self, held_out_texts: list[str]) -> None:
        runs = [shingle_hashes(text, 1) for text in held_out_texts]
        self._runs = np.unique(np.concatenate(runs)) if runs else np.empty(0, np.uint64)

    def overlap(self, text: str) -> float:
        """Share in 0..1 of every fourth run of eight words that also stands in a held-out work."""
        runs = shingle_hashes(text, 4)
        if not len(runs) or not len(self._runs):
            return 0.0
        at = np.minimum(np.searchsorted(self._runs, runs), len(self._runs) - 1)
        return float(np.mean(self._runs[at] == runs))
