"""The disk store of pages: one writer, any number of readers, and nothing read from it is believed before it is proved.

Owns a directory (docs/cache-format.md): `pages.kv` with records in slots, `index.sqlite`, `writer.lock`. Must not know what a
page means, nor import torch. Ownership of bytes: `get` returns a view of fresh memory; `put` keeps nothing.

- *Publication.* A batch is written to free slots, then indexed in one transaction: a page is findable whole or not at all. Slots
  of evicted pages are reused only after the transaction that released them. kill -9 loses what was not indexed yet.
- *Sync policy.* Page bytes are flushed to the disk at most `SYNC_S` seconds after publication, the index's journal when SQLite
  folds it. Power loss may lose the last seconds; whatever the index still promises is proved by its record or dropped.
- *Why not LMDB alone* (`page_index.py` says why not as the index): slots of one size never fragment, so eviction at the budget
  costs what filling costs, and large pages move at the disk's speed.
- *Eviction.* Least recently wanted first. A read moves a page's clock only when it is older than an eighth of the pages, in
  memory first, on disk with the next transaction; within a `put` or `touch` the first page counts as the most recent, so that
  a prefix goes from its end.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

from kvist.cache import store_directory as directory
from kvist.cache.page_file import HEAD_BYTES, FileSystem, PageFile, runs_of
from kvist.cache.page_index import DamagedIndex, Entry, is_damage, is_full
from kvist.cache.record import HEADER_BYTES, Buffer, CorruptPage, Page, Stored, check, pack_header
from kvist.cache.store_counters import StoreCounters, StoreStat
from kvist.cache.store_errors import ReadOnlyStore

SYNC_S: Final = 1.0
NEGATIVE_S: Final = 60.0
"""How long a page is not tried again after an I/O error; one that was damaged is not tried again at all."""
FULL_S: Final = 60.0
"""How long a store whose disk was full replaces its own pages before it tries to grow again."""
_BATCH_BYTES: Final = 16 << 20
_READ_PAGES: Final = 512
_MOST_REMEMBERED: Final = 65_536
_FOREVER: Final = float("inf")

log = logging.getLogger(__name__)


class PageStore:
    """Pages of one model on disk, by 16-byte key. Safe to use from several threads; open it with `PageStore.open`."""

    def __init__(self, folder: Path, file: PageFile, capacity: int, lock: int | None, notice: str | None) -> None:
        self.folder, self.geometry = folder, file.geometry
        self.read_only, self.notice = lock is None, notice
        self.counters = StoreCounters()
        self._file, self._capacity, self._lock = file, capacity, lock
        self._writing, self._small = threading.RLock(), threading.Lock()
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        self._negative: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._doomed: list[tuple[Entry, bytes | None]] = []
        self._ceiling, self._ceiling_until = directory.UNLIMITED, 0.0
        self._synced, self._unsynced, self._bad_index = time.monotonic(), False, False
        self._index, made_again = directory.open_index(folder, file, read_only=self.read_only)
        self.counters.index_rebuilds += made_again
        self._recount()

    @staticmethod
    def open(
        folder: Path | str,
        *,
        model: bytes | None = None,
        page_bytes: int | None = None,
        page_tokens: int | None = None,
        budget_bytes: int | None = None,
        read_only: bool = False,
        files: FileSystem | None = None,
    ) -> PageStore:
        """Open or create the store of a directory.

        `model`: 16 bytes that name model, numerics and page size (`identity.root` with an empty salt); `model`, `page_bytes`
        and `page_tokens` may be None for a store that exists. `budget_bytes` bounds page file and index together (the
        index's journal, about 4 MB, comes on top). While another process writes there, the store opens read-only and `notice`
        says so. Raises the errors of `store_errors`.
        """
        folder, files = Path(folder), files or FileSystem()
        lock: int | None = None
        file: PageFile | None = None
        try:
            lock, notice = (None, None) if read_only else directory.lock_for_writing(folder, files, create=model is not None)
            file, capacity = directory.open_page_file(
                folder, files, model=model, page_bytes=page_bytes, page_tokens=page_tokens, budget_bytes=budget_bytes,
                writable=lock is not None,
            )  # fmt: skip
            store = PageStore(folder, file, capacity, lock, notice)
            if lock is not None and store._index.state()[0] > capacity:
                store.shrink(capacity)
        except BaseException as error:
            if file is not None:
                file.close()
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError | sqlite3.Error):
                raise directory.surroundings(error, folder) from error
            raise
        if notice:
            log.warning("%s", notice)
        return store

    def contains(self, key: bytes) -> bool:
        """Whether a page is promised and did not fail before; only `get` proves it."""
        return bool(self.contains_many([key]))

    def contains_many(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those keys for which `contains` is true."""
        return {key for key, entry in self.find_many(keys).items() if not self._is_negative(entry)}

    def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """What the index promises of pages, proved by nothing: none of a bad index. About 3 us a key."""
        if self._bad_index:
            return {}
        try:
            return self._index.find_many(keys)
        except sqlite3.Error as error:
            self._note_index(error)
            return {}

    def get(self, key: bytes) -> memoryview | None:
        """The proved bytes of a page, or None: absent, failed, damaged (then dropped and counted) or just replaced."""
        return self._get(key, self.find_many([key]).get(key))

    def get_many(self, keys: Sequence[bytes]) -> Iterator[memoryview | None]:
        """`get` for keys in order, at the speed of the disk: pages of one prefix mostly lie one after another."""
        for at in range(0, len(keys), _READ_PAGES):
            part = keys[at : at + _READ_PAGES]
            entries = self.find_many(part)
            with closing(self._file.read_ahead([entries[key].slot for key in part if key in entries])) as raw:
                for key in part:
                    yield self._get(key, entries.get(key), next(raw) if key in entries else None)

    def read_into(self, keys: Sequence[bytes], entries: Mapping[bytes, Entry], memory: memoryview) -> Callable[[], int]:
        """Read pages that `find_many` has found, each HEADER_BYTES behind its place in `memory`, places `geometry.slot_bytes`
        apart. What comes back proves them there, in order up to the first that `get` would not give, and says how many."""
        size = self.geometry.slot_bytes
        there = list(takewhile(entries.__contains__, keys))
        raw = self._file.read_into([entries[key].slot for key in there], memory)

        def proved() -> int:
            for at, (key, record) in enumerate(zip(there, raw, strict=True)):
                if (payload := self._get(key, entries[key], record)) is None:
                    return at
                if payload.obj is not memory.obj:  # it was read once more
                    memory[at * size + HEADER_BYTES :][: len(payload)] = payload
            return len(there)

        return proved

    def prove(self, entry: Entry, raw: Buffer | OSError | None = None) -> Stored | str:
        """Read an indexed page (unless `raw` is what was read) and prove it; a damaged one is counted and dropped by this.

        A text says why there is none: a reason of `CorruptPage`, "read error", or "superseded" (the slot was given to another
        page meanwhile).
        """
        geometry = self.geometry
        try:
            raw = self._file.read(entry.slot) if raw is None else raw
            if isinstance(raw, OSError):
                raise raw
            return check(raw, model=geometry.model, key=entry.key, sequence=entry.sequence, payload_bytes=geometry.page_bytes)
        except OSError as error:
            self._count("read_errors")
            self._remember_failure(entry, time.monotonic() + NEGATIVE_S)
            log.warning("%s: page %s cannot be read: %s", self.folder, entry.key.hex(), error)
            return "read error"
        except CorruptPage as fault:
            now = self.find_many([entry.key]).get(entry.key)
            if now is None or (now.slot, now.sequence) != (entry.slot, entry.sequence):
                self._count("superseded")
                return "superseded"
            self._condemn(entry, fault)
            return fault.reason

    def put(self, pages: Sequence[Page]) -> int:
        """Publish pages, in chain order; returns how many are in the store afterwards, new or already there.

        A full disk and I/O errors are counted, not raised: the pages are then simply not there. Raises `ReadOnlyStore`, and
        `ValueError` for a page of a wrong size.
        """
        self._must_write()
        for page in pages:
            self.geometry.require_fit(page)
        batch = max(_BATCH_BYTES // self.geometry.slot_bytes, 1)
        with self._writing:
            self._mend()
            parts = (pages[at : at + batch] for at in range(0, len(pages), batch))
            done = sum(self._guarded(lambda part=part: self._put(part), "write_errors") for part in parts)  # type: ignore[misc]
            if self._unsynced and time.monotonic() - self._synced >= SYNC_S:
                self._guarded(self._sync, "write_errors")
        self._count("not_published", len(pages) - done)
        return done

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that pages are wanted, without reading them; in chain order."""
        entries = self.find_many(keys)
        for entry in (entries[key] for key in reversed(keys) if key in entries):
            self._want(entry)

    def drop(self, key: bytes) -> bool:
        """Remove a page; False if there is none. Raises `ReadOnlyStore`, `sqlite3.Error`."""
        self._must_write()
        with self._writing:
            entry = self.find_many([key]).get(key)
            dropped = entry is not None and self._index.drop(entry, None)
            self._recount()
        return dropped

    def condemn(self, keys: Sequence[bytes]) -> None:
        """Pages that are intact and yet led to wrong numbers: never read again, and dropped with the next write."""
        for entry in self.find_many(keys).values():
            self._condemn(entry, CorruptPage("refuted", "numbers computed from it were not finite"))

    def entries(self) -> Iterator[Entry]:
        """All promised pages in key order."""
        return self._index.entries()

    def check_index(self) -> str | None:
        """Read the whole index; a text says what is wrong with it. A bad one is counted, and made again by its writer."""
        try:
            fault = self._index.check()
            if fault is not None:
                raise DamagedIndex(fault)
        except sqlite3.Error as error:
            self._note_index(error)
            self.flush()
            return str(error)
        return None

    def flush(self) -> None:
        """Drop what was found damaged, write clocks, and wait until every published page is on the disk."""
        if self.read_only:
            return
        with self._writing:
            self._mend()
            if self._unsynced:
                self._guarded(self._sync, "write_errors")

    def shrink(self, pages: int) -> int:
        """Keep the `pages` most recently wanted ones and give the disk space of the others back; returns how many went.

        Pages at the file's end are copied into free slots, on disk before the index says so: a kill loses nothing. One that
        cannot be read for that is dropped; a bad index is made again first. Raises `OSError`, `sqlite3.Error`.
        """
        self._must_write()
        with self._writing:
            self._mend()
            try:
                return self._shrink(pages)
            except sqlite3.Error as error:
                self._note_index(error)
                if not self._bad_index:
                    raise
                self._remake_index()
                return self._shrink(pages)

    def stat(self) -> StoreStat:
        """Pages and bytes now."""
        pages, index = self._index.pages, self._index.path
        parts = (index, index.with_name(index.name + "-wal"))
        return StoreStat(
            pages=pages, capacity=None if self._capacity == directory.UNLIMITED else self._capacity,
            slot_bytes=self.geometry.slot_bytes, page_bytes=self.geometry.page_bytes,
            used_bytes=HEAD_BYTES + pages * self.geometry.slot_bytes, file_bytes=self._file.nbytes,
            index_bytes=sum(part.stat().st_size for part in parts if part.exists()), read_only=self.read_only,
        )  # fmt: skip

    def close(self) -> None:
        """Flush and close; another process may become the writer after this."""
        try:
            self.flush()
        finally:
            self._index.close()
            self._file.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _get(self, key: bytes, entry: Entry | None, raw: Buffer | OSError | None = None) -> memoryview | None:
        for _ in range(2):
            if entry is None:
                break
            if self._is_negative(entry):
                self._count("negative_hits")
                return None
            found = self.prove(entry, raw)
            if not isinstance(found, str):
                self._count("hits")
                self._want(entry)
                return found.payload
            if found != "superseded":
                return None
            entry, raw = self.find_many([key]).get(key), None
        self._count("misses")
        return None

    def _put(self, pages: Sequence[Page]) -> int:
        fresh: dict[bytes, Page] = {}
        there = []
        known = self._index.find_many([page.key for page in pages])
        for page in pages:
            entry = known.get(page.key)
            if entry is not None and self._is_negative(entry):
                self._index.drop(entry, None)  # it could not be read: the new bytes take its place
                entry = None
            if entry is None:
                fresh.setdefault(page.key, page)
            else:
                there.append(page.key)
        if there:
            self._index.touch(there[::-1])  # at once, so that making room for the others does not take them
        wanted = list(fresh.values())[: self._capacity]
        slots = self._make_room(len(wanted))
        written = {page.key for page in wanted[: self._write(wanted[: len(slots)], slots)]}
        self._count("published", len(written))
        self._count("already_there", len(there))
        self._recount()
        return len(there) + sum(page.key in written for page in pages)

    def _make_room(self, count: int) -> list[int]:
        capacity = min(self._capacity, self._ceiling) if time.monotonic() < self._ceiling_until else self._capacity
        slots = self._index.free_slots(count, capacity)
        if len(slots) < count:
            # A little more than needed, so that a full store does not pay two transactions for every batch.
            spare = min(self._pages // 64, 256)
            self._count("evicted", self._index.evict(count - len(slots) + spare))
            slots = self._index.free_slots(count, capacity)
        return slots

    def _write(self, pages: Sequence[Page], slots: Sequence[int]) -> int:
        """Records into slots, then into the index; returns how many. On a disk without room, own old pages make way."""
        _, _, clock = self._index.state()
        # The first page of a chain is the most recent: eviction takes a chain from its end.
        sequences = [clock + len(pages) - at for at in range(len(pages))]
        written = 0
        try:
            for first, last in runs_of(slots):
                numbered = zip(pages[first:last], sequences[first:last], strict=True)
                model = self.geometry.model
                records = ((pack_header(page, model, number), memoryview(page.payload).cast("B")) for page, number in numbered)
                self._file.write(slots[first], records)
                written = last
        except OSError as error:
            if not directory.is_no_room(error):
                raise
            self._count("full")
            self._stop_growing()
            log.warning("%s: no room on the disk; old pages make way: %s", self.folder, error)
        if written:
            keys = [page.key for page in pages[:written]]
            self._index.publish(list(zip(keys, slots[:written], strict=True)), sequences[:written])
            with self._small:
                for key in keys:
                    self._negative.pop(key, None)
            self._unsynced = True
        return written

    def _stop_growing(self) -> None:
        used, _, _ = self._index.state()
        self._ceiling, self._ceiling_until = max(used, 1), time.monotonic() + FULL_S
        with suppress(OSError):  # the cut only gives back the part of a slot that was written in vain
            self._file.cut(min(used, self._file.slots))

    def _move(self, entries: Sequence[Entry], below: int) -> None:
        proved = [(entry, found) for entry in entries if not isinstance(found := self.prove(entry), str)]
        moves = list(zip(proved, self._index.free_slots(len(proved), below), strict=False))
        for (entry, found), slot in moves:
            self._file.write(slot, [(self._file.read_header(entry.slot), found.payload)])
        self._file.sync()
        self._index.move((entry, slot) for (entry, _), slot in moves)
        moved = {entry.key for (entry, _), _ in moves}
        for entry in entries:
            if entry.key not in moved:
                self._index.drop(entry, None)

    def _shrink(self, pages: int) -> int:
        gone = 0
        while (excess := self._index.pages - pages) > 0 and (went := self._index.evict(min(excess, 1000))):
            gone += went
        entries = self._index.entries(first_slot=(target := self._index.pages))
        while moving := list(islice(entries, 64)):
            self._move(moving, target)
        self._file.sync()
        self._index.cut(target)
        self._file.cut(min(target, self._file.slots))
        self._count("evicted", gone)
        self._recount()
        return gone

    def _sync(self) -> int:
        self._synced, self._unsynced = time.monotonic(), False
        self._file.sync()
        return 1

    def _mend(self) -> None:
        """What reads have left to the writer: a bad index, damaged pages, clocks. Needs the writing lock."""
        if self._bad_index:
            self._guarded(self._remake_index, "write_errors")
        self._guarded(self._apply_drops, "index_errors")
        self._guarded(self._apply_clocks, "index_errors")

    def _remake_index(self) -> int:
        self._index.close()
        self._index = directory.make_index(self.folder, self._file)
        self._bad_index = False
        self._count("index_rebuilds")
        self._recount()
        return 1

    def _apply_drops(self) -> int:
        with self._small:
            doomed, self._doomed = self._doomed, []
        for entry, owner in doomed:
            self._index.drop(entry, owner)
        if doomed:
            self._recount()
        return len(doomed)

    def _apply_clocks(self) -> int:
        with self._small:
            wanted, self._wanted = list(self._wanted), OrderedDict()
        if wanted:
            self._index.touch(wanted)
            self._recount()
        return len(wanted)

    def _guarded(self, work: Callable[[], int], counter: str) -> int:
        """Run a piece of writing; what the disk or the index does to it is counted and logged, and 0 is the result."""
        if self._bad_index and work != self._remake_index:
            return 0
        try:
            return work()
        except OSError as error:
            self._count("full" if directory.is_no_room(error) else counter)
            log.warning("%s: %s", self.folder, error)
        except sqlite3.Error as error:
            self._note_index(error)
        return 0

    def _note_index(self, error: sqlite3.Error) -> None:
        self._count("full" if is_full(error) else "index_errors")
        self._bad_index = self._bad_index or is_damage(error)
        log.warning("%s: index: %s", self.folder, error)

    def _want(self, entry: Entry) -> None:
        if self.read_only or self._clock - entry.clock < self._pages // 8:
            return
        with self._small:
            self._wanted[entry.key] = None
            self._wanted.move_to_end(entry.key)
            if len(self._wanted) > _MOST_REMEMBERED:
                self._wanted.popitem(last=False)

    def _is_negative(self, entry: Entry) -> bool:
        with self._small:
            sequence, until = self._negative.get(entry.key, (-1, 0.0))
        return sequence == entry.sequence and time.monotonic() < until

    def _remember_failure(self, entry: Entry, until: float) -> None:
        with self._small:
            self._negative[entry.key] = (entry.sequence, until)
            if len(self._negative) > _MOST_REMEMBERED:
                self._negative.popitem(last=False)

    def _condemn(self, entry: Entry, fault: CorruptPage) -> None:
        self._remember_failure(entry, _FOREVER)
        with self._small:
            corrupt = self.counters.corrupt
            corrupt[fault.reason] = corrupt.get(fault.reason, 0) + 1
            if not self.read_only:
                self._doomed.append((entry, fault.owner))
            number = sum(corrupt.values())
        # A broken disk has thousands: the 1st, 10th, 100th and so on are said aloud.
        level = logging.WARNING if str(number).strip("0") == "1" else logging.DEBUG
        what = f"page {entry.key.hex()} in slot {entry.slot} {'is not used' if self.read_only else 'is dropped'}"
        log.log(level, "%s: %s (bad pages so far: %d): %s", self.folder, what, number, fault)

    def _must_write(self) -> None:
        if self.read_only:
            raise ReadOnlyStore(self.notice or f"{self.folder} is open for reading; open it without read_only to change it")

    def _recount(self) -> None:
        used, free, self._clock = self._index.state()
        self._pages = used - free

    def _count(self, name: str, by: int = 1) -> None:
        with self._small:
            setattr(self.counters, name, getattr(self.counters, name) + by)
