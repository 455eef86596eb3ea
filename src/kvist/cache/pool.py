"""Who holds each page: reference counts, the free list, and which cached page goes first when memory is short.

Owns page ids and counts in arrays of fixed size. Must not know pages' bytes, identities, tokens or devices; the prefix
index tells it what to keep and which page hangs on which. Not for several threads at once.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

MAX_PAGES: Final = (1 << 31) - 1
_PAGE_BITS: Final = 32


class CacheFull(RuntimeError):
    """No pages for a request although everything evictable would go; the message says how many are needed and there."""


class PagePool:
    """Pages 0 .. total - 1, each free, owned (a request refers to it) or cached (only the prefix index keeps it).

    A cached page may be evicted, least recently released first, unless a page that hangs on it is still kept: leaves go
    before their parents, so that every kept page stays reachable. `on_evict(page)` is called before a page is given away.
    """

    def __init__(self, total: int) -> None:
        """Plan bookkeeping for `total` pages (about 40 bytes each). Raises `ValueError` for a count under 1 or over 2**31 - 1."""
        if not 1 <= total <= MAX_PAGES:
            raise ValueError(f"a pool has from 1 to {MAX_PAGES} pages; got {total}")
        self.total = total
        self.on_evict: Callable[[int], None] | None = None
        self._owned = self._cached = 0
        self._clock = 0
        self._free = array("i", range(total - 1, -1, -1))
        self._references = np.zeros(total, dtype=np.int32)
        self._children = np.zeros(total, dtype=np.int32)
        self._kept = np.zeros(total, dtype=np.bool_)
        self._queued = np.zeros(total, dtype=np.bool_)
        self._released_at = np.zeros(total, dtype=np.int64)
        # (time of release, page) packed in one integer. A page stands here at most once, perhaps with an old time, which
        # is put right when it comes to the top: so the queue never outgrows the pool.
        self._queue: list[int] = []

    @property
    def free(self) -> int:
        """Pages that nothing refers to."""
        return len(self._free)

    @property
    def owned(self) -> int:
        """Pages that at least one request refers to, kept by the index or not."""
        return self._owned

    @property
    def cached(self) -> int:
        """Pages that only the prefix index keeps."""
        return self._cached

    def references(self, page: int) -> int:
        """How many requests refer to a page."""
        return int(self._references[page])

    def kept(self, page: int) -> bool:
        """True if the prefix index keeps the page."""
        return bool(self._kept[page])

    def children(self, page: int) -> int:
        """How many kept pages hang on a page."""
        return int(self._children[page])

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one request, evicting cached ones as needed.

        Raises `CacheFull` if there are not enough. Pages evicted by then (only if owned pages hang on cached ones, which
        cannot be known before) stay free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free + self._cached:
            raise self._full(count)
        while len(self._free) < count:
            if self.evict_one() is None:
                raise self._full(count)
        pages = [self._free.pop() for _ in range(count)]
        self._references[pages] = 1
        self._owned += count
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more request refers to each page. Raises `ValueError`, changing nothing, if one of them is free."""
        index = self._checked(pages)
        alive = (self._references[index] > 0) | self._kept[index]
        if not alive.all():
            raise ValueError(f"page {int(index[~alive][0])} is free; only a page in use can be retained")
        idle = np.unique(index[self._references[index] == 0])
        np.add.at(self._references, index, 1)
        self._owned += len(idle)
        self._cached -= len(idle)

    def release(self, pages: Sequence[int]) -> None:
        """One request less refers to each page. Raises `ValueError`, changing nothing, if none does."""
        index = self._checked(pages)
        held, times = np.unique(index, return_counts=True)
        short = self._references[held] < times
        if short.any():
            raise ValueError(f"page {int(held[short][0])} is released more often than it was retained")
        self._references[held] -= times.astype(np.int32)
        idle = held[self._references[held] == 0]
        self._clock += 1
        self._released_at[idle] = self._clock
        self._owned -= len(idle)
        kept = self._kept[idle]
        self._cached += int(kept.sum())
        # Given back last page first, so that the next request is handed out ascending ids again.
        self._free.extend(idle[~kept][::-1].tolist())
        for page in idle[kept & (self._children[idle] == 0)].tolist():
            self._enqueue(page)

    def keep(self, page: int) -> None:
        """The prefix index keeps an owned page. Raises `ValueError` for another page, or one that it keeps already."""
        if not self._references[page] or self._kept[page]:
            state = "kept already" if self._kept[page] else "free"
            raise ValueError(f"page {page} is {state}; only a page that a request owns can be kept")
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """The prefix index keeps a page no longer. Raises `ValueError` if it does not, or if kept pages hang on it."""
        if not self._kept[page] or self._children[page]:
            raise ValueError(f"page {page} has {self._children[page]} pages hanging on it, kept: {self._kept[page]}")
        self._kept[page] = False
        if not self._references[page]:
            self._cached -= 1
            self._free.append(page)

    def hang(self, page: int) -> None:
        """One more kept page hangs on `page`, which therefore stays."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is not kept; nothing can hang on it")
        self._children[page] += 1

    def unhang(self, page: int) -> None:
        """One kept page less hangs on `page`. Raises `ValueError` if none does."""
        if not self._children[page]:
            raise ValueError(f"no page hangs on page {page}")
        self._children[page] -= 1
        if self._evictable(page):
            self._enqueue(page)

    def evict_one(self) -> int | None:
        """Free the least recently released cached page on which none hangs; None if there is none."""
        while self._queue:
            entry = self._queue[0]
            page = entry & ((1 << _PAGE_BITS) - 1)
            if not self._evictable(page):
                heapq.heappop(self._queue)
                self._queued[page] = False
            elif entry >> _PAGE_BITS != self._released_at[page]:
                heapq.heapreplace(self._queue, self._entry(page))
            else:
                heapq.heappop(self._queue)
                self._queued[page] = False
                if self.on_evict is not None:
                    self.on_evict(page)
                if self._kept[page]:
                    self.drop(page)
                return page
        return None

    def check(self) -> None:
        """Recount everything from the arrays; an `AssertionError` names the count that is off."""
        held = self._references > 0
        assert (self._references >= 0).all(), "a reference count is negative"
        assert self._owned == held.sum(), f"owned is {self._owned}, counted {held.sum()}"
        cached = self._kept & ~held
        assert self._cached == cached.sum(), f"cached is {self._cached}, counted {cached.sum()}"
        free = np.sort(np.frombuffer(self._free, dtype=np.int32)) if self._free else np.empty(0, dtype=np.int32)
        assert np.array_equal(free, np.flatnonzero(~held & ~self._kept)), "the free list is not the set of free pages"
        assert self.free + self.owned + self.cached == self.total, "a page is lost"
        assert not self._children[~self._kept].any(), "a page hangs on one that is not kept"
        queued = sorted(entry & ((1 << _PAGE_BITS) - 1) for entry in self._queue)
        assert queued == np.flatnonzero(self._queued).tolist(), "the queue's marks are wrong"
        assert self._queued[cached & (self._children == 0)].all(), "an evictable page is not queued"

    def _evictable(self, page: int) -> bool:
        return bool(self._kept[page] and not self._references[page] and not self._children[page])

    def _entry(self, page: int) -> int:
        return int(self._released_at[page]) << _PAGE_BITS | page

    def _enqueue(self, page: int) -> None:
        if not self._queued[page]:
            self._queued[page] = True
            heapq.heappush(self._queue, self._entry(page))

    def _checked(self, pages: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        index = np.array(pages, dtype=np.int64)
        outside = index[(index < 0) | (index >= self.total)]
        if outside.size:
            raise ValueError(f"page {int(outside[0])} does not exist; the pool has pages 0 to {self.total - 1}")
        return index

    def _full(self, count: int) -> CacheFull:
        return CacheFull(
            f"{count} pages are needed; {self.free} are free and {self._cached} cached of {self.total} "
            f"({self._owned} are in use by requests). Wait for a request to end, or give the cache more pages"
        )
