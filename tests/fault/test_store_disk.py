"""A disk that is full, breaks or is slow, through the file-system port: misses and counts, never a wrong page or an exception."""

from __future__ import annotations

import errno
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvist.cache import page_file
from kvist.cache.maintenance import verify
from kvist.cache.store_errors import StoreFull, StoreUnwritable
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import PAGE_BYTES, key, open_store, page, payload

SLOT = 2048


def check(store, numbers) -> int:
    there = 0
    for number in numbers:
        data = store.get(key(number))
        assert data is None or data == payload(number), f"page {number} is wrong"
        there += data is not None
    return there


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    store.put([page(n) for n in range(30)])
    disk.room = 10 * SLOT + 700
    assert store.put([page(n) for n in range(30, 50)]) == 0, "a torn batch is not published in part of a write"
    assert store.counters.full == 1 and store.counters.not_published == 20
    assert check(store, range(60)) == 30 and verify(store).good
    for first in range(100, 200, 5):
        assert store.put([page(n) for n in range(first, first + 5)]) == 5, "own old pages make way"
    assert check(store, range(195, 200)) == 5 and store.stat().pages <= 30
    assert store.counters.full == 1 and store.counters.evicted >= 100
    assert store.stat().file_bytes <= 4096 + 30 * SLOT
    store.close()
    store = open_store(tmp_path)
    assert verify(store).good and check(store, range(195, 200)) == 5
    store.close()


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="free some, or choose another disk"):
        open_store(tmp_path / "a", files=FaultyFiles(room=100))
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["writer.lock"], "no half of a store stays behind"
    disk = FaultyFiles(room=4096)
    store = open_store(tmp_path / "b", files=disk)
    assert store.put([page(1)]) == 0 and store.counters.full == 1
    assert check(store, range(3)) == 0
    disk.room = 10 * SLOT
    assert store.put([page(2)]) == 1 and check(store, range(3)) == 1, "room that appears is used"
    store.close()


def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    program = """
import sys
from tests.fault.page_writer import *
store = open_store(sys.argv[1])
for first in range(0, 400, 5):
    pages = [page(n) for n in range(first, first + 5)]
    # A journal that cannot grow is folded, so that a second attempt has room.
    assert store.put(pages) == 5 or store.put(pages) == 5, (first, store.counters)
assert store.counters.full >= 1 and store.counters.evicted > 200, store.counters
assert all(store.get(key(n)) == payload(n) for n in range(395, 400))
assert all(store.get(key(n)) in (None, payload(n)) for n in range(400))
store.close()
print("done")
"""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    command = [sys.executable, "-c", program, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, cwd=Path(__file__).parents[2], check=False)
    assert ran.stdout == "done\n", ran.stderr
    store = open_store(tmp_path)
    assert verify(store).good and check(store, range(395, 400)) == 5
    store.close()


def test_index_that_cannot_grow(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(20)])
    (pages,) = store._index._open().execute("PRAGMA page_count").fetchone()
    store._index._open().execute(f"PRAGMA max_page_count = {pages}")
    done = sum(store.put([page(n) for n in range(first, first + 50)]) for first in range(100, 1100, 50))
    assert done < 1000 and store.counters.full > 0 and store.counters.not_published == 1000 - done
    assert check(store, range(20)) == 20 and check(store, range(100, 1100)) == done
    assert verify(store).good
    store.close()


def test_read_errors(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    store.put([page(n) for n in range(20)])
    disk.read_errors = 5
    assert check(store, range(20)) == 15 and store.counters.read_errors == disk.raised == 5
    assert check(store, range(20)) == 15 and store.counters.negative_hits == 5, "not tried again for a while"
    assert not store.contains(key(0)) and store.contains(key(10))
    assert store.stat().pages == 20, "a failed read says nothing about the page"
    assert store.put([page(n) for n in range(5)]) == 5 and check(store, range(20)) == 20, "computed again, written again"
    disk.read_errors = 1
    assert check(store, [7]) == 0
    store.close()
    store = open_store(tmp_path)
    assert check(store, range(20)) == 20 and store.counters.faults == 0
    store.close()


def test_read_errors_within_a_stream(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    store.put([page(n) for n in range(40)])
    disk.read_errors = 3
    keys = [key(n) for n in range(45)]
    data = list(store.get_many(keys))
    assert [n for n in range(45) if data[n] is None] == [0, 1, 2, *range(40, 45)]
    assert all(data[n] is None or data[n] == payload(n) for n in range(45))
    assert store.counters.read_errors == disk.raised == 3 and store.counters.hits == 37
    with (tmp_path / "pages.kv").open("r+b") as file:
        file.truncate(4096 + 30 * SLOT + 100)
    data = list(store.get_many(keys))
    assert [n for n in range(45) if data[n] is not None] == list(range(3, 30))
    assert store.counters.corrupt == {"truncated": 10}
    store.close()


def test_shrinking_over_damaged_and_unreadable_pages(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    for number in range(40):
        store.put([page(number)])
    with (tmp_path / "pages.kv").open("r+b") as file:
        file.seek(4096 + 37 * SLOT + 200)
        file.write(b"damaged")
    disk.read_errors = 1
    assert store.shrink(15) == 25
    assert check(store, range(40)) == 13 and store.stat().pages == 13
    assert store.counters.corrupt == {"checksum": 1} and store.counters.read_errors == 1
    assert store.stat().file_bytes <= 4096 + 15 * SLOT
    assert store.put([page(n) for n in range(100, 120)]) == 20 and verify(store).pages == 33
    store.close()
    store = open_store(tmp_path)
    assert verify(store).good and check(store, range(200)) == 33
    store.close()


def test_write_and_sync_errors(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    disk.write_errors = 3
    assert [store.put([page(n)]) for n in range(5)] == [0, 0, 0, 1, 1]
    assert store.counters.write_errors == disk.raised == 3 and check(store, range(9)) == 2
    disk.sync_errors = 1
    store.flush()
    assert store.counters.write_errors == 4
    store.close()
    store = open_store(tmp_path)
    assert check(store, range(9)) == 2 and verify(store).good
    store.close()


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 8000])
@pytest.mark.parametrize("faults", [{}, {"longest_write": 777}, {"longest_write": 4096}, {"no_direct": True}])
def test_short_writes_and_file_systems_without_direct_ones(tmp_path: Path, faults: dict, page_bytes: int) -> None:
    disk = FaultyFiles(**faults)
    store = open_store(tmp_path, files=disk, page_bytes=page_bytes)
    assert store.geometry.slot_bytes == {PAGE_BYTES: 2048, 8000: 8192}[page_bytes], "8 KB pages are written directly"
    assert store.put([page(n, page_bytes) for n in range(20)]) == 20
    assert all(store.get(key(n)) == payload(n, page_bytes) for n in range(20))
    store.close()
    store = open_store(tmp_path, page_bytes=page_bytes)
    assert verify(store).pages == 20 and verify(store).good
    store.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO])
def test_unwritable_directory(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreUnwritable, match="Choose a directory that this user can write"):
        open_store(tmp_path / "store", files=FaultyFiles(open_error=number))
    store = open_store(tmp_path / "store")
    assert store.put([page(1)]) == 1
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_even_for_the_lock(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreFull, match="needs room for its head and index"):
        open_store(tmp_path, files=FaultyFiles(open_error=number))


@pytest.mark.parametrize("seed", range(4))
def test_random_faults(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of every kind in any order: each get is right or nothing, each fault raised is counted, and all mends itself."""
    monkeypatch.setattr("kvist.cache.store.FULL_S", 0.001)
    rng = random.Random(seed)
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk, budget_bytes=4096 + 40 * (SLOT + 160))
    for _ in range(150):
        match rng.randrange(8):
            case 0:
                disk.write_errors = rng.randrange(3)
            case 1:
                disk.read_errors = rng.randrange(3)
            case 2:
                disk.sync_errors = rng.randrange(2)
                store.flush()
            case 3:
                disk.room = rng.choice((None, 0, rng.randrange(20 * SLOT)))
            case 4:
                disk.longest_write = rng.choice((None, 1000, 3000))
        first = rng.randrange(100)
        store.put([page(n) for n in range(first, first + rng.randrange(1, 12))])
        check(store, rng.sample(range(112), 10))
        assert store.stat().pages <= 40
    faults = store.counters
    assert faults.write_errors + faults.read_errors + faults.full >= disk.raised > 0
    assert not faults.corrupt and not faults.index_errors, faults
    disk.__init__()
    time.sleep(0.002)
    assert verify(store).good
    assert store.put([page(n) for n in range(10)]) == 10 and check(store, range(10)) == 10
    store.close()


def test_an_abandoned_read_ahead_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be collected while a thread starts, under a lock that joining its reader would take: a deadlock seen in use."""
    monkeypatch.setattr(page_file, "_GROUP", 8)
    disk, release, calls = FaultyFiles(), threading.Event(), list[int]()
    store = open_store(tmp_path, files=disk)
    assert store.put([page(n) for n in range(40)]) == 40
    plain = disk.read_into

    def second_waits(fd: int, buffers: list[bytearray], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            release.wait(60)
        return plain(fd, buffers, offset)

    monkeypatch.setattr(disk, "read_into", second_waits)
    raw = store._file.read_ahead(list(range(40)))
    assert not isinstance(next(raw), OSError)
    began = time.monotonic()
    raw.close()
    assert time.monotonic() - began < 20
    release.set()
    store.close()
