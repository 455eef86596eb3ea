"""Stored bytes that changed: flipped, cut, exchanged, deleted. Every page that comes back is right, every loss is counted."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvist.cache.maintenance import verify
from kvist.cache.page_file import HEAD_BYTES
from kvist.cache.record import HEADER_BYTES, Page, pack_header
from kvist.cache.store import PageStore
from kvist.cache.store_errors import NotAStore, StoreError
from tests.fault.page_writer import MODEL, PAGE_BYTES, key, open_store, page, payload

PAGES = 60


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    store = open_store(folder)
    store.put([page(n) for n in range(PAGES)])
    store.close()
    return folder


def missing(store: PageStore) -> int:
    lost = 0
    for number in range(PAGES):
        data = store.get(key(number))
        assert data is None or data == payload(number), f"page {number} is wrong"
        lost += data is None
    return lost


def entries_of(store: PageStore, numbers) -> dict:
    entries = store._index.find_many([key(n) for n in numbers])
    return {n: entries[key(n)] for n in numbers}


def refill(store: PageStore) -> None:
    """Lost pages are computed again: after that all of them are there, and stay."""
    assert store.put([page(n) for n in range(PAGES)]) == PAGES
    assert missing(store) == 0
    store.close()
    again = open_store(store.folder)
    assert missing(again) == 0 and verify(again).good
    again.close()


@pytest.mark.parametrize("flips", [30, pytest.param(200, marks=pytest.mark.long)])
def test_random_bit_flips(original: Path, tmp_path: Path, flips: int) -> None:
    rng = random.Random(flips)
    lost = 0
    for trial in range(flips):
        folder = tmp_path / str(trial)
        shutil.copytree(original, folder)
        name = "index.sqlite" if trial % 4 == 3 else "pages.kv"
        data = bytearray((folder / name).read_bytes())
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        store = open_store(folder)
        gone = missing(store)
        if name == "pages.kv":
            assert gone <= 1 and gone == sum(store.counters.corrupt.values()), store.counters
            assert missing(store) == gone and store.counters.negative_hits == gone, "a damaged page is not read twice"
        verify(store)
        assert not gone or store.counters.faults, f"flip {trial} in {name} lost {gone} pages uncounted: {store.counters}"
        lost += gone
        refill(store)
        shutil.rmtree(folder)
    assert lost > flips // 4, "most flips hit a page"


@pytest.mark.parametrize("cuts", [15, pytest.param(50, marks=pytest.mark.long)])
def test_truncation(original: Path, tmp_path: Path, cuts: int) -> None:
    rng = random.Random(cuts)
    for trial in range(cuts):
        folder = tmp_path / str(trial)
        shutil.copytree(original, folder)
        name = "index.sqlite" if trial % 3 == 2 else "pages.kv"
        size = (folder / name).stat().st_size
        cut = rng.randrange(size) if trial % 5 else rng.randrange(HEAD_BYTES)
        with (folder / name).open("r+b") as file:
            file.truncate(cut)
        store = open_store(folder)
        gone = missing(store)
        if name == "pages.kv":
            whole = max(cut - HEAD_BYTES, 0) / store.geometry.slot_bytes
            assert abs(gone - (PAGES - whole)) < 1.5
            assert gone == sum(store.counters.corrupt.values()) or store.counters.index_rebuilds == 1, store.counters
        else:
            verify(store)
            assert store.counters.index_rebuilds == 1 and missing(store) == 0, store.counters
        refill(store)
        shutil.rmtree(folder)


def test_a_reader_only_remembers_what_is_damaged(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "store")
    path = tmp_path / "store" / "pages.kv"
    data = bytearray(path.read_bytes())
    data[HEAD_BYTES + 5 * 2048 + 700] ^= 4
    path.write_bytes(data)
    reader = open_store(tmp_path / "store", read_only=True)
    assert missing(reader) == 1 and reader.counters.corrupt == {"checksum": 1}
    assert missing(reader) == 1 and reader.counters.negative_hits == 1
    assert verify(reader).bad == {"checksum": 1}
    reader.close()
    assert path.read_bytes() == data
    writer = open_store(tmp_path / "store")
    assert verify(writer).dropped and writer.stat().pages == PAGES - 1
    refill(writer)


def test_foreign_and_stale_records(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(PAGES)])
    slots = entries_of(store, range(PAGES))
    forged = {
        "model": (pack_header(page(0), b"another model 16", slots[0].sequence), payload(0)),
        "foreign": (bytes(HEADER_BYTES), bytes(PAGE_BYTES)),
        "stale": (pack_header(page(1002), MODEL, 1), payload(1002)),
        "layout": (pack_header(Page(key(3), payload(3)[:-4]), MODEL, slots[3].sequence), payload(3)[:-4] + bytes(4)),
        "version": (pack_header(page(4), MODEL, slots[4].sequence).replace(b"KVISTPAG\1", b"KVISTPAG\2"), payload(4)),
        "checksum": (pack_header(page(5), MODEL, slots[5].sequence), payload(6)),
    }
    for number, record in enumerate(forged.values()):
        store._file.write(slots[number].slot, [record])
    assert missing(store) == len(forged)
    assert store.counters.corrupt == dict.fromkeys(forged, 1)
    refill(store)


def test_two_pages_exchanged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(PAGES)])
    a, b = entries_of(store, (7, 8)).values()
    first, second = (bytes(store._file.read(entry.slot)) for entry in (a, b))
    store._file.write(a.slot, [(second[:HEADER_BYTES], second[HEADER_BYTES:])])
    store._file.write(b.slot, [(first[:HEADER_BYTES], first[HEADER_BYTES:])])
    assert missing(store) == 2 and store.counters.corrupt == {"stale": 2}
    refill(store)


def test_two_entries_of_one_slot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(PAGES)])
    victim, owner = entries_of(store, (7, 8)).values()
    store._index._open().execute("UPDATE pages SET slot = ? WHERE key = ?", (owner.slot, victim.key))
    assert missing(store) == 1
    store.put([page(n) for n in range(100, 110)])
    assert store.get(key(8)) == payload(8), "the slot of a page that truly lives there is not given away"
    refill(store)


def test_a_smaller_budget_on_a_damaged_index(original: Path, tmp_path: Path) -> None:
    """The damage shows only while pages are moved to fit: the index is made again, and the store opens and keeps its budget."""
    shutil.copytree(original, tmp_path / "store")
    index = tmp_path / "store" / "index.sqlite"
    with contextlib.closing(sqlite3.connect(index)) as connection, connection:
        connection.execute("PRAGMA writable_schema = 1")
        connection.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'slot INTEGER NOT NULL', 'slot INTEGER') WHERE name = 'pages'"
        )
    with contextlib.closing(sqlite3.connect(index)) as connection, connection:
        connection.execute("UPDATE pages SET slot = NULL WHERE key = ?", (key(5),))
    store = open_store(tmp_path / "store", budget_bytes=4096 + 20 * (2048 + 160))
    assert store.counters.index_rebuilds == 1 and store.stat().pages == 20
    assert missing(store) == PAGES - 20
    store.close()


@pytest.mark.parametrize("older", ["index.sqlite", "pages.kv"])
def test_power_failure_leaves_one_file_older(tmp_path: Path, older: str) -> None:
    budget = 4096 + PAGES * (2048 + 160)
    store = open_store(tmp_path / "store", budget_bytes=budget)
    store.put([page(n) for n in range(1000, 1000 + PAGES)])
    store.close()
    before = (tmp_path / "store" / older).read_bytes()
    store = open_store(tmp_path / "store", budget_bytes=budget)
    store.put([page(n) for n in range(PAGES)])
    store.close()
    (tmp_path / "store" / older).write_bytes(before)
    store = open_store(tmp_path / "store", budget_bytes=budget)
    promised = {entry.key for entry in store.entries()}
    assert promised == {key(n + 1000 * (older == "index.sqlite")) for n in range(PAGES)}
    assert not any(store.get(wanted) for wanted in promised)
    assert store.counters.corrupt == {"stale": PAGES}, "every slot holds an intact page, but not the promised one"
    refill(store)


@pytest.mark.parametrize("case", ["KVP-09"])
def test_kvp_09_index_without_payload(original: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(original, tmp_path / "gone")
    (tmp_path / "gone" / "pages.kv").unlink()
    with pytest.raises(NotAStore):
        open_store(tmp_path / "gone", read_only=True)
    store = open_store(tmp_path / "gone")
    assert missing(store) == PAGES and store.counters.faults == 1, case
    refill(store)
    shutil.copytree(original, tmp_path / "holes")
    with (tmp_path / "holes" / "pages.kv").open("r+b") as file:
        file.seek(HEAD_BYTES + 10 * 2048)
        file.write(bytes(20 * 2048))
    store = open_store(tmp_path / "holes")
    assert missing(store) == 20 and store.counters.corrupt == {"foreign": 20}, "zeros are no page"
    refill(store)


def test_index_gone_or_of_another_directory(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "gone")
    (tmp_path / "gone" / "index.sqlite").unlink()
    with pytest.raises(NotAStore, match="open the directory for writing once"):
        open_store(tmp_path / "gone", read_only=True)
    store = open_store(tmp_path / "gone")
    assert missing(store) == 0 and store.counters.index_rebuilds == 1
    refill(store)
    other = open_store(tmp_path / "other")
    other.put([page(n) for n in range(500, 510)])
    other.close()
    shutil.copy(original / "index.sqlite", tmp_path / "other" / "index.sqlite")
    store = open_store(tmp_path / "other")
    assert store.counters.index_rebuilds == 1 and store.get(key(505)) == payload(505)
    refill(store)


def test_schema_that_is_no_text(original: Path, tmp_path: Path) -> None:
    """SQLite quotes the damaged schema in its message, from which Python then makes a UnicodeDecodeError and no sqlite3.Error."""
    folder = tmp_path / "store"
    shutil.copytree(original, folder)
    path = folder / "index.sqlite"
    data = path.read_bytes()
    assert data.count(b"CREATE TABLE pages") == 1
    path.write_bytes(data.replace(b"CREATE TABLE pages", b"CR\x9cATE TABLE pages"))
    with pytest.raises(NotAStore, match="its schema is damaged"):
        open_store(folder, read_only=True)
    store = open_store(folder)
    assert store.counters.index_rebuilds == 1 and missing(store) == 0
    refill(store)


def test_index_damaged_while_in_use(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert missing(store) == 0
    with (tmp_path / "store" / "index.sqlite").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    store._index._reader.execute("PRAGMA shrink_memory")
    assert missing(store) > 0 and store.counters.index_errors == 1
    assert store.put([page(n) for n in range(PAGES)]) == PAGES
    assert store.counters.index_rebuilds == 1 and missing(store) == 0
    refill(store)


def test_both_heads_damaged_is_a_named_error(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "store")
    path = tmp_path / "store" / "pages.kv"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    open_store(tmp_path / "store").close()
    assert path.read_bytes()[: HEAD_BYTES // 2] == path.read_bytes()[HEAD_BYTES // 2 : HEAD_BYTES], "one copy mends the other"
    data[HEAD_BYTES // 2 + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="will be computed again"):
        open_store(tmp_path / "store")
    assert path.read_bytes() == data


@pytest.mark.parametrize(("read_only", "fate"), [(False, "is dropped"), (True, "is not used")])
def test_many_bad_pages_are_said_a_few_times(
    tmp_path: Path, read_only: bool, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    assert store.put([page(number) for number in range(12)]) == 12
    store.close()
    with (tmp_path / "pages.kv").open("r+b") as file:
        for slot in range(12):
            file.seek(HEAD_BYTES + slot * store.geometry.slot_bytes + HEADER_BYTES)
            file.write(b"damaged!")
    store = open_store(tmp_path, read_only=read_only)
    with caplog.at_level(logging.WARNING):
        assert [store.get(key(number)) for number in range(12)] == [None] * 12
    store.close()
    said = [record.getMessage() for record in caplog.records]
    assert [f"{fate} (bad pages so far: {number})" in line for number, line in zip((1, 10), said, strict=True)] == [True, True]
