"""Which model is this: a digest that changes with the configuration, the tokenizer, or the ends of any tensor.

Owns what enters the digest; caches put it into every page's identity. Reads headers and at most 128 KiB a tensor, so that it
takes seconds for the largest checkpoint; the check of every byte is `verify`'s. Must not know models or caches. No torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from kvist.checkpoint.formats import Checkpoint, CheckpointMismatch, Entry, open_checkpoint
from kvist.config_json import load_config
from kvist.text.tokenizer import read_tokenizer_file

END_BYTES = 64 << 10
"""Bytes read from either end of a tensor; one that is not longer than both is read whole."""
DIGEST_BYTES = 32


def fingerprint(folder: str | Path) -> bytes:
    """Digest (32 bytes) of the model in a folder: its configuration, tokenizer, and every tensor's header and ends.

    Which shard holds a tensor and how config.json is written do not enter: the same model in other files is the same.
    Raises `ConfigError`, `CheckpointMismatch` or `TokenizerError`.
    """
    folder = Path(folder)
    config = dataclasses.asdict(load_config(folder))
    checkpoint = open_checkpoint(folder)
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"kvist model")
    _add(hasher, json.dumps(config, sort_keys=True).encode())
    # Engram's token classes come from the tokenizer, and with them the rows that enter the cache.
    tokenizer = folder / "tokenizer.json"
    _add(hasher, read_tokenizer_file(tokenizer) if tokenizer.is_file() else b"")
    with _opened(checkpoint) as handles:
        for name, entry in sorted(checkpoint.entries.items()):
            _add(hasher, f"{name} {entry.dtype} {list(entry.shape)}".encode())
            for piece in _ends(entry, handles[entry.file]):
                _add(hasher, piece)
    return hasher.digest()


def _add(hasher: blake2b, field: bytes) -> None:
    hasher.update(len(field).to_bytes(8, "little"))
    hasher.update(field)


@contextmanager
def _opened(checkpoint: Checkpoint) -> Iterator[dict[Path, int]]:
    handles: dict[Path, int] = {}
    try:
        for file in checkpoint.files:
            handles[file] = os.open(file, os.O_RDONLY)
        yield handles
    finally:
        for handle in handles.values():
            os.close(handle)


def _ends(entry: Entry, handle: int) -> Iterator[bytes]:
    if entry.nbytes <= 2 * END_BYTES:
        spans = [(entry.offset, entry.nbytes)]
    else:
        spans = [(entry.offset, END_BYTES), (entry.offset + entry.nbytes - END_BYTES, END_BYTES)]
    for offset, nbytes in spans:
        piece = os.pread(handle, nbytes, offset)
        if len(piece) != nbytes:
            raise CheckpointMismatch(f"{entry.file}: truncated while the ends of tensor {entry.name!r} were read")
        yield piece
