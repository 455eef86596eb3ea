"""The bytes of one stored page: a 128-byte header, the page exactly as it lies in memory, and a checksum over both.

Owns format version 1 of a record (docs/cache-format.md). Must not know files, indexes or what a page means.

The checksum is XXH3-128 of header and payload. It guards against accidents (torn writes, flipped bits, stale slots), not
against somebody who can write the directory: no unkeyed sum does. Measured on the development machine for a released page
(113,920 bytes): XXH3-128 2 us, zlib's CRC-32 28 us with 1 in 2**32 left undetected, SHA-256 64 us, BLAKE2b 143 us: the last
at 0.8 GB/s is slower than the disk that it would guard. The page's key is cryptographic; this sum need not be.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

MAGIC: Final = b"KVISTPAG"
VERSION: Final = 1
KEY_BYTES: Final = 16
CHECKSUM_BYTES: Final = 16
HEADER: Final = struct.Struct("<8sII16s16s16sIIQ32x")
HEADER_BYTES: Final = HEADER.size + CHECKSUM_BYTES

Buffer = bytes | bytearray | memoryview
"""What holds bytes here; of a numpy array, pass `memoryview(array)`."""


class Page(NamedTuple):
    """One page to store: its key (16 bytes), its bytes, tokens in it, provenance (0 exact, n bounded) and parent digest."""

    key: bytes
    payload: Buffer
    tokens: int = 0
    provenance: int = 0
    parent: bytes = bytes(KEY_BYTES)


class Header(NamedTuple):
    """The fields of a record's header in file order; `payload_bytes` and `tokens` are counts, `sequence` never repeats."""

    payload_bytes: int
    model: bytes
    key: bytes
    parent: bytes
    provenance: int
    tokens: int
    sequence: int


class Stored(NamedTuple):
    """A proved record: its header, and a view of the page's bytes."""

    header: Header
    payload: memoryview


class CorruptPage(ValueError):
    """A record that must not be used. `reason` is one of truncated, foreign, version, model, layout, stale, checksum.

    `owner` is the key of the intact page that was found instead, when the record is stale.
    """

    def __init__(self, reason: str, detail: str, owner: bytes | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.owner = reason, owner


def pack_header(page: Page, model: bytes, sequence: int) -> bytes:
    """The 128 bytes before a page's payload. Raises `ValueError` for a key, parent or model that is not 16 bytes."""
    for name, value in (("key", page.key), ("parent", page.parent), ("model", model)):
        if len(value) != KEY_BYTES:
            raise ValueError(f"the {name} of a page has {len(value)} bytes; a record holds {KEY_BYTES}")
    view = memoryview(page.payload).cast("B")
    fields = HEADER.pack(MAGIC, VERSION, view.nbytes, model, page.key, page.parent, page.provenance, page.tokens, sequence)
    return fields + _checksum(fields, view)


def read_header(raw: Buffer) -> Header:
    """Parse a header without its payload: nothing is proved yet. Raises `CorruptPage` (truncated, foreign, version)."""
    view = memoryview(raw).cast("B")
    if view.nbytes < HEADER_BYTES:
        raise CorruptPage("truncated", f"{view.nbytes} of {HEADER_BYTES} header bytes")
    magic, version, *fields = HEADER.unpack(view[: HEADER.size])
    if magic != MAGIC:
        raise CorruptPage("foreign", f"starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CorruptPage("version", f"record version {version}, this program reads {VERSION}")
    return Header(*fields)


def check(raw: Buffer, *, model: bytes, key: bytes, sequence: int, payload_bytes: int) -> Stored:
    """Prove that `raw` is the record that the index promises.

    Raises `CorruptPage`. The checksum is looked at first among the values, so that "stale" means an intact other record.
    """
    view = memoryview(raw).cast("B")
    header = read_header(view)
    if header.payload_bytes != payload_bytes:
        raise CorruptPage("layout", f"{header.payload_bytes} payload bytes, pages here have {payload_bytes}")
    payload = view[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    if payload.nbytes != payload_bytes:
        raise CorruptPage("truncated", f"{payload.nbytes} of {payload_bytes} payload bytes")
    if view[HEADER.size : HEADER_BYTES] != _checksum(view[: HEADER.size], payload):
        raise CorruptPage("checksum", "header or payload changed since it was written")
    if header.model != model:
        raise CorruptPage("model", f"of model {header.model.hex()}, not {model.hex()}")
    if (header.key, header.sequence) != (key, sequence):
        raise CorruptPage("stale", f"holds page {header.key.hex()} number {header.sequence}", header.key)
    return Stored(header, payload.toreadonly())


def _checksum(fields: Buffer, payload: Buffer) -> bytes:
    hasher = xxhash.xxh3_128(fields)
    hasher.update(payload)
    return hasher.digest()
