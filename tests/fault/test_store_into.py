"""Pages read where they are wanted: every fault ends the run of pages where `get` would give none, and no wrong byte counts."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvist.cache import page_file
from kvist.cache.page_file import BLOCK, HEAD_BYTES
from kvist.cache.record import HEADER_BYTES, Page
from kvist.cache.store import PageStore
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import PAGE_BYTES, key, open_store, page, payload

SLOT, COUNT = 2048, 24


def filled(folder: Path, files: FaultyFiles | None = None) -> PageStore:
    store = open_store(folder, files=files)
    assert store.put([page(n) for n in range(COUNT)]) == COUNT
    return store


def read(store: PageStore, numbers: list[int]) -> int:
    """How many came; each is compared, and what lies behind them is nobody's."""
    memory = memoryview(bytearray(len(numbers) * store.geometry.slot_bytes))
    came = store.read_into(keys := [key(n) for n in numbers], store.find_many(keys), memory)()
    for at, number in enumerate(numbers[:came]):
        first = at * store.geometry.slot_bytes + HEADER_BYTES
        assert memory[first : first + PAGE_BYTES] == payload(number), f"page {number} is wrong"
    return came


@pytest.mark.parametrize("read_bytes", [700, SLOT, 1 << 20])
def test_runs_and_single_pages_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(page_file, "_READ_BYTES", read_bytes)
    store = filled(tmp_path)
    assert store.geometry.slot_bytes == SLOT
    for numbers in ([*range(COUNT)], [3], [7, 8, 9, 2, 3, 20, 1], [*range(COUNT)][::-1], []):
        assert read(store, numbers) == len(numbers)
    assert store.counters.hits == 2 * COUNT + 8
    store.close()


@pytest.mark.parametrize("at", [0, 5, COUNT - 1])
def test_it_ends_at_a_damaged_page(tmp_path: Path, at: int) -> None:
    store = filled(tmp_path)
    slot = store.find_many([key(at)])[key(at)].slot
    with (tmp_path / page_file.FILE_NAME).open("r+b") as file:
        file.seek(page_file.HEAD_BYTES + slot * SLOT + HEADER_BYTES + 17)
        file.write(b"\xff\x00\xff")
    assert read(store, [*range(COUNT)]) == at
    assert store.counters.corrupt == {"checksum": 1}
    assert read(store, [*range(at + 1, COUNT)]) == COUNT - 1 - at
    store.close()


def test_it_ends_at_a_page_that_is_not_there(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert read(store, [0, 1, 99, 2]) == 2
    assert read(store, [99]) == 0
    store.close()


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with (tmp_path / page_file.FILE_NAME).open("r+b") as file:
        file.truncate(page_file.HEAD_BYTES + 9 * SLOT + 300)
    slots = {number: store.find_many([key(number)])[key(number)].slot for number in range(COUNT)}
    assert [slots[number] for number in range(COUNT)] == [*range(COUNT)]
    assert read(store, [*range(COUNT)]) == 9
    assert store.counters.corrupt == {"truncated": 1}
    store.close()


def test_an_error_of_a_large_read_is_found_page_by_page(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = filled(tmp_path, disk)
    disk.read_errors = 1  # of the pages read one by one, the first
    assert read(store, [*range(COUNT)]) == 0
    assert store.counters.read_errors == 1
    assert read(store, [*range(1, COUNT)]) == COUNT - 1
    assert read(store, [0, 1]) == 0, "not tried again so soon"
    store.close()


def test_a_slot_that_was_given_to_another_page_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its key once more, in its new place, and put where it is wanted; gone pages end the run."""
    store = filled(tmp_path)
    plain, moved = store._file.read_into, list[bool]()

    def late(slots: list[int], memory: memoryview) -> list[page_file.Buffer | OSError]:
        if not moved:
            moved.append(True)
            store.drop(key(4))
            store.put([page(50)])
            store.put([page(4)])
        return plain(slots, memory)

    monkeypatch.setattr(store._file, "read_into", late)
    assert read(store, [*range(COUNT)]) == COUNT
    assert store.counters.superseded == 1
    store.close()


class Flags(FaultyFiles):
    """Counts bytes that came past the page cache; `refuse`: such reads end in EINVAL, as where blocks are larger."""

    refuse = False

    def __init__(self) -> None:
        super().__init__()
        self.past, self.through, self.direct = 0, 0, set[int]()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if flags & os.O_DIRECT and not flags & os.O_WRONLY:
            self.direct.add(fd)
        return fd

    def read_into(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        if fd in self.direct and self.refuse:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        came = super().read_into(fd, buffers, offset)
        self.past += came if fd in self.direct else 0
        self.through += 0 if fd in self.direct else came
        return came


@pytest.mark.parametrize("way", ["past", "no such mode", "refused", "memory beside a block", "cut"])
def test_slots_of_whole_blocks_come_past_the_page_cache(tmp_path: Path, way: str) -> None:
    """Where that cannot be, through it: the bytes are the same."""
    nbytes, count, disk = 2 * BLOCK - HEADER_BYTES, 9, Flags()
    disk.no_direct, disk.refuse = way == "no such mode", way == "refused"
    store = PageStore.open(tmp_path, model=bytes(16), page_bytes=nbytes, page_tokens=4, files=disk)
    pages = [Page(key(number), random.Random(number).randbytes(nbytes)) for number in range(count)]
    assert store.put(pages) == count
    size, keys = store.geometry.slot_bytes, [page.key for page in pages]
    assert size == 2 * BLOCK
    if way == "cut":
        os.truncate(tmp_path / "pages.kv", HEAD_BYTES + count * size - 700)
    whole = mmap.mmap(-1, (count + 1) * size)
    begin = 64 if way == "memory beside a block" else 0
    memory = memoryview(whole)[begin : begin + count * size]
    came = store.read_into(keys, store.find_many(keys), memory)()
    assert came == count - (way == "cut")
    for number in range(came):
        at = number * size + HEADER_BYTES
        assert memory[at : at + nbytes] == pages[number].payload
    if way == "past" and disk.direct:  # a file system may have no such mode
        assert (disk.past, disk.through) == (count * size, 0)
    elif way in ("no such mode", "refused"):
        assert (disk.past, disk.through) == (0, count * size)
    fds = set(disk.direct)
    store.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
