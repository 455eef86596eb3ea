"""Pages read ahead by threads: every page that was asked for is told of once, right or None, whatever fails on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvist.cache import page_reads
from kvist.cache.page_file import HEAD_BYTES
from kvist.cache.page_memory import PageMemory
from kvist.cache.page_reads import PageReads, PlacedReads
from kvist.cache.record import HEADER_BYTES
from kvist.cache.store import PageStore
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import PAGE_BYTES, key, open_store, page, payload

COUNT, ABSENT, DAMAGED = 60, 70, 23


class Told:
    """What has been told of each page."""

    def __init__(self, asked: int) -> None:
        self.asked, self.pages = asked, dict[bytes, bytes | None]()
        self.changed = threading.Condition()

    def __call__(self, keys: Sequence[bytes], payloads: Sequence[memoryview | None]) -> None:
        with self.changed:
            for name, given in zip(keys, payloads, strict=True):
                assert name not in self.pages, "told twice"
                self.pages[name] = None if given is None else bytes(given)
            self.changed.notify_all()

    def all(self) -> dict[bytes, bytes | None]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pages) == self.asked, 30), f"{len(self.pages)} of {self.asked}"
        return self.pages


@pytest.fixture
def disk() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, disk: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> PageStore:
    store = open_store(tmp_path, files=disk)
    assert store.put([page(number) for number in range(COUNT)]) == COUNT
    monkeypatch.setattr(page_reads, "_PLACED_BYTES", 7 * store.geometry.slot_bytes)
    monkeypatch.setattr(page_reads, "_FOUND_AT_ONCE", 3)
    return store


def placed(store: PageStore, told: Told) -> PlacedReads:
    size = store.geometry.slot_bytes
    memory = PageMemory(
        lambda nbytes: memoryview(bytearray(nbytes)), page_bytes=PAGE_BYTES, record_bytes=size, page_at=HEADER_BYTES
    )
    return PlacedReads(store, told, memory)


@pytest.mark.parametrize("make", [PageReads, placed])
def test_pages_absent_and_damaged_ones(make: Callable[[PageStore, Told], PageReads], store: PageStore, tmp_path: Path) -> None:
    with (tmp_path / "pages.kv").open("r+b") as file:
        file.seek(HEAD_BYTES + DAMAGED * store.geometry.slot_bytes + HEADER_BYTES)
        file.write(b"damaged!")
    told = Told(COUNT + 1)
    reads = make(store, told)
    numbers = [*range(40), ABSENT, *range(40, COUNT)]
    reads.start([key(number) for number in numbers[:11]])
    reads.start([key(number) for number in numbers[11:]])
    for number in numbers:
        assert told.all()[key(number)] == (None if number in (ABSENT, DAMAGED) else payload(number)), number
    assert reads.close(30) == []
    store.close()


@pytest.mark.parametrize("make", [PageReads, placed])
def test_reads_that_fail_once_are_tried_again(
    make: Callable[[PageStore, Told], PageReads], store: PageStore, disk: FaultyFiles
) -> None:
    disk.read_errors = 2
    told = Told(COUNT)
    reads = make(store, told)
    reads.start([key(number) for number in range(COUNT)])
    lost = [number for number in range(COUNT) if told.all()[key(number)] is None]
    assert len(lost) <= 2
    assert all(told.all()[key(number)] == payload(number) for number in range(COUNT) if number not in lost)
    assert reads.close(30) == []
    store.close()


@pytest.mark.parametrize("broken", ["find_many", "read_into", "places"])
def test_whatever_breaks_nobody_waits_for_ever(broken: str, store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(COUNT)
    reads = placed(store, told)

    def breaks(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(*((reads._memory, "reserve") if broken == "places" else (store, broken)), breaks)
    reads.start([key(number) for number in range(COUNT)])
    assert set(told.all().values()) == {None}
    assert reads.close(30) == []
    store.close()
