"""docs/cache-format.md is enough: a reader written from that page alone reads a store, whole or damaged, without our code."""

from __future__ import annotations

import re
import sqlite3
import struct
from pathlib import Path

import pytest
import xxhash

from kvist.page_layout import PageLayout
from kvist.presets import preset
from tests.fault.page_writer import MODEL, PAGE_BYTES, PAGE_TOKENS, key, open_store, page, payload

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache-format.md"


def read_independently(folder: Path) -> dict[bytes, tuple[bytes, int, int, int]]:
    """Key to (payload, provenance, tokens, sequence) of every record that counts; nothing of kvist is used."""

    def number(data: bytes, at: int, size: int = 4) -> int:
        return int.from_bytes(data[at : at + size], "little")

    def checksum(data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data, seed=0)

    data = (folder / "pages.kv").read_bytes()
    for copy in (0, 2048):
        head = data[copy : copy + 80]
        if head[:8] == b"KVISTSTO" and head[64:] == checksum(head[:64]):
            break
    else:
        raise ValueError("no intact head")
    if number(head, 8) > 1:
        raise ValueError("a newer version")
    first, slot_bytes, page_bytes, model = number(head, 12), number(head, 16), number(head, 20), head[28:44]
    found: dict[bytes, tuple[bytes, int, int, int]] = {}
    for start in range(first, len(data), slot_bytes):
        record = data[start : start + 128 + page_bytes]
        if len(record) < 128 + page_bytes or record[:8] != b"KVISTPAG" or number(record, 8) != 1:
            continue
        if number(record, 12) != page_bytes or record[16:32] != model:
            continue
        if record[112:128] != checksum(record[:112] + record[128:]):
            continue
        page_key, sequence = record[32:48], number(record, 72, 8)
        if page_key not in found or found[page_key][3] < sequence:
            found[page_key] = (record[128:], number(record, 64), number(record, 68), sequence)
    return found


def test_a_store_is_read_from_its_description(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(50)])
    store.close()
    found = read_independently(tmp_path)
    assert {k: v[:3] for k, v in found.items()} == {key(n): (payload(n), n % 3, PAGE_TOKENS) for n in range(50)}
    index = sqlite3.connect(f"file:{tmp_path / 'index.sqlite'}?mode=ro", uri=True)
    rows = index.execute("SELECT key, slot, sequence FROM pages").fetchall()
    data = (tmp_path / "pages.kv").read_bytes()
    slot_bytes = struct.unpack_from("<I", data, 16)[0]
    for page_key, slot, sequence in rows:
        assert data[4096 + slot * slot_bytes + 32 :][:16] == page_key and found[page_key][3] == sequence
    assert index.execute("PRAGMA application_id").fetchone() == (0x4B564953,)
    assert index.execute("SELECT next_slot, store FROM state").fetchone() == (50, data[44:60])
    assert data[28:44] == MODEL
    index.close()


def test_evicted_and_damaged_pages_are_told_apart(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=4096 + 20 * (2048 + 160))
    for first in range(0, 60, 5):
        store.put([page(n) for n in range(first, first + 5)])
    alive = {entry.key for entry in store.entries()}
    store.close()
    path = tmp_path / "pages.kv"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    data[4096 + 3 * 2048 + 500] ^= 1
    path.write_bytes(data[:-1200])
    found = read_independently(tmp_path)
    assert set(found) <= alive and len(found) == len(alive) - 2
    store = open_store(tmp_path)
    ours = {entry.key: store.get(entry.key) for entry in list(store.entries())}
    assert {k: bytes(v) for k, v in ours.items() if v is not None} == {k: v[0] for k, v in found.items()}
    store.close()


@pytest.mark.parametrize(("page_bytes", "slot_bytes"), [(113_920, 114_688), (4096, 4608), (PAGE_BYTES, 2048)])
def test_slot_sizes_of_the_document(tmp_path: Path, page_bytes: int, slot_bytes: int) -> None:
    store = open_store(tmp_path, page_bytes=page_bytes)
    store.put([page(1, page_bytes)])
    store.close()
    data = (tmp_path / "pages.kv").read_bytes()
    assert struct.unpack_from("<II", data, 16) == (slot_bytes, page_bytes) and len(data) == 4096 + slot_bytes
    assert read_independently(tmp_path)[key(1)][0] == payload(1, page_bytes)


def test_figures_of_the_document_are_the_release() -> None:
    layout = PageLayout.of(preset("v41-flash"))
    text = DOCUMENT.read_text()
    sizes = re.search(r"For the release: (\d+) tokens, ([\d,]+) bytes, (\d+) a token, no padding", " ".join(text.split()))
    assert sizes is not None
    assert [int(figure.replace(",", "")) for figure in sizes.groups()] == [layout.page_tokens, layout.page_bytes, 890]
    assert layout.padding_bytes == 0
