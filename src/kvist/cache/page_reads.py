"""Reading pages of a store ahead, by threads of their own: into memory of each page's, or straight to the places of lent memory.

Whatever happens, `arrived` is told once of every page: its bytes, or None. Must not know tiers, budgets or who waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from kvist.cache.page_index import Entry
from kvist.cache.page_memory import PageMemory
from kvist.cache.store import PageStore
from kvist.cache.workers import Workers

_READERS: Final = 2
_READ_PAGES: Final = 64
_PLACED_READERS: Final = 4
_PLACED_BYTES: Final = 8 << 20
"""Threads that read straight to places, and bytes that one takes at a time. One more proves what they have read: several hand
Python's lock to each other more than they prove (measured: four prove 76% of a plain read's rate, one 88%)."""
_FOUND_AT_ONCE: Final = 16
"""Reads for which places on the disk are looked up together, after the first."""

Arrived = Callable[[Sequence[bytes], Sequence[memoryview | None]], None]

log = logging.getLogger(__name__)


class PageReads:
    """Each page into memory of its own."""

    def __init__(self, store: PageStore, arrived: Arrived, *, readers: int = _READERS) -> None:
        self.store, self._arrived = store, arrived
        self._readers = Workers(readers, "kvist-page-reader")

    def start(self, keys: Sequence[bytes]) -> None:
        """Begin to read pages, in order. Waits for nothing."""
        for at in range(0, len(keys), _READ_PAGES):
            self._readers.submit(self._read_pages, deque(keys[at : at + _READ_PAGES]))

    def close(self, timeout_s: float | None) -> list[str]:
        """End; what still waits for the disk after `timeout_s` (None waits). Pages that have not begun are told to nobody."""
        return [] if self._readers.close(timeout_s) else ["a read of pages"]

    def _read_pages(self, left: deque[bytes]) -> None:
        with self._told(left):
            for payload in self.store.get_many(list(left)):
                self._arrived([left.popleft()], [payload])

    @contextmanager
    def _told(self, left: deque[bytes]) -> Iterator[None]:
        """Nobody may wait for ever: pages that are `left` when this ends count as absent."""
        try:
            yield
        except Exception:
            log.exception("%s: reading pages ahead ended early; they count as absent", self.store.folder)
        finally:
            self._arrived(list(left), [None] * len(left))


class PlacedReads(PageReads):
    """Pages to places of `memory`, records of it as of the store: read there by few large calls and proved there meanwhile."""

    def __init__(self, store: PageStore, arrived: Arrived, memory: PageMemory) -> None:
        super().__init__(store, arrived, readers=_PLACED_READERS)
        self._memory, self._each = memory, max(1, _PLACED_BYTES // memory.record_bytes)
        self._prover = Workers(1, "kvist-page-prover")

    def start(self, keys: Sequence[bytes]) -> None:
        """See `PageReads`."""
        self._readers.submit(self._find, deque(keys))

    def close(self, timeout_s: float | None) -> list[str]:
        """See `PageReads`."""
        began = time.monotonic()
        waiting = super().close(timeout_s)
        left = None if timeout_s is None else max(0.0, began + timeout_s - time.monotonic())
        return waiting if self._prover.close(left) else [*waiting, "a page read again"]

    def _find(self, left: deque[bytes]) -> None:
        """Look up where pages lie, by one thread for many: every row of an index's answer hands Python's lock over."""
        with self._told(left):
            reads = 1
            while left:
                part = list(left)[: reads * self._each]
                entries = self.store.find_many(part)
                for at in range(0, len(part), self._each):
                    self._readers.submit(self._read, deque(part[at : at + self._each]), entries)
                    for _ in part[at : at + self._each]:
                        left.popleft()
                reads = _FOUND_AT_ONCE

    def _read(self, left: deque[bytes], entries: Mapping[bytes, Entry]) -> None:
        with self._told(left):
            places = self._memory.reserve(len(left))
            pages = self._memory.pages(places)
            for first, stop in self._memory.runs(places):
                keys = list(left)[: stop - first]
                proved = self.store.read_into(keys, entries, self._memory.records(places[first], stop - first))
                self._prover.submit(self._prove, deque(keys), pages[first:stop], proved)
                for _ in keys:
                    left.popleft()

    def _prove(self, left: deque[bytes], pages: list[memoryview], proved: Callable[[], int]) -> None:
        """Hand on pages that prove to be right; those behind the first that does not are read again one by one."""
        with self._told(left):
            came = proved()
            here = [left.popleft() for _ in range(came)]
            self._arrived(here, [page.toreadonly() for page in pages[:came]])
            if left:
                self._arrived([left.popleft()], [None])
            while left:
                payload = self.store.get(left[0])
                self._arrived([left.popleft()], [payload])
