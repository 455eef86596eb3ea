"""Pages in host memory: a byte budget, least recently used first out.

Owns references to page bytes. Must not know disks, devices or threads of others; every method is safe from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from kvist.cache.record import Buffer


class HostTier:
    """Page bytes by key, at most `budget_bytes` of them. Satisfies `prefix.Lookup`. A budget of 0 keeps nothing."""

    name = "host"

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"a host budget of {budget_bytes} bytes; 0 for no host tier, or the bytes that pages may take")
        self.budget_bytes, self.used_bytes, self.evicted = budget_bytes, 0, 0
        self._pages: OrderedDict[bytes, Buffer] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def holds(self, key: bytes) -> bool:
        """Whether the page is here."""
        return key in self._pages

    def get(self, key: bytes) -> Buffer | None:
        """A page's bytes, which becomes the most recently used; None if it is not here."""
        with self._lock:
            if key not in self._pages:
                return None
            self._pages.move_to_end(key)
            return self._pages[key]

    def peek_run(self, keys: Sequence[bytes]) -> list[Buffer]:
        """The bytes of pages in order, up to the first that is not here; that they were wanted, `touch_run` says."""
        found = list[Buffer]()
        # No line of Python a page: a card's link waits for the first of them.
        with self._lock, suppress(KeyError):
            found.extend(map(self._pages.__getitem__, keys))
        return found

    def touch_run(self, keys: Sequence[bytes]) -> None:
        """`touch` for keys in order: the last becomes the most recently used."""
        with self._lock:
            for key in keys:
                if key in self._pages:
                    self._pages.move_to_end(key)

    def put(self, key: bytes, payload: Buffer) -> None:
        """Keep a page, at the cost of the least recently used. One larger than the budget is not kept, and costs nothing."""
        size = len(payload)
        with self._lock:
            old = self._pages.pop(key, None)
            self.used_bytes -= 0 if old is None else len(old)
            if size > self.budget_bytes:
                return
            while self.used_bytes + size > self.budget_bytes:
                _, gone = self._pages.popitem(last=False)
                self.used_bytes -= len(gone)
                self.evicted += 1
            self._pages[key] = payload
            self.used_bytes += size

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used, if it is here."""
        with self._lock:
            if key in self._pages:
                self._pages.move_to_end(key)

    def drop(self, key: bytes) -> bool:
        """Forget a page; False if it is not here."""
        with self._lock:
            gone = self._pages.pop(key, None)
            self.used_bytes -= 0 if gone is None else len(gone)
            return gone is not None
