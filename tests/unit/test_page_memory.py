"""Places for pages in host memory: side by side, taken as long as anybody sees them, free afterwards, never twice."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from kvist.cache import page_memory
from kvist.cache.page_memory import PageMemory

PAGE, RECORD, AT = 96, 160, 32


def made(monkeypatch: pytest.MonkeyPatch, each: int = 4) -> PageMemory:
    monkeypatch.setattr(page_memory, "PIECE_BYTES", each * RECORD + 7)
    return PageMemory(lambda nbytes: memoryview(bytearray(nbytes)), page_bytes=PAGE, record_bytes=RECORD, page_at=AT)


def numbers(memory: PageMemory, pages: list[memoryview]) -> list[int | None]:
    return [memory.place_of(page) for page in pages]


def test_places_are_neighbours_and_come_back_when_nobody_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made(monkeypatch)
    pages = memory.take(6)
    assert numbers(memory, pages) == list(range(6))
    assert (memory.places, memory.free) == (8, 2)
    assert memory.runs(list(range(6))) == [(0, 4), (4, 6)], "a run ends where its piece does"
    assert memory.runs([5, 6, 2, 3, 4, 7]) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert memory.runs([]) == []
    pages[1][:] = bytes(range(PAGE))
    record = memory.records(1, 2)
    assert len(record) == 2 * RECORD
    assert bytes(record[AT : AT + PAGE]) == bytes(range(PAGE))
    seen = pages[2].toreadonly()[5:]
    assert memory.place_of(seen) == 2
    del pages
    assert memory.free == 7, "one is still seen"
    del seen
    assert memory.free == 8
    assert numbers(memory, memory.take(3)) == [0, 1, 2], "the first free ones, so that runs form again"


def test_own_copies_what_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = made(monkeypatch), made(monkeypatch)
    (mine,) = memory.take(1)
    (foreign,) = other.take(1)
    foreign[:] = bytes([7] * PAGE)
    assert memory.own(mine) is mine
    kept = [memory.own(payload) for payload in (foreign, bytes([8] * PAGE), bytearray([9] * PAGE))]
    assert [bytes(page) for page in kept] == [bytes([n] * PAGE) for n in (7, 8, 9)]
    assert numbers(memory, kept) == [1, 2, 3]
    assert memory.place_of(foreign) is None
    with pytest.raises(ValueError, match="does not fit in a record of 100"):
        PageMemory(lambda nbytes: memoryview(bytearray(nbytes)), page_bytes=PAGE, record_bytes=100, page_at=AT)


def test_no_place_is_given_twice_whoever_takes_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, failures = made(monkeypatch, each=16), list[str]()

    def walk(seed: int) -> None:
        rng, held = random.Random(seed), list[tuple[memoryview, bytes]]()
        for _ in range(300):
            if held and rng.random() < 0.5:
                page, mark = held.pop(rng.randrange(len(held)))
                if bytes(page) != mark:
                    failures.append(f"walker {seed}: a page changed")
            else:
                for page in memory.take(rng.randint(1, 3)):
                    mark = rng.randbytes(PAGE)
                    page[:] = mark
                    held.append((page, mark))
        failures.extend(f"walker {seed}: a page changed" for page, mark in held if bytes(page) != mark)

    walkers = [threading.Thread(target=walk, args=(seed,)) for seed in range(4)]
    for walker in walkers:
        walker.start()
    for walker in walkers:
        walker.join()
    assert not failures
    gc.collect()
    assert memory.free == memory.places


def test_places_of_pages_here_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = made(monkeypatch), made(monkeypatch)
    pages = [*here.take(2), *other.take(1)]
    assert here.places_of(pages[:2]) == [0, 1]
    assert here.places_of([pages[1], pages[2], bytes(8), memoryview(bytes(8)), pages[0]]) == [1, -1, -1, -1, 0]
    assert here.places_of([]) == []


def test_a_reserved_place_is_nobodys_until_its_page_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    there = made(monkeypatch)
    places = there.reserve(2)
    free = there.free
    pages = there.pages(places)
    assert there.places_of(pages) == places
    assert there.free == free
    del pages
    assert there.free == free + 2
