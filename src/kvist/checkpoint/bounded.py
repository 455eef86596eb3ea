"""A cache of loaded values under a byte budget: least recently used first out, held ones never, loads in threads.

Owns room, order, look-ahead and counters. Must not know what is loaded or from where. Demanded keys are loaded by their own
threads, so that look-ahead never stands in front of them; a load that fails is an error of whoever demanded it, and forgotten.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(kw_only=True)
class CacheCounters:
    """Since the start. A demanded key is a `hit` (there), `late` (being loaded ahead) or a `miss`; `ahead_hits` are hits that
    look-ahead loaded. `bytes_read` counts what loads took, `stall_s` the time that callers waited for them."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    ahead_loads: int = 0
    ahead_hits: int = 0
    evictions: int = 0
    failures: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0


@dataclass(eq=False)
class _Entry(Generic[V]):
    nbytes: int
    ahead: bool
    patient: bool
    future: Future[V] = field(default_factory=Future)
    pins: int = 0
    used: bool = False

    @property
    def there(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    @property
    def failed(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is not None


class BoundedCache(Generic[K, V]):
    """Values by key, loaded by `load(key)`, each taking `nbytes(key)` of `budget_bytes`. Safe to use from several threads.

    `evicted(value)` is told of values that nobody holds any more, so that their memory can be used again.
    """

    def __init__(
        self,
        load: Callable[[K], V],
        nbytes: Callable[[K], int],
        budget_bytes: int,
        *,
        name: str,
        workers: int = 2,
        evicted: Callable[[V], None] | None = None,
    ) -> None:
        self.load, self.nbytes, self.budget_bytes, self.evicted = load, nbytes, budget_bytes, evicted
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._changed = threading.Condition(threading.RLock())
        self._counters = CacheCounters()
        self._demand = ThreadPoolExecutor(workers, thread_name_prefix=f"{name}-demand")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-ahead")
        self._close = weakref.finalize(self, _shut_down, self._demand, self._ahead)

    def counters(self) -> CacheCounters:
        """A snapshot."""
        with self._changed:
            return replace(self._counters)

    def close(self) -> None:
        """Stop the threads; loads that have not begun are dropped."""
        self._close()

    @contextmanager
    def hold(
        self, keys: Sequence[K], then: Sequence[K] = (), instead: Callable[[K, BaseException], V] | None = None
    ) -> Iterator[list[V]]:
        """The values of distinct keys, which stay while the context is open; `then` are loaded ahead meanwhile.

        The keys together must fit the budget. Waits for loads, and for room that other callers hold; a load that another began
        and that fails is tried again once. Raises what `load` raised, or takes `instead(key, error)`, which is not kept, for a
        value that could not be loaded.
        """
        began = time.perf_counter()
        entries, waits, others = self._claim(keys)
        try:
            if then:
                self.ahead(then)
            if any(entry.future.exception() is not None for entry in others):
                # These loads began before this caller came: what was wrong then need not be so now.
                self._let_go(entries)
                entries = []
                entries, _, _ = self._claim(keys)
            values = [_value(key, entry, instead) for key, entry in zip(keys, entries, strict=True)]
            if waits:
                with self._changed:
                    self._counters.stall_s += time.perf_counter() - began
            yield values
        finally:
            self._let_go(entries)

    def _let_go(self, entries: Sequence[_Entry[V]]) -> None:
        with self._changed:
            for entry in entries:
                entry.pins -= 1
            self._changed.notify_all()

    def ahead(self, keys: Sequence[K]) -> None:
        """Load what is likely wanted soon, as far as room can be had from values that nobody holds. Never waits."""
        with self._changed:
            present = [key for key in keys if key in self._entries]
            for key in present:
                self._entries.move_to_end(key)
            for key in keys:
                if key in self._entries:
                    continue
                if not self._make_room(self.nbytes(key), keep=set(keys)):
                    return
                self._counters.ahead_loads += 1
                self._start(key, self._ahead, ahead=True)

    def _claim(self, keys: Sequence[K]) -> tuple[list[_Entry[V]], bool, list[_Entry[V]]]:
        """Entries of all keys, pinned; True if any is not there yet; those whose loads others began and have not ended. All or
        none, so that waiting callers hold nothing."""
        with self._changed:
            while True:
                for key in keys:
                    # A load that has just failed, which `_loaded` is about to hear of.
                    if (entry := self._entries.get(key)) is not None and entry.failed:
                        self._drop(key, entry)
                held = [self._entries[key] for key in keys if key in self._entries]
                missing = [key for key in keys if key not in self._entries]
                need = sum(self.nbytes(key) for key in missing)
                assert need + sum(entry.nbytes for entry in held) <= self.budget_bytes, "a portion must fit the budget"
                for entry in held:
                    entry.pins += 1
                if self._make_room(need):
                    break
                for entry in held:
                    entry.pins -= 1
                self._changed.wait()
            count = self._counters
            claimed, others = list[_Entry[V]](), list[_Entry[V]]()
            for key in keys:
                found = self._entries.get(key)
                if found is None:
                    count.misses += 1
                    found = self._start(key, self._demand, ahead=False)
                    found.pins = 1
                elif found.future.done():
                    count.hits += 1
                    count.ahead_hits += found.ahead and not found.used
                else:
                    count.late += 1
                    self._hurry(key, found)
                    others.append(found)
                found.used = True
                if key in self._entries:  # unless its load has failed already
                    self._entries.move_to_end(key)
                claimed.append(found)
            return claimed, not all(entry.future.done() for entry in claimed), others

    def _start(self, key: K, workers: ThreadPoolExecutor, *, ahead: bool) -> _Entry[V]:
        entry: _Entry[V] = _Entry(self.nbytes(key), ahead, patient=ahead)
        self._entries[key] = entry
        self._counters.held_bytes += entry.nbytes
        self._counters.peak_bytes = max(self._counters.peak_bytes, self._counters.held_bytes)
        self._submit(key, entry, workers)
        return entry

    def _submit(self, key: K, entry: _Entry[V], workers: ThreadPoolExecutor) -> None:
        entry.future = workers.submit(self.load, key)
        # A future keeps its callbacks. This one must not lead back to the entry, or an evicted value would stay until the
        # next garbage collection; nor hold the cache, or a queued load would keep a dropped one and its threads alive.
        own = weakref.ref(self)

        def done(future: Future[V]) -> None:
            cache = own()
            if cache is not None:
                cache._loaded(key, future)

        entry.future.add_done_callback(done)

    def _hurry(self, key: K, entry: _Entry[V]) -> None:
        """A load that look-ahead has queued but not begun goes to the demand threads. Once: then callers wait for it."""
        if entry.patient and entry.future.cancel():
            self._submit(key, entry, self._demand)
        entry.patient = False

    def _loaded(self, key: K, future: Future[V]) -> None:
        if future.cancelled():
            return
        with self._changed:
            entry = self._entries.get(key)
            if future.exception() is None:
                self._counters.bytes_read += self.nbytes(key)
            else:
                self._counters.failures += 1
                if entry is not None and entry.future is future:
                    self._drop(key, entry)
            self._changed.notify_all()

    def _make_room(self, need: int, keep: set[K] | frozenset[K] = frozenset()) -> bool:
        """Evict until `need` bytes are free; False, with nothing evicted, if what is held or being loaded stands in the way."""
        lacking = need - (self.budget_bytes - self._counters.held_bytes)
        victims = []
        for key, entry in self._entries.items():
            if lacking <= 0:
                break
            if entry.pins or key in keep or not (entry.there or entry.future.cancel()):
                continue
            victims.append((key, entry))
            lacking -= entry.nbytes
        if lacking > 0:
            # What was taken out of the queue above stays out: nobody waits for it, and its room is needed anyway.
            victims = [(key, entry) for key, entry in victims if entry.future.cancelled()]
        for key, entry in victims:
            self._drop(key, entry)
            if not entry.future.cancelled():
                self._counters.evictions += 1
                if self.evicted is not None:
                    self.evicted(entry.future.result())
        return lacking <= 0

    def _drop(self, key: K, entry: _Entry[V]) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
            self._counters.held_bytes -= entry.nbytes


def _value(key: K, entry: _Entry[V], instead: Callable[[K, BaseException], V] | None) -> V:
    error = entry.future.exception()
    if error is None:
        return entry.future.result()
    if instead is None:
        raise error
    return instead(key, error)


def _shut_down(*workers: ThreadPoolExecutor) -> None:
    for pool in workers:
        pool.shutdown(wait=False, cancel_futures=True)
