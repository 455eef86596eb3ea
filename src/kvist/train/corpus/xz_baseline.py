"""The compressor to beat: bits per byte of xz on each tier's held-out text after it has seen training text.

Knows text files only. It is a stronger setting than plain `xz -9`: preset 9 extreme with a 128 MiB dictionary.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from multiprocessing import Pool
from pathlib import Path

from kvist.train.corpus.build import Document, read_documents
from kvist.train.corpus.sources import TIERS

PRIMING_BYTES = 64 << 20
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 128 << 20}]


def _joined(documents: Iterable[Document], limit_bytes: int) -> bytes:
    pieces, size = [], 0
    for document in documents:
        pieces.append(document.text.encode())
        size += len(pieces[-1])
        if size >= limit_bytes:
            break
    return b"".join(pieces)


def primed_bits_per_byte(priming: bytes, text: bytes) -> float:
    """8 * (xz(priming + text) - xz(priming)) / len(text): what `text` costs a compressor that has read `priming`.

    The dictionary is larger than both together, so every byte of the priming text can be referred to.
    """
    alone = len(lzma.compress(priming, lzma.FORMAT_XZ, filters=FILTERS)) if priming else 0
    both = len(lzma.compress(priming + text, lzma.FORMAT_XZ, filters=FILTERS))
    return 8 * (both - alone) / len(text)


def _measure_tier(job: tuple[Path, str]) -> dict[str, float | int]:
    out, tier = job
    priming = _joined(read_documents(out, tier, "train"), PRIMING_BYTES)[:PRIMING_BYTES]
    text = _joined(read_documents(out, tier, "heldout"), 1 << 40)
    return {
        "priming_bytes": len(priming),
        "heldout_bytes": len(text),
        "bits_per_byte": round(primed_bits_per_byte(priming, text), 4),
        "bits_per_byte_unprimed": round(primed_bits_per_byte(b"", text), 4),
    }


def measure(out: Path, workers: int = 2) -> dict[str, dict[str, float | int]]:
    """Measures every tier and writes OUT/xz_baseline.json.

    Priming text is the first 64 MiB of the tier's training text; documents lie in hash order, so this is a fair sample
    (for prose it is nearly all of it).
    """
    with Pool(workers) as pool:
        results = pool.map(_measure_tier, [(out, tier) for tier in TIERS], chunksize=1)
    rows = dict(zip(TIERS, results, strict=True))
    (out / "xz_baseline.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows
