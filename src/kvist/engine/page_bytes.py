"""The bytes of a memory's pages for the tiers: one by one on the processor, by runs through pinned memory on a card.

Chosen once by where the pool lies. Must not know keys, requests or how tiers keep pages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvist.cache.record import HEADER_BYTES, Buffer
from kvist.cache.tiers import Tiers
from kvist.engine.card.page_mover import PageMover
from kvist.engine.pages import PageBytes

LOG = logging.getLogger(__name__)


class HostPages:
    """Pages of a pool on the processor, uint8 [pages, page bytes]. See `pages.PageBytes`."""

    def __init__(self, pool_PB: Tensor) -> None:
        self.pool_PB = pool_PB

    def read(self, pages: Sequence[int]) -> list[Buffer]:
        """Views of the pages: they change as these do."""
        return [self.pool_PB[page].numpy().data for page in pages]

    def write(self, pages: Sequence[int], payloads: Iterable[Buffer | None]) -> int:
        """See `pages.PageBytes`."""
        count = 0
        for page, payload in zip(pages, payloads, strict=False):
            if payload is None:
                break
            self.pool_PB[page].numpy()[:] = memoryview(payload)
            count += 1
        return count


class CardPages:
    """Pages of a pool on a card, moved by runs; the tiers keep theirs in the mover's memory. See `pages.PageBytes`."""

    def __init__(self, mover: PageMover, tiers: Tiers) -> None:
        self.mover = mover
        tiers.lend(mover.memory)

    @staticmethod
    def of(pool_PB: Tensor, tiers: Tiers) -> CardPages:
        """For a pool, with places that are records of the tiers' store."""
        if tiers.store is None:
            return CardPages(PageMover(pool_PB), tiers)
        return CardPages(PageMover(pool_PB, record_bytes=tiers.store.geometry.slot_bytes, page_at=HEADER_BYTES), tiers)

    def read(self, pages: Sequence[int]) -> list[memoryview]:
        """See `pages.PageBytes`."""
        return self.mover.save(pages)

    def write(self, pages: Sequence[int], payloads: Iterable[Buffer | None]) -> int:
        """See `pages.PageBytes`. Copies may be under way when it returns; work queued afterwards sees them."""
        return self.mover.restore(payloads, pages)


def page_bytes(pool_PB: Tensor, tiers: Tiers) -> PageBytes:
    """The bytes of a pool's pages, uint8 [pages, page bytes], for these tiers."""
    if pool_PB.device.type == "cpu":
        return HostPages(pool_PB)
    with torch.cuda.device(pool_PB.device):
        made = CardPages.of(pool_PB, tiers)
    LOG.info("engine: pages move through pinned memory, %s bytes of staging on %s", f"{made.mover.nbytes:,}", pool_PB.device)
    return made
