"""Pages below device memory: host memory and the disk store behind it, moved by threads so that a step waits for neither.

Owns the write-behind queue, prefetch, promotion and their counters. Must not know models, requests or torch; what a page holds
is bytes. `offer` when a page is published, `get` when a match ends in `host` or `disk`, `prefetch` as soon as one is known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, cast

from kvist.cache.host_tier import HostTier
from kvist.cache.page_memory import PageMemory
from kvist.cache.page_reads import PageReads, PlacedReads
from kvist.cache.record import HEADER_BYTES, Buffer, Page
from kvist.cache.store import PageStore
from kvist.cache.workers import within

_BATCH_BYTES: Final = 16 << 20
_LINGER_S: Final = 0.02
ANSWER_S = 30.0
"""How long a close waits for calls that are under way at the disk."""
_FIRST_READ: Final = 64
"""Pages that a `prefetch` begins to read before it has looked at the others."""
_FIRST_LOOK: Final = 32
"""Pages that a `get_many` looks for at first."""

log = logging.getLogger(__name__)


@dataclass
class TierCounters:
    """Pages since start. A `get` ends in exactly one of `host_hits`, `disk_hits`, `slow`, `misses`."""

    offered: int = 0
    already_queued: int = 0
    queue_dropped: int = 0
    written: int = 0
    unwritten: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    slow: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_skipped: int = 0


class _Coming:
    """A page that is being read: its bytes once it is `done`, None for one that could not be had or was given up (what the read
    still brings is then nobody's)."""

    __slots__ = ("done", "payload", "slow")

    def __init__(self) -> None:
        self.done, self.payload, self.slow = False, cast("memoryview | None", None), False


class DiskTier:
    """The store as the prefix index sees it (`prefix.Lookup`)."""

    name = "disk"

    def __init__(self, store: PageStore) -> None:
        self.store = store

    def holds(self, key: bytes) -> bool:
        """Whether the store promises the page; it is proved when it is read."""
        return self.store.contains(key)


class MemoryTier:
    """What lies in host memory, as the prefix index sees it (`prefix.Lookup`): the host tier and the write queue."""

    name = "host"

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def holds(self, key: bytes) -> bool:
        """Whether the page's bytes are in host memory now."""
        return self._tiers.in_memory(key)


class Tiers:
    """Host memory and disk behind one door. Safe from any thread; closes the store that it was given.

    `host_bytes`: budget of the host tier. `queue_bytes`: most unwritten bytes; beyond it the oldest unwritten page is given up
    (it stays in host memory as long as that keeps it) and counted. `stage_bytes`: most bytes that are read ahead and wait to be
    asked for, whatever the host tier keeps; beyond it the oldest go. `read_timeout_s`: how long a `get` may wait for the disk
    before it counts as a miss; None waits.
    """

    def __init__(
        self,
        *,
        host_bytes: int,
        store: PageStore | None,
        queue_bytes: int = 256 << 20,
        stage_bytes: int = 256 << 20,
        read_timeout_s: float | None = None,
    ) -> None:
        if queue_bytes < 0:
            raise ValueError(f"a write queue of {queue_bytes} bytes; 0 writes nothing, else at least one page")
        if stage_bytes < 0:
            raise ValueError(f"{stage_bytes} bytes for pages read ahead; 0 for the host tier's room only, else at least one page")
        if read_timeout_s is not None and read_timeout_s <= 0:
            raise ValueError(f"a read timeout of {read_timeout_s} s; give a positive time, or None to wait")
        self.host, self.store, self.counters = HostTier(host_bytes), store, TierCounters()
        self.queue_bytes, self.queued_bytes, self.stage_bytes = queue_bytes, 0, stage_bytes
        self._timeout_s = read_timeout_s
        self._memory: PageMemory | None = None
        self._queue: OrderedDict[bytes, Page] = OrderedDict()
        self._writing: dict[bytes, Page] = {}
        self._doubted = list[bytes]()
        self._arriving: dict[bytes, _Coming] = {}
        self._staged: OrderedDict[bytes, memoryview] = OrderedDict()
        page_bytes = 1 if store is None else store.geometry.page_bytes
        self._stage_pages, self._room = stage_bytes // page_bytes, max(stage_bytes, host_bytes) // page_bytes
        self._changed = threading.Condition()
        self._closing = self._hurry = self._ended = False
        self._reads = PageReads(store, self._arrived) if store is not None else None
        self._writer: threading.Thread | None = None
        if store is not None and not store.read_only:
            self._writer = threading.Thread(target=self._write_behind, name="kvist-page-writer", daemon=True)
            self._writer.start()

    @property
    def lookups(self) -> tuple[MemoryTier | DiskTier, ...]:
        """The tiers in the order in which the prefix index should ask them."""
        memory = (MemoryTier(self),)
        return memory if self.store is None else (*memory, DiskTier(self.store))

    def lend(self, memory: PageMemory) -> None:
        """Keep pages in this memory from now on, whose records must be the store's: a card moves runs of it at once. Before any
        page is asked for. Raises ValueError for other records."""
        if self.store is not None:
            size = self.store.geometry.slot_bytes
            if (memory.record_bytes, memory.page_at) != (size, HEADER_BYTES):
                raise ValueError(
                    f"places of {memory.record_bytes} bytes with pages at {memory.page_at}; this store has records of {size} "
                    f"with pages at {HEADER_BYTES}"
                )
            self._reads = PlacedReads(self.store, self._arrived, memory)
        self._memory = memory

    def where(self, keys: Sequence[bytes]) -> list[str | None]:
        """The tier of each key: "host", "disk" or None."""
        here = {key for key in keys if self.in_memory(key)}
        below = [key for key in keys if key not in here]
        on_disk = self.store.contains_many(below) if self.store is not None else set()
        return ["host" if key in here else "disk" if key in on_disk else None for key in keys]

    def in_memory(self, key: bytes) -> bool:
        """Whether `get` would find the page without touching the disk."""
        if self.host.holds(key):
            return True
        with self._changed:
            return key in self._queue or key in self._writing

    def offer(self, page: Page) -> None:
        """Take a copy of a published page: into host memory at once, onto the disk when its turn comes. Never waits for a disk.
        Of lent memory the page itself is kept, to be written to by nobody.

        Raises `ValueError` for a page that the store cannot hold.
        """
        if self.store is not None:
            self.store.geometry.require_fit(page)
        page = page._replace(payload=bytes(page.payload) if self._memory is None else self._own(self._memory, page.payload))
        self.host.put(page.key, page.payload)
        with self._changed:
            self.counters.offered += 1
            if self._writer is None or self._closing or len(page.payload) > self.queue_bytes:
                self.counters.unwritten += 1
                return
            if page.key in self._queue or page.key in self._writing:
                self.counters.already_queued += 1
                return
            self._queue[page.key] = page
            self.queued_bytes += len(page.payload)
            while self.queued_bytes > self.queue_bytes:
                _, oldest = self._queue.popitem(last=False)
                self.queued_bytes -= len(oldest.payload)
                self.counters.queue_dropped += 1
            self._changed.notify_all()

    def get(self, key: bytes) -> Buffer | None:
        """The bytes of a page, from host memory or proved from disk (then kept in host memory); None is a miss, counted."""
        payload = self.host.get(key)
        if payload is None:
            with self._changed:
                page = self._queue.get(key) or self._writing.get(key)
            payload = None if page is None else page.payload
        if payload is not None:
            with self._changed:
                self.counters.host_hits += 1
                self._staged.pop(key, None)
            return payload
        from_disk, slow = self._from_disk(key)
        self._count("slow" if slow else "misses" if from_disk is None else "disk_hits")
        return from_disk

    def get_many(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """`get` for keys in order, with one look at those of them that lie in host memory, or have been read ahead."""
        return chain.from_iterable(self._looks(keys))

    def _looks(self, keys: Sequence[bytes]) -> Iterator[Sequence[Buffer | None]]:
        at, look = 0, _FIRST_LOOK
        try:
            while at < len(keys):
                # Few first, so that who moves pages begins early; then more at a time.
                found = self.host.peek_run(keys[at : at + look])
                look *= 2
                with self._changed:
                    self.counters.host_hits += len(found)
                    for key in keys[at : at + len(found)] if self._staged else ():
                        self._staged.pop(key, None)
                    at, before = at + len(found), len(found)
                    while at < len(keys) and (payload := self._staged.pop(keys[at], None)) is not None:
                        found.append(payload)
                        at += 1
                    self.counters.disk_hits += len(found) - before
                yield found
                if not found:
                    yield [self.get(keys[at])]
                    at += 1
        finally:
            # Behind all pages, which may be on their way to a card meanwhile.
            self.host.touch_run(keys[:at])

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Begin to read pages that a request will want, in order, into memory. Returns at once; what is here or on its way
        is left alone, and what there is no room for is skipped and counted."""
        if self._reads is None:
            return
        wanted: list[bytes] = []
        with self._changed:
            for key in keys:
                if key in self._arriving or key in self._staged or self.in_memory(key):
                    continue
                if len(self._arriving) >= self._room or self._closing:
                    self.counters.prefetch_skipped += 1
                    continue
                self._arriving[key] = _Coming()
                self.counters.prefetched += 1
                wanted.append(key)
                if len(wanted) == _FIRST_READ:
                    # The disk begins before all keys have been looked at.
                    self._reads.start(wanted)
            self._reads.start(wanted[_FIRST_READ:] if len(wanted) >= _FIRST_READ else wanted)

    def arriving(self, key: bytes) -> bool:
        """Whether a page is being read ahead right now."""
        coming = self._arriving.get(key)
        return coming is not None and not coming.done

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that a request wants these pages (in chain order) though it found them in a higher tier."""
        for key in reversed(keys):
            self.host.touch(key)
        if self.store is not None:
            self.store.touch(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget pages that are intact and yet led to wrong numbers, in every tier."""
        for key in keys:
            with self._changed:
                unwritten = self._queue.pop(key, None)
                self.queued_bytes -= 0 if unwritten is None else len(unwritten.payload)
                if self._writing.pop(key, None) is not None:
                    self._doubted.append(key)  # on its way to the disk, where nobody shall read it
                self._staged.pop(key, None)
                coming = self._arriving.get(key)
                if coming is not None:
                    # It stays until its read ends: another of the same page must not get what that one brings.
                    coming.done = True
                    self._changed.notify_all()
            self.host.drop(key)
        if self.store is not None:
            self.store.condemn(keys)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every offered page is written or given up, and on disk; False if `timeout_s` came first (None waits), or the
        disk has no answer within `ANSWER_S`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: self._writer is None or not (self._queue or self._writing) or self._ended,
                _until(deadline),
            )
            self._hurry = False
            done = done and not (self._queue or self._writing)
        if not done or self.store is None:
            return done
        return within(None if timeout_s is None else ANSWER_S, self.store.flush, "kvist-page-flush")

    def close(self, timeout_s: float | None = 30.0) -> bool:
        """Flush, waiting at most `timeout_s` (None waits), then end the threads and close the store.

        False if pages were given up because the time was over, or if the disk owes an answer `ANSWER_S` later: then the log says
        what waits for it, and the store stays open (a file under a running read must not be closed) until the process ends.
        """
        done = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._queue.clear()
            self.queued_bytes = 0
            self._changed.notify_all()
        deadline = None if timeout_s is None else time.monotonic() + ANSWER_S
        waiting = self._end_threads(deadline)
        with self._changed:
            for coming in self._arriving.values():
                coming.done = coming.slow = True
            self._changed.notify_all()
            self._arriving.clear()
            self._staged.clear()
        if self.store is not None and not waiting and not within(_until(deadline), self.store.close, "kvist-page-close"):
            waiting.append("the store's close")
        if waiting:
            assert self.store is not None, "only a disk can owe an answer"
            log.error(
                "%s: the disk has not answered %s within %g s; this process leaves the store open and goes on, and no other can "
                "write there before this one has ended",
                self.store.folder, " and ".join(waiting), ANSWER_S,
            )  # fmt: skip
        return done and not waiting

    def _end_threads(self, deadline: float | None) -> list[str]:
        """Wait for all threads; what is still waited for at the deadline."""
        found = []
        if self._writer is not None:
            self._writer.join(_until(deadline))
            found += ["a write of pages"] if self._writer.is_alive() else []
        return found if self._reads is None else [*found, *self._reads.close(_until(deadline))]

    def _from_disk(self, key: bytes) -> tuple[memoryview | None, bool]:
        """A page's bytes, and whether the disk was too slow to say."""
        if self.store is None:
            return None, False
        with self._changed:
            staged, coming = self._staged.pop(key, None), self._arriving.get(key)
            if staged is not None:
                return staged, False
            if coming is None and self._timeout_s is not None:
                if self._closing:
                    return None, True
                coming = self._arriving[key] = _Coming()
                assert self._reads is not None
                self._reads.start([key])
            if coming is not None:
                if not self._changed.wait_for(lambda: coming.done, self._timeout_s):
                    return None, True
                self._staged.pop(key, None)
                return coming.payload, coming.slow
        read = self.store.get(key)
        if read is None:
            return None, False
        payload = read if self._memory is None else self._own(self._memory, read)
        self.host.put(key, payload)
        return payload, False

    def _own(self, memory: PageMemory, payload: Buffer) -> memoryview:
        """A page's bytes that nobody else writes to, in lent memory while there is any."""
        try:
            return memory.own(payload)
        except MemoryError as error:
            log.warning("a page is kept outside of lent memory: %s", error)
            return memoryview(bytes(payload))

    def _arrived(self, keys: Sequence[bytes], payloads: Sequence[memoryview | None]) -> None:
        with self._changed:
            for key, payload in zip(keys, payloads, strict=True):
                coming = self._arriving.pop(key, None)
                if coming is None or coming.done:
                    continue  # everything is closed, or dropped meanwhile
                if payload is not None:
                    self.host.put(key, payload)
                    self._staged[key] = payload
                coming.payload, coming.done = payload, True
            while len(self._staged) > self._stage_pages:
                self._staged.popitem(last=False)
            self._changed.notify_all()

    def _write_behind(self) -> None:
        """Write batch after batch until everything is closed. What cannot be written is given up; the thread goes on."""
        assert self.store is not None
        try:
            while batch := self._next_batch():
                written = 0
                try:
                    written = self.store.put(batch)
                except Exception:
                    log.exception("%s: %d pages could not be written and are given up", self.store.folder, len(batch))
                with self._changed:
                    self.counters.written += written
                    self.counters.unwritten += len(batch) - written
                    self._writing = {}
                    self.store.condemn(self._doubted)
                    self._doubted.clear()
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._writing, self._ended = {}, True
                self._changed.notify_all()

    def _next_batch(self) -> list[Page]:
        with self._changed:
            lingered = False
            while not (self._queue and lingered):
                if not self._queue:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                lingered = True
                if not (self._hurry or self._closing) and self.queued_bytes < _BATCH_BYTES:
                    # Pages come in bursts: one transaction for those of one step. All of them may be dropped meanwhile.
                    self._changed.wait(_LINGER_S)
            size = 0
            while self._queue and size < _BATCH_BYTES:
                key, page = self._queue.popitem(last=False)
                self._writing[key] = page
                size += len(page.payload)
            self.queued_bytes -= size
            return list(self._writing.values())

    def _count(self, name: str) -> None:
        with self._changed:
            setattr(self.counters, name, getattr(self.counters, name) + 1)


def _until(deadline: float | None) -> float | None:
    """Seconds that are left, None for all the time there is."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
