"""Which slot holds which page: a SQLite file that can always be made again from the records.

Owns keys, free slots and the access clock, in transactions that are whole or absent. Must not read pages.

Why SQLite and not LMDB, which was the first choice: with the index cut at 20 random lengths, LMDB 0.9.36 (mapped memory) ended
the process by SIGBUS 20 times out of 20; SQLite 3.40 reported every one as an error. A lookup costs about 10 us either way
beside reading the page; SQLite is in Python's own library. Memory stays at two caches of 2 MB, whatever the number of pages.

Durability: WAL journal with synchronous=NORMAL. A killed process loses no committed transaction. A power failure may lose the
last ones, never the file's integrity; a page that an older index promises is then proved or dropped like any other.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvist.cache.store_errors import NewerStore

FILE_NAME: Final = "index.sqlite"
INDEX_VERSION: Final = 1
BYTES_A_PAGE: Final = 160
"""What the index is counted with against a byte budget (measured: 80 for a million pages, more after much replacement)."""
_MOST_KEYS: Final = 64
_APPLICATION: Final = 0x4B564953
_SCHEMA: Final = """
CREATE TABLE pages (key BLOB PRIMARY KEY, slot INTEGER NOT NULL, sequence INTEGER NOT NULL, clock INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX by_clock ON pages (clock);
CREATE TABLE free (slot INTEGER PRIMARY KEY);
CREATE TABLE state (id INTEGER PRIMARY KEY, store BLOB NOT NULL, next_slot INTEGER NOT NULL, clock INTEGER NOT NULL);
"""
_BUSY_S: Final = 5.0
_CHUNK: Final = 1000
_MOST_SLOTS: Final = 1 << 40
# Primary result codes that tell of the surroundings (busy, locked, no memory, read-only, I/O, full, cannot open), not of damage.
_SURROUNDINGS: Final = {5, 6, 7, 8, 10, 13, 14}
_FULL: Final = 13


class Entry(NamedTuple):
    """One indexed page: its slot, the sequence number that its record must carry, and when it was last wanted."""

    key: bytes
    slot: int
    sequence: int
    clock: int


class DamagedIndex(sqlite3.DatabaseError):
    """The index contradicts itself or its page file; it is to be made again from the records."""


class UnfinishedIndex(DamagedIndex):
    """An index whose creation was cut short by a kill: it never held a page."""


class _Connection(sqlite3.Connection):
    """SQLite's message about a damaged schema quotes it, and Python makes no error of bytes that are no UTF-8."""

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*arguments)
        except UnicodeDecodeError as error:
            raise DamagedIndex("its schema is damaged") from error

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().executemany(*arguments)
        except UnicodeDecodeError as error:
            raise DamagedIndex("its schema is damaged") from error


class PageIndex:
    """An open index. Reading and writing use a connection each, so that a lookup does not wait for a transaction."""

    def __init__(self, folder: Path, store: bytes, *, read_only: bool) -> None:
        """Open an index that exists. Raises `DamagedIndex`, `NewerStore`, `sqlite3.Error`."""
        self.path = folder / FILE_NAME
        self._read_lock, self._write_lock = threading.Lock(), threading.RLock()
        self._reader = _connect(self.path, read_only=True)
        try:
            self._check(store)
            self._writer = None if read_only else _connect(self.path, read_only=False)
        except BaseException:
            self._reader.close()
            raise

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds an index, good or bad."""
        return (folder / FILE_NAME).exists()

    @staticmethod
    def create(folder: Path, store: bytes) -> PageIndex:
        """An empty index in place of whatever index is there. Raises `sqlite3.Error`, `OSError`."""
        path = folder / FILE_NAME
        for suffix in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        connection = _connect(path, read_only=False, create=True)
        try:
            # The schema appears with the version number or not at all: a killed creation is seen as damage and made again.
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";")[:-1]:
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (0, ?, 0, 0)", (store,))
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
            connection.execute("COMMIT")
        finally:
            connection.close()
        return PageIndex(folder, store, read_only=False)

    def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """The entries of those keys that are there; about 3 us a key."""
        found: dict[bytes, Entry] = {}
        for at in range(0, len(keys), _MOST_KEYS):
            part = keys[at : at + _MOST_KEYS]
            query = f"SELECT key, slot, sequence, clock FROM pages WHERE key IN ({','.join('?' * len(part))})"
            with self._read_lock:
                rows = self._reader.execute(query, part).fetchall()
            found.update((row[0], _entry(row)) for row in rows)
        return found

    def entries(self, first_slot: int = 0) -> Iterator[Entry]:
        """All entries in key order, those in slots below `first_slot` left out; no transaction stays open between chunks."""
        after = b""
        while True:
            with self._read_lock:
                rows = self._reader.execute(
                    "SELECT key, slot, sequence, clock FROM pages WHERE key > ? ORDER BY key LIMIT ?", (after, _CHUNK)
                ).fetchall()
            if not rows:
                return
            yield from (entry for entry in map(_entry, rows) if entry.slot >= first_slot)
            after = rows[-1][0]

    def check(self) -> str | None:
        """What SQLite finds wrong with the whole file, its order included; None if nothing. Raises `sqlite3.Error`."""
        with self._read_lock:
            (answer,) = self._reader.execute("PRAGMA integrity_check(1)").fetchone()
        return None if answer == "ok" else str(answer)

    def state(self) -> tuple[int, int, int]:
        """(slots ever used, free slots among them, clock): pages = used - free. Raises `DamagedIndex` if that is negative."""
        with self._read_lock:
            return self._state(self._reader)

    @property
    def pages(self) -> int:
        """Pages in the index."""
        used, free, _ = self.state()
        return used - free

    def free_slots(self, count: int, capacity: int) -> list[int]:
        """At most `count` slots that hold no page: released ones from the lowest, then new ones below `capacity`."""
        with self._write_lock:
            used, _, _ = self._state(self._open())
            query = "SELECT slot FROM free WHERE slot >= 0 AND slot < ? ORDER BY slot LIMIT ?"
            slots = [row[0] for row in self._open().execute(query, (min(used, capacity), count))]
        return slots + list(range(used, min(used + count - len(slots), capacity)))

    def publish(self, placed: Sequence[tuple[bytes, int]], sequences: Sequence[int]) -> None:
        """Make written slots findable: (key, slot) pairs with their sequence numbers; one transaction."""
        with self._transaction() as connection:
            used, _, clock = self._state(connection)
            connection.executemany(
                "INSERT INTO pages VALUES (?, ?, ?, ?)",
                [(key, slot, seq, seq) for (key, slot), seq in zip(placed, sequences, strict=True)],
            )
            connection.executemany("DELETE FROM free WHERE slot = ?", [(slot,) for _, slot in placed])
            used = max(used, *(slot + 1 for _, slot in placed))
            connection.execute("UPDATE state SET next_slot = ?, clock = ?", (used, max(clock, *sequences)))

    def evict(self, count: int) -> int:
        """Remove the `count` pages that were wanted longest ago; their slots are free after this. Returns how many."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT key, slot FROM pages ORDER BY clock LIMIT ?", (count,)).fetchall()
            connection.executemany("DELETE FROM pages WHERE key = ?", [(key,) for key, _ in rows])
            connection.executemany("INSERT OR IGNORE INTO free VALUES (?)", [(slot,) for _, slot in rows])
        return len(rows)

    def drop(self, entry: Entry, owner: bytes | None) -> bool:
        """Remove an entry if it still is what was read. Its slot becomes free unless page `owner` truly lives there."""
        with self._transaction() as connection:
            gone = connection.execute("DELETE FROM pages WHERE key = ? AND sequence = ?", (entry.key, entry.sequence)).rowcount
            lives = (
                owner is not None
                and connection.execute("SELECT 1 FROM pages WHERE key = ? AND slot = ?", (owner, entry.slot)).fetchone()
            )
            used, _, _ = self._state(connection, settled=False)
            if gone and not lives and 0 <= entry.slot < used:
                connection.execute("INSERT OR IGNORE INTO free VALUES (?)", (entry.slot,))
        return bool(gone)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Give pages the newest clock values, the last key the newest."""
        with self._transaction() as connection:
            _, _, clock = self._state(connection)
            stamped = [(clock + 1 + at, key) for at, key in enumerate(keys)]
            connection.executemany("UPDATE pages SET clock = ? WHERE key = ?", stamped)
            connection.execute("UPDATE state SET clock = ?", (clock + len(keys),))

    def move(self, moves: Iterable[tuple[Entry, int]]) -> None:
        """Entries whose records were copied to other, free slots."""
        with self._transaction() as connection:
            for entry, slot in moves:
                connection.execute("UPDATE pages SET slot = ? WHERE key = ? AND sequence = ?", (slot, entry.key, entry.sequence))
                connection.execute("DELETE FROM free WHERE slot = ?", (slot,))
                connection.execute("INSERT OR IGNORE INTO free VALUES (?)", (entry.slot,))

    def cut(self, slots: int) -> None:
        """Forget slots from `slots` on; none of them may hold a page."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM free WHERE slot >= ?", (slots,))
            connection.execute("UPDATE state SET next_slot = min(next_slot, ?)", (slots,))

    def refill(self, found: Iterable[tuple[int, bytes | None, int]]) -> int:
        """Fill an empty index from a scan of slots: (slot, key or None, sequence). Of equal keys the newest stays.

        Returns the number of pages. One transaction, so a killed scan leaves an empty index that is filled again.
        """
        with self._transaction() as connection:
            used = clock = 0
            for slot, key, sequence in found:
                used, free = slot + 1, slot
                if key is not None:
                    old = connection.execute("SELECT slot, sequence FROM pages WHERE key = ?", (key,)).fetchone()
                    if old is None or old[1] < sequence:
                        connection.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?)", (key, slot, sequence, sequence))
                        free = -1 if old is None else old[0]
                    clock = max(clock, sequence)
                if free >= 0:
                    connection.execute("INSERT INTO free VALUES (?)", (free,))
            connection.execute("UPDATE state SET next_slot = ?, clock = ?", (used, clock))
        return self.pages

    def close(self) -> None:
        """Fold the journal into the index and close."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _check(self, store: bytes) -> None:
        (application,) = self._reader.execute("PRAGMA application_id").fetchone()
        (version,) = self._reader.execute("PRAGMA user_version").fetchone()
        if application == _APPLICATION and version > INDEX_VERSION:
            raise NewerStore(
                f"{self.path} has index version {version}; this program reads versions up to {INDEX_VERSION}. "
                "Use a newer kvist or another directory; the pages are left as they are"
            )
        if not application and not version:
            raise UnfinishedIndex(f"{self.path} was not finished")
        row = self._reader.execute("SELECT store FROM state").fetchone() if version == INDEX_VERSION else None
        if row is None or row[0] != store:
            raise DamagedIndex(f"{self.path} does not belong to the page file beside it")
        self._state(self._reader)

    def _open(self) -> sqlite3.Connection:
        assert self._writer is not None, "a reader must not write"
        return self._writer

    @staticmethod
    def _state(connection: sqlite3.Connection, *, settled: bool = True) -> tuple[int, int, int]:
        used, clock = connection.execute("SELECT next_slot, clock FROM state").fetchone() or (0, -1)
        (free,) = connection.execute("SELECT count(*) FROM free").fetchone() if settled else (0,)
        numbers = isinstance(used, int) and isinstance(clock, int)
        if not numbers or not 0 <= used < _MOST_SLOTS or not 0 <= clock < 1 << 62 or free > used:
            raise DamagedIndex(f"{used} slots in use, {free} of them free, clock {clock}")
        return used, free, clock

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                # If the journal could not grow, folding it makes room for the next transaction.
                with suppress(sqlite3.Error):
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                raise


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the index itself is bad, so that making it again helps."""
    closed = isinstance(error, sqlite3.ProgrammingError)  # a lookup that came while the index was replaced or closed
    return not closed and getattr(error, "sqlite_errorcode", 1) & 0xFF not in _SURROUNDINGS


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk has no room for the index."""
    return getattr(error, "sqlite_errorcode", 1) & 0xFF == _FULL


def _entry(row: tuple[object, object, object, object]) -> Entry:
    """A row is input like any other: a flipped bit can make a number of it a text."""
    key, slot, sequence, clock = row
    if not isinstance(key, bytes) or not isinstance(slot, int) or not isinstance(sequence, int) or not isinstance(clock, int):
        raise DamagedIndex(f"an entry has a value of a wrong type: {row!r}")
    if not 0 <= slot < _MOST_SLOTS:
        raise DamagedIndex(f"page {key.hex()} is said to lie in slot {slot}")
    return Entry(key, slot, sequence, clock)


def _connect(path: Path, *, read_only: bool, create: bool = False) -> sqlite3.Connection:
    # A reader takes part in the journal's locking, which needs a writable directory; in any other one nobody writes.
    frozen = read_only and not os.access(path.parent, os.W_OK)
    mode = "mode=ro&immutable=1" if frozen else "mode=rwc" if create else "mode=rw"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_S,
        factory=_Connection,
    )  # fmt: skip
    try:
        connection.execute("PRAGMA cache_size = -2000")
        if read_only:
            connection.execute("PRAGMA query_only = 1")
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection
