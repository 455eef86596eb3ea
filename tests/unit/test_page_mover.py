"""Pages between host memory, a store and a card's pool: every byte where it belongs, order kept, what is missing said.

Runs on the GPU where there is one, else on the processor, where the same calls copy without streams.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvist.cache.page_rows import PageRows
from kvist.cache.record import HEADER_BYTES, Page
from kvist.cache.store import PageStore
from kvist.engine.card import page_mover
from kvist.engine.card.page_mover import PageMover
from kvist.page_layout import PageLayout
from kvist.presets import preset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNT = 11


def made(pages: int = 32) -> PageRows:
    return PageRows(PageLayout.of(preset("tiny"), 8), pages, 1, 64, DEVICE)


def host_pages(rows: PageRows, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(0, 256, (COUNT, rows.layout.page_bytes), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.uint8).pin_memory() if DEVICE.type == "cuda" else drawn.to(torch.uint8)


def places(seed: int = 1) -> list[int]:
    return torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:COUNT].tolist()


@pytest.mark.parametrize("part_pages", [1, 3, COUNT, 100])
def test_restored_pages_lie_where_they_belong_and_come_back(part_pages: int) -> None:
    rows = made()
    mover, host, pages = PageMover(rows, part_bytes=part_pages * rows.layout.page_bytes), host_pages(rows), places()
    mover.restore(host, pages)
    assert torch.equal(rows.bytes_PB[pages].cpu(), host)
    others = [page for page in range(32) if page not in pages]
    assert not rows.bytes_PB[others].any()
    back = torch.zeros_like(host)
    mover.save(pages[::-1], back)
    assert torch.equal(back, host.flip(0))


def test_from_a_store_up_to_the_first_missing_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made()
    monkeypatch.setattr(page_mover, "READ_BYTES", 3 * rows.layout.page_bytes)
    mover, host, pages = PageMover(rows), host_pages(rows), places()
    keys = [bytes([number]) * 16 for number in range(COUNT)]
    store = PageStore.open(tmp_path, model=b"m" * 16, page_bytes=rows.layout.page_bytes, page_tokens=8)
    store.put([Page(key, row.numpy().tobytes()) for key, row in zip(keys, host, strict=True)])

    def restored() -> int:
        return mover.restore_from(
            lambda first, stop, memory: store.read_into(keys[first:stop], memory), pages,
            record_bytes=store.geometry.slot_bytes, page_at=HEADER_BYTES,
        )  # fmt: skip

    assert restored() == COUNT
    assert torch.equal(rows.bytes_PB[pages].cpu(), host)
    rows.bytes_PB.zero_()
    store.condemn([keys[5]])
    assert restored() == 5
    assert torch.equal(rows.bytes_PB[pages[:5]].cpu(), host[:5])
    assert not rows.bytes_PB[pages[5:]].any()
    store.close()


@pytest.mark.parametrize("part_pages", [1, 4, 16, 100])
def test_a_source_that_ends_early_or_fails(part_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made()
    monkeypatch.setattr(page_mover, "READ_BYTES", part_pages * rows.layout.page_bytes)
    mover, host, pages = PageMover(rows), host_pages(rows), places()

    def ending(first: int, stop: int, memory: memoryview) -> Callable[[], int]:
        there = host[first : min(stop, 4)].numpy().tobytes()
        memory[: len(there)] = there
        return lambda: len(there) // host.shape[1]

    for _ in range(3):  # buffers are used again
        assert mover.restore_from(ending, pages) == 4
        assert torch.equal(rows.bytes_PB[pages[:4]].cpu(), host[:4])
    assert not rows.bytes_PB[pages[4:]].any()

    def broken(first: int, stop: int, memory: memoryview) -> Callable[[], int]:
        if stop > 6:
            raise OSError("the disk is gone")
        memory[: (stop - first) * host.shape[1]] = host[first:stop].numpy().tobytes()
        return lambda: stop - first

    with pytest.raises(OSError, match="the disk is gone"):
        mover.restore_from(broken, pages)
    # The mover goes on after a failure.
    mover.restore(host, pages)
    assert torch.equal(rows.bytes_PB[pages].cpu(), host)


def test_refusals() -> None:
    rows = made()
    mover, host = PageMover(rows), host_pages(rows)
    with pytest.raises(ValueError, match="page 33 is outside the pool of 32 pages"):
        mover.restore(host, [*range(COUNT - 1), 33])
    with pytest.raises(ValueError, match="3 pages of"):
        mover.save([0, 1, 2], host)
    with pytest.raises(ValueError, match="hold no page"):
        PageMover(rows, part_bytes=10)
