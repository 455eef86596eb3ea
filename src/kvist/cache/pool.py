"""Who holds each page: reference counts, the free list, and which cached page goes first when memory is short.

Owns page ids and counts in arrays of fixed size. Must not know pages' bytes, identities, tokens or devices; the prefix
index tells it what to keep and which page hangs on which. Not for several threads at once.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_PAGES: Final = (1 << 31) - 1
NO_PAGE: Final = -1
_PAGE_BITS: Final = 32
_Pages = NDArray[np.integer[Any]]


class CacheFull(RuntimeError):
    """No pages for a request although everything evictable would go; the message says how many are needed and there."""


class PagePool:
    """Pages 0 .. total - 1, each free, owned (a request refers to it) or cached (only the prefix index keeps it).

    A kept page may lie behind another kept one. A cached page may be evicted, least recently released first, unless a page
    behind it is still kept: leaves go before their parents, so that every kept page stays reachable. `on_evict(page)` is
    called before a page is given away.
    """

    def __init__(self, total: int) -> None:
        """Plan bookkeeping for `total` pages (about 40 bytes each). Raises `ValueError` for a count under 1 or over 2**31 - 1."""
        if not 1 <= total <= MAX_PAGES:
            raise ValueError(f"a pool has from 1 to {MAX_PAGES} pages; got {total}")
        self.total = total
        self.on_evict: Callable[[int], None] | None = None
        self._owned = self._cached = self._blocked = 0
        self._clock = 0
        self._free = array("i", range(total - 1, -1, -1))
        self._references = np.zeros(total, dtype=np.int32)
        self._kept = np.zeros(total, dtype=np.bool_)
        self._before = np.full(total, NO_PAGE, dtype=np.int32)
        # Kept pages directly behind a page, and how many of them are owned or have an owned page somewhere behind them.
        self._children = np.zeros(total, dtype=np.int32)
        self._busy_children = np.zeros(total, dtype=np.int32)
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

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now: free ones, and cached ones behind which no owned page lies."""
        return len(self._free) + self._cached - self._blocked

    def references(self, page: int) -> int:
        """How many requests refer to a page."""
        return int(self._references[page])

    def kept(self, page: int) -> bool:
        """True if the prefix index keeps the page."""
        return bool(self._kept[page])

    def children(self, page: int) -> int:
        """How many kept pages lie directly behind a page."""
        return int(self._children[page])

    def before(self, page: int) -> int:
        """The page that a kept page lies behind, or NO_PAGE."""
        return int(self._before[page])

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one request, evicting cached ones as needed.

        Raises `CacheFull`, evicting nothing, if fewer are `available`.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.available:
            raise CacheFull(
                f"{count} pages are needed; {self.free} are free and {self.available - self.free} can be evicted of "
                f"{self.total} ({self._owned} are in use by requests). Wait for a request to end, or give the cache more pages"
            )
        while len(self._free) < count:
            evicted = self.evict_one()
            assert evicted is not None, f"{self.available} pages are available, but none can be evicted"
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
        blocked = self._busy_children[idle] > 0
        np.add.at(self._references, index, 1)
        self._owned += len(idle)
        self._cached -= len(idle)
        self._blocked -= int(blocked.sum())
        self._now_busy(idle[~blocked])

    def release(self, pages: Sequence[int]) -> None:
        """One request less refers to each page. Raises `ValueError`, changing nothing, if none does."""
        index = self._checked(pages)
        held, times = np.unique(index, return_counts=True)
        short = self._references[held] < times
        if short.any():
            raise ValueError(f"page {int(held[short][0])} is released more often than it was retained")
        self._references[held] -= times.astype(np.int32)
        idle = held[self._references[held] == 0]
        kept = self._kept[idle]
        self._clock += 1
        self._released_at[idle] = self._clock
        self._owned -= len(idle)
        self._cached += int(kept.sum())
        # Given back last page first, so that the next request is handed out ascending ids again.
        self._free.extend(idle[~kept][::-1].tolist())
        idle = idle[kept]
        self._now_idle(idle)
        for page in idle[self._children[idle] == 0].tolist():
            self._enqueue(page)

    def keep(self, page: int, before: int = NO_PAGE) -> None:
        """The prefix index keeps an owned page, behind the kept page `before`.

        Raises `ValueError` for a page that no request owns or that is kept already, or if `before` is not kept.
        """
        if not self._references[page] or self._kept[page]:
            raise self._not_new(page)
        if before != NO_PAGE and not self._kept[before]:
            raise ValueError(f"page {before} is not kept; page {page} cannot lie behind it")
        self._kept[page] = True
        self._before[page] = before
        if before != NO_PAGE:
            self._children[before] += 1
            if self._references[before] or self._busy_children[before]:
                self._busy_children[before] += 1
            else:
                self._now_busy(np.array([page]))

    def keep_run(self, pages: Sequence[int], before: int = NO_PAGE) -> None:
        """`keep` of pages, each behind the one before it. Raises as `keep`, and for a page given twice, changing nothing."""
        index = self._checked(pages)
        bad = index[(self._references[index] == 0) | self._kept[index]]
        if bad.size:
            raise self._not_new(int(bad[0]))
        if len(np.unique(index)) < len(index):
            raise ValueError(f"pages {list(pages)} are to lie behind each other; one of them stands there twice")
        self.keep(pages[0], before)
        parents, behind = index[:-1], index[1:]
        self._kept[behind] = True
        self._before[behind] = parents
        # A request owns all of them, so a page's parent has an owned page behind it.
        self._children[parents] += 1
        self._busy_children[parents] += 1

    def drop(self, page: int) -> None:
        """The prefix index keeps a page no longer. Raises `ValueError` if it does not, or if kept pages lie behind it."""
        if not self._kept[page] or self._children[page]:
            raise ValueError(f"page {page} has {self._children[page]} pages behind it, kept: {self._kept[page]}")
        if self._references[page]:
            self._now_idle(np.array([page]))
        else:
            self._cached -= 1
            self._free.append(page)
        self._kept[page] = False
        before = self.before(page)
        self._before[page] = NO_PAGE
        if before != NO_PAGE:
            self._children[before] -= 1
            if self._evictable(before):
                self._enqueue(before)

    def evict_one(self) -> int | None:
        """Free the least recently released cached page that has none behind it; None if there is none."""
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
        behind = np.flatnonzero(self._kept & (self._before != NO_PAGE))
        children = np.bincount(self._before[behind], minlength=self.total)
        assert np.array_equal(self._children, children), "pages behind a page are miscounted"
        assert self._kept[self._before[behind]].all(), "a page lies behind one that is not kept"
        busy = held & self._kept
        while True:
            counts = np.bincount(self._before[behind[busy[behind]]], minlength=self.total)
            if np.array_equal(busy, busy | (counts > 0)):
                break
            busy |= counts > 0
        assert np.array_equal(self._busy_children, counts), "busy pages behind a page are miscounted"
        assert self._blocked == (busy & ~held).sum(), f"blocked is {self._blocked}, counted {(busy & ~held).sum()}"
        queued = sorted(entry & ((1 << _PAGE_BITS) - 1) for entry in self._queue)
        assert queued == np.flatnonzero(self._queued).tolist(), "the queue's marks are wrong"
        assert self._queued[cached & (self._children == 0)].all(), "an evictable page is not queued"

    def _now_busy(self, pages: _Pages) -> None:
        """These kept pages are owned, or have owned pages behind them, since just now: so have those before them."""
        while len(pages):
            before = self._before[pages]
            before = before[before != NO_PAGE]
            parents = np.unique(before)
            fresh = parents[(self._busy_children[parents] == 0) & (self._references[parents] == 0)]
            np.add.at(self._busy_children, before, 1)
            self._blocked += len(fresh)
            pages = fresh

    def _now_idle(self, pages: _Pages) -> None:
        """These kept pages were owned until just now. Where no owned page lies behind them, they free those before them.

        A request releases a chain at once, so all of them are first taken for idle together; the few that are not, because
        others own pages behind them, are then marked again. One page after the other would take a step for each.
        """
        released = pages
        while len(pages):
            before = self._before[pages]
            before = before[before != NO_PAGE]
            np.subtract.at(self._busy_children, before, 1)
            parents = np.setdiff1d(before, released)
            pages = parents[(self._busy_children[parents] == 0) & (self._references[parents] == 0)]
            self._blocked -= len(pages)
        still = released[self._busy_children[released] > 0]
        self._blocked += len(still)
        self._now_busy(still)

    def _evictable(self, page: int) -> bool:
        return bool(self._kept[page] and not self._references[page] and not self._children[page])

    def _not_new(self, page: int) -> ValueError:
        state = "kept already" if self._kept[page] else "free"
        return ValueError(f"page {page} is {state}; only a page that a request owns can be kept")

    def _entry(self, page: int) -> int:
        return int(self._released_at[page]) << _PAGE_BITS | page

    def _enqueue(self, page: int) -> None:
        if not self._queued[page]:
            self._queued[page] = True
            heapq.heappush(self._queue, self._entry(page))

    def _checked(self, pages: Sequence[int]) -> _Pages:
        index = np.array(pages, dtype=np.int64)
        outside = index[(index < 0) | (index >= self.total)]
        if outside.size:
            raise ValueError(f"page {int(outside[0])} does not exist; the pool has pages 0 to {self.total - 1}")
        return index
