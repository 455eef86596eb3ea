"""Pages between host memory, a store, the tiers and a card's pool: every byte where it belongs, order kept, what is missing said.

Runs on the GPU where there is one, else on the processor, where the same calls copy without streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvist.cache import page_memory
from kvist.cache.record import HEADER_BYTES, Buffer, Page
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.card import page_mover
from kvist.engine.card.page_mover import PageMover
from kvist.engine.page_bytes import CardPages, HostPages, page_bytes
from kvist.page_layout import PageLayout
from kvist.presets import preset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = PageLayout.of(preset("tiny"), 8).page_bytes
COUNT = 11


def pool(pages: int = 32) -> torch.Tensor:
    return torch.zeros(pages, SIZE, dtype=torch.uint8, device=DEVICE)


def host_pages(seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(0, 256, (COUNT, SIZE), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.uint8)


def payloads(host_PB: torch.Tensor) -> list[Buffer]:
    return [row.numpy().tobytes() for row in host_PB]


def places(seed: int = 1) -> list[int]:
    return torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:COUNT].tolist()


def keys() -> list[bytes]:
    return [bytes([number]) * 16 for number in range(COUNT)]


def open_store(folder: Path) -> PageStore:
    return PageStore.open(folder, model=b"m" * 16, page_bytes=SIZE, page_tokens=8)


@pytest.mark.parametrize("record", [(None, 0), (SIZE + 640, 128)])
@pytest.mark.parametrize("part_pages", [1, 3, COUNT, 100])
@pytest.mark.parametrize("piece_pages", [2, 5, 100])
def test_restored_pages_lie_where_they_belong_and_come_back(
    record: tuple[int | None, int], part_pages: int, piece_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = record[0] or SIZE
    monkeypatch.setattr(page_memory, "PIECE_BYTES", piece_pages * size)
    monkeypatch.setattr(page_mover, "FIRST_BYTES", 2 * size)
    monkeypatch.setattr(page_mover, "FIRST_SAVED_BYTES", size)
    there, host, pages = pool(), host_pages(), places()
    mover = PageMover(there, record_bytes=record[0], page_at=record[1], part_bytes=part_pages * size)
    assert mover.restore(payloads(host), pages) == COUNT
    assert torch.equal(there[pages].cpu(), host)
    others = [page for page in range(32) if page not in pages]
    assert not there[others].any()
    back = mover.save(pages[::-1])
    assert [bytes(page) for page in back] == payloads(host)[::-1]
    # What lies in places already leaves from there, in whatever order.
    there.zero_()
    mixed = [back[3], *payloads(host)[1:3], *back[8:5:-1]]
    assert mover.restore(mixed, pages[:6]) == 6
    assert [row.numpy().tobytes() for row in there[pages[:6]].cpu()] == [bytes(page) for page in mixed]
    assert mover.nbytes == 2 * min(part_pages, 32) * size + 2 * min(part_pages, 2) * SIZE


def test_places_stay_taken_until_their_bytes_have_left() -> None:
    there = pool()
    mover = PageMover(there)
    for seed in range(20):  # each round's pages take the places of those before
        host = host_pages(seed)
        assert mover.restore(payloads(host), places(seed)) == COUNT
        assert torch.equal(there[places(seed)].cpu(), host)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    mover.restore([], [])
    assert mover.memory.free == mover.memory.places


@pytest.mark.parametrize("part_pages", [2, 100])
def test_moves_are_behind_queued_work_and_before_what_follows(part_pages: int) -> None:
    """The card is busy when each is asked for, so that one that did not wait would come too early."""
    there, pages = pool(), places()
    mover = PageMover(there, part_bytes=part_pages * SIZE)
    side = 4096 if DEVICE.type == "cuda" else 64
    long_SS = torch.eye(side, device=DEVICE)
    for seed in range(3):
        host, saved = host_pages(seed), host_pages(100 + seed)
        given, other = payloads(host), saved.to(DEVICE)
        for _ in range(20):
            long_SS = long_SS @ long_SS
        there[pages] = other
        back = mover.save(pages)
        for _ in range(20):
            long_SS = long_SS @ long_SS
        there.zero_()
        assert mover.restore(given, pages) == COUNT
        came = there[pages].clone()
        there.zero_()
        assert [bytes(page) for page in back] == payloads(saved)
        assert torch.equal(came.cpu(), host)
        assert not there.any()


@pytest.mark.parametrize("part_pages", [1, 4, 100])
def test_up_to_the_first_that_is_missing(part_pages: int) -> None:
    there, host, pages = pool(), host_pages(), places()
    mover = PageMover(there, part_bytes=part_pages * SIZE)
    for missing in (0, 4, 10):
        there.zero_()
        given: list[Buffer | None] = [*payloads(host)]
        given[missing] = None
        assert mover.restore(given, pages) == missing
        assert torch.equal(there[pages[:missing]].cpu(), host[:missing])
        assert not there[pages[missing:]].any()

    def broken() -> Iterator[Buffer]:
        yield from payloads(host)[:6]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        mover.restore(broken(), pages)
    # The mover goes on after a failure.
    assert mover.restore(payloads(host), pages) == COUNT
    assert torch.equal(there[pages].cpu(), host)


def test_where_no_more_memory_can_be_pinned_the_rest_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore ends at the first page without a place, a save says so, tiers keep what comes outside of lent memory."""
    monkeypatch.setattr(page_memory, "PIECE_BYTES", 4 * SIZE)
    there, host, pages = pool(), host_pages(), places()
    mover = PageMover(there, part_bytes=3 * SIZE)
    held = mover.memory.take(4)
    empty = torch.empty

    def full(*shape: int, **kinds: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(page_mover.torch, "empty", full)
    with pytest.raises(MemoryError, match="to pin for pages"):
        mover.save(pages)
    assert mover.restore(payloads(host), pages) == 0
    del held[2:]
    assert mover.restore(payloads(host)[:2], pages[:2]) == 2
    monkeypatch.setattr(page_mover.torch, "empty", empty)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(there[pages[:2]].cpu(), host[:2])
    with closing(Tiers(host_bytes=1 << 20, store=None)) as tiers:
        tiers.lend(mover.memory)
        mover.memory.take(mover.memory.free)  # let go at once
        held = [*held, *mover.memory.take(mover.memory.free)]
        monkeypatch.setattr(page_mover.torch, "empty", full)
        tiers.offer(Page(keys()[0], payloads(host)[0], 8, 0, None))
        assert tiers.get(keys()[0]) == payloads(host)[0]
    monkeypatch.setattr(page_mover.torch, "empty", empty)
    assert mover.restore(payloads(host), pages) == COUNT
    assert torch.equal(there[pages].cpu(), host)


@pytest.mark.parametrize("host_bytes", [0, 5 * SIZE, 1 << 20])
def test_through_the_tiers_and_back_from_a_disk(tmp_path: Path, host_bytes: int) -> None:
    there, host, pages = pool(), host_pages(), places()
    there[pages] = host.to(DEVICE)
    with closing(Tiers(host_bytes=host_bytes, store=open_store(tmp_path))) as tiers:
        card = CardPages.of(there, tiers)
        for key, payload in zip(keys(), card.read(pages), strict=True):
            tiers.offer(Page(key, payload))
        assert tiers.flush(10)
        there.zero_()
        assert card.write(pages, tiers.get_many(keys())) == COUNT
        assert torch.equal(there[pages].cpu(), host)
    with closing(Tiers(host_bytes=host_bytes, store=open_store(tmp_path))) as tiers:
        card = CardPages.of(there, tiers)
        for ahead in (True, False):
            there.zero_()
            if ahead:
                tiers.prefetch(keys())
            assert card.write(pages[::-1], tiers.get_many(keys())) == COUNT
            assert torch.equal(there[pages[::-1]].cpu(), host)
        assert tiers.counters.disk_hits + tiers.counters.host_hits == 2 * COUNT
        assert tiers.counters.prefetched == COUNT


@pytest.mark.parametrize("ahead", [True, False])
def test_a_damaged_record_ends_the_hit_and_what_is_behind_it_stays(tmp_path: Path, ahead: bool) -> None:
    there, host, pages = pool(), host_pages(), places()
    with closing(open_store(tmp_path)) as store:
        store.put([Page(key, payload) for key, payload in zip(keys(), payloads(host), strict=True)])
        slot = store.geometry.slot_bytes
    file = tmp_path / "pages.kv"
    raw = bytearray(file.read_bytes())
    at = len(raw) - (COUNT - 5) * slot + HEADER_BYTES + 3  # a byte of the sixth record's page
    raw[at] ^= 1
    file.write_bytes(raw)
    with closing(Tiers(host_bytes=0, store=open_store(tmp_path))) as tiers:
        card = CardPages.of(there, tiers)
        if ahead:
            tiers.prefetch(keys())
        assert card.write(pages, tiers.get_many(keys())) == 5
        assert torch.equal(there[pages[:5]].cpu(), host[:5])
        assert not there[pages[5:]].any()
        assert tiers.store is not None
        assert tiers.store.counters.corrupt == {"checksum": 1}
        assert card.write(pages[6:], tiers.get_many(keys()[6:])) == 5
        assert torch.equal(there[pages[6:]].cpu(), host[6:])


def test_a_pool_on_the_processor_is_written_in_place(tmp_path: Path) -> None:
    there, host = torch.zeros(32, SIZE, dtype=torch.uint8), host_pages()
    with closing(Tiers(host_bytes=0, store=open_store(tmp_path))) as tiers:
        made = page_bytes(there, tiers)
        assert isinstance(made, HostPages)
        assert made.write(places(), [*payloads(host)[:7], None, bytes(SIZE)]) == 7
        assert torch.equal(there[places()[:7]], host[:7])
        assert [bytes(page) for page in made.read(places()[:7])] == payloads(host)[:7]


def test_refusals(tmp_path: Path) -> None:
    mover, host = PageMover(pool()), host_pages()
    with pytest.raises(ValueError, match="page 33 is outside the pool of 32 pages"):
        mover.restore(payloads(host), [*range(COUNT - 1), 33])
    with pytest.raises(ValueError, match="page -1 is outside"):
        mover.save([0, -1])
    with pytest.raises(ValueError, match="hold no page"):
        PageMover(pool(), part_bytes=10)
    with (
        closing(Tiers(host_bytes=0, store=open_store(tmp_path))) as tiers,
        pytest.raises(ValueError, match="this store has records of"),
    ):
        tiers.lend(mover.memory)
