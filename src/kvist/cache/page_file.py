"""The file that holds pages: a head with the store's geometry, then slots of one size; and the port to the file system.

Owns byte positions, whole reads and writes, and the head (docs/cache-format.md). Must not know which slot holds what: that is
the index. Every system call on pages goes through `FileSystem`, so that a test can be a disk that is full, slow or broken.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import count, islice
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from kvist.cache.record import CHECKSUM_BYTES, HEADER_BYTES, KEY_BYTES, Buffer, Page
from kvist.cache.store_errors import NewerStore, NotAStore
from kvist.cache.workers import Workers

FILE_NAME: Final = "pages.kv"
HEAD_MAGIC: Final = b"KVISTSTO"
FORMAT_VERSION: Final = 1
HEAD_BYTES: Final = 4096
HEAD: Final = struct.Struct("<8sIIIII16s16s4x")
_COPIES: Final = (0, HEAD_BYTES // 2)
BLOCK: Final = 4096
_GROUP: Final = 9  # of released pages: a little less than 1 MiB
_STAGE_BYTES: Final = 2 << 20
_READ_BYTES: Final = 1 << 20
_NOT_OPENED: Final = -1


class Geometry(NamedTuple):
    """What one store holds: slot and page bytes, tokens a page, the model's root and the random id of this store."""

    slot_bytes: int
    page_bytes: int
    page_tokens: int
    model: bytes
    store: bytes

    @staticmethod
    def new(*, page_bytes: int, page_tokens: int, model: bytes) -> Geometry:
        """A fresh store's. Slots are whole 4 KiB blocks where that wastes at most 1/16 (no block is then shared by two
        pages, so replacing one never reads its neighbour), else whole 512-byte sectors."""
        record = HEADER_BYTES + page_bytes
        blocks = -(-record // BLOCK) * BLOCK
        slot = blocks if (blocks - record) * 16 <= blocks else -(-record // 512) * 512
        return Geometry(slot, page_bytes, page_tokens, model, os.urandom(16))

    def require_fit(self, page: Page) -> None:
        """Raises `ValueError` for a page of another size than this store's, or a key that is not 16 bytes."""
        nbytes = memoryview(page.payload).nbytes
        if nbytes != self.page_bytes or len(page.key) != KEY_BYTES:
            raise ValueError(
                f"a page of {nbytes} bytes with a key of {len(page.key)}; this store holds pages of {self.page_bytes} bytes with "
                f"keys of {KEY_BYTES}"
            )

    def pack(self) -> bytes:
        """The head of a page file: two equal copies, each with its own checksum."""
        fields = HEAD.pack(
            HEAD_MAGIC, FORMAT_VERSION, HEAD_BYTES, self.slot_bytes, self.page_bytes, self.page_tokens, self.model, self.store
        )
        copy = fields + xxhash.xxh3_128(fields).digest()
        return (copy.ljust(HEAD_BYTES // 2, b"\0")) * 2

    @staticmethod
    def unpack(head: bytes, path: Path) -> Geometry:
        """Read whichever copy of a head is whole. Raises `NotAStore` or `NewerStore`."""
        for at in _COPIES:
            fields = head[at : at + HEAD.size]
            if len(fields) < HEAD.size or not fields.startswith(HEAD_MAGIC):
                continue
            if head[at + HEAD.size : at + HEAD.size + CHECKSUM_BYTES] != xxhash.xxh3_128(fields).digest():
                continue
            _, version, _, *values = HEAD.unpack(fields)
            if version > FORMAT_VERSION:
                raise NewerStore(
                    f"{path} has format version {version}; this program reads versions up to {FORMAT_VERSION}. "
                    "Use a newer kvist or another directory; the pages are left as they are"
                )
            return Geometry(*values)
        raise NotAStore(
            f"{path} is not a page file (no intact head in its first {HEAD_BYTES} bytes). Choose another directory, or "
            "delete this file if it is a damaged store: its pages will be computed again"
        )


class FileSystem:
    """Every system call of a page file. A test replaces methods to inject a full disk, I/O errors or slow reads."""

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor; new files are readable by their owner and group."""
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, fd: int) -> None:
        """Give a descriptor back."""
        os.close(fd)

    def read(self, fd: int, count: int, offset: int) -> bytes:
        """At most `count` bytes from `offset`; fewer at the file's end."""
        return os.pread(fd, count, offset)

    def read_into(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill buffers one after another from `offset`; returns how many bytes there were."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, data: Buffer, offset: int) -> int:
        """Write from `offset`; returns how many bytes were taken, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        """Cut or extend a file."""
        os.ftruncate(fd, size)

    def advise(self, fd: int, offset: int, count: int, advice: int) -> None:
        """Tell the kernel how a range will be read (`os.POSIX_FADV_...`); a count of 0 means to the file's end."""
        os.posix_fadvise(fd, offset, count, advice)


class PageFile:
    """An open page file. Not locked: slots are written by one writer; a reader proves what it read.

    Slots of whole blocks are written past the page cache where the file system can (O_DIRECT). Measured on the development
    machine: 2.6 GB/s at 13 us of processor time a released page, against 0.5 to 2.1 GB/s at 27 to 300 us for buffered
    writes, which also push out of memory what others keep there. So are many read to places that a card takes them from: on two
    machines at 91 and 102% of a plain read's rate, through the cache at 88 and 83%. Others go through it and its read-ahead.
    """

    def __init__(self, path: Path, geometry: Geometry, fd: int, files: FileSystem) -> None:
        self.path, self.geometry, self._fd, self._files = path, geometry, fd, files
        self._direct: int | None = None
        self._reads: int | None = _NOT_OPENED
        self._opening = threading.Lock()
        self._stages: list[mmap.mmap] = []
        self._writer: Workers | None = None
        # Twice the usual read-ahead, so that the disk works while a page is proved; single random reads are as before.
        files.advise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @staticmethod
    def open(folder: Path, files: FileSystem, *, read_only: bool) -> PageFile | None:
        """Open a folder's page file; None if there is none. Raises `NotAStore`, `NewerStore`, `OSError`.

        A writer also gets None for one that was cut within its first head: it holds no page and is made again.
        """
        path = folder / FILE_NAME
        try:
            fd = files.open(path, os.O_RDONLY if read_only else os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            head = files.read(fd, HEAD_BYTES, 0)
            if not read_only and len(head) < HEAD.size + CHECKSUM_BYTES and HEAD_MAGIC.startswith(head[: len(HEAD_MAGIC)]):
                files.close(fd)
                return None
            geometry = Geometry.unpack(head, path)
            opened = PageFile(path, geometry, fd, files)
            if not read_only and head != geometry.pack():
                opened._write_all(fd, memoryview(geometry.pack()), 0)
        except BaseException:
            files.close(fd)
            raise
        return opened

    @staticmethod
    def create(folder: Path, geometry: Geometry, files: FileSystem) -> PageFile:
        """A new empty page file; it appears whole or not at all."""
        path, fresh = folder / FILE_NAME, folder / f"{FILE_NAME}.new"
        fd = files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        created = PageFile(path, geometry, fd, files)
        try:
            created._write_all(fd, memoryview(geometry.pack()), 0)
            files.sync(fd)
            fresh.rename(path)
        except BaseException:
            files.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        return created

    @property
    def slots(self) -> int:
        """Slots that the file reaches into; the last one may be cut."""
        return max(-(-(self._files.size(self._fd) - HEAD_BYTES) // self.geometry.slot_bytes), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._files.size(self._fd)

    def read(self, slot: int) -> bytes:
        """Header and payload of a slot, untrusted; short at the file's end. Raises `OSError`."""
        return self._files.read(self._fd, HEADER_BYTES + self.geometry.page_bytes, self._offset(slot))

    def read_header(self, slot: int) -> bytes:
        """The first 128 bytes of a slot."""
        return self._files.read(self._fd, HEADER_BYTES, self._offset(slot))

    def read_ahead(self, slots: Sequence[int]) -> Generator[Buffer | OSError, None, None]:
        """`read` for slots in order, an error in place of what it stopped; a thread reads while its last pages are used.

        Neighbours are read with one call of about 1 MiB, as one reads a plain file, into memory of pages that were let go.
        """
        groups = [slots[at : at + _GROUP] for at in range(0, len(slots), _GROUP)]
        pool: list[bytearray] = []
        reader = Workers(1, "kvist-page-read-ahead")
        try:
            ahead = [reader.submit(self._read_group, group, pool) for group in groups[:1]]
            for following in [*groups[1:], None]:
                if following is not None:
                    ahead.append(reader.submit(self._read_group, following, pool))
                yield from ahead.pop(0).result()
        finally:
            # Never waits: an abandoned iterator may be collected while a thread starts, under the lock that a join takes.
            reader.stop()

    def _read_group(self, slots: Sequence[int], pool: list[bytearray]) -> list[Buffer | OSError]:
        found: list[Buffer | OSError] = []
        for first, last in runs_of(slots):
            try:
                found += self._read_run(slots[first], last - first, pool)
            except OSError:  # which page it is, and whether it is worth a count, is seen one by one
                found += [self._read_or_error(slot) for slot in slots[first:last]]
        return found

    def _read_run(self, slot: int, count: int, pool: list[bytearray]) -> list[memoryview]:
        size, record = self.geometry.slot_bytes, HEADER_BYTES + self.geometry.page_bytes
        buffers = _let_go(pool)[:count]
        fresh = [bytearray(size) for _ in range(count - len(buffers))]
        pool += fresh[: max(4 * _GROUP - len(pool), 0)]
        buffers += fresh
        there = self._files.read_into(self._fd, buffers, self._offset(slot))
        return [memoryview(buffer)[: max(min(there - at * size, record), 0)] for at, buffer in enumerate(buffers)]

    def _read_or_error(self, slot: int) -> Buffer | OSError:
        try:
            return self.read(slot)
        except OSError as error:
            return error

    def read_into(self, slots: Sequence[int], memory: memoryview) -> list[Buffer | OSError]:
        """`read` for slots in order, each into its place in `memory`, `slot_bytes` apart; neighbours with few large calls.

        What a call stopped at is read again alone, into memory of its own.
        """
        size, found = self.geometry.slot_bytes, list[Buffer | OSError]()
        for first, last in runs_of(slots):
            target = memory[first * size : last * size]
            try:
                there = self._fill_from(slots[first], target)
            except OSError:
                found += [self._read_or_error(slot) for slot in slots[first:last]]
                continue
            record = HEADER_BYTES + self.geometry.page_bytes
            found += [target[at : min(at + record, max(there, at))] for at in range(0, len(target), size)]
        return found

    def _fill_from(self, slot: int, target: memoryview) -> int:
        """Bytes from a slot's begin on; how many there were before the file's end. Past the page cache as far as that goes."""
        start = self._offset(slot)
        there = self._read_direct(target, start)
        while there < len(target):
            came = self._files.read_into(self._fd, [target[there : there + _READ_BYTES]], start + there)
            if not came:
                break
            there += came
        return there

    def _read_direct(self, target: memoryview, offset: int) -> int:
        """How many bytes the disk put into `target` itself; 0 where file system, slots or memory do not allow that."""
        with self._opening:
            if self._reads == _NOT_OPENED:
                self._reads = self._open_direct(os.O_RDONLY)
            fd = self._reads
        if fd is None:
            return 0
        try:
            return self._files.read_into(fd, [target], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # larger blocks than ours, or memory that does not begin at one
                raise
            return 0

    def write(self, slot: int, records: Iterable[tuple[Buffer, Buffer]]) -> None:
        """Write (header, payload) pairs into consecutive slots from `slot`. Raises `OSError`. One thread at a time.

        Two buffers take turns: while one is written, the next records are made (summed) and copied.
        """
        size, records = self.geometry.slot_bytes, iter(records)
        batch = max(_STAGE_BYTES // size, 1)
        if self._writer is None:
            self._stages = [mmap.mmap(-1, batch * size) for _ in range(2)]  # start at a block, as O_DIRECT wants
            self._direct = self._open_direct(os.O_WRONLY)
            self._writer = Workers(1, "kvist-page-file")
        under_way: Future[None] | None = None
        try:
            for turn in count():
                staged = self._fill(memoryview(self._stages[turn % 2]), islice(records, batch))
                if under_way is not None:
                    under_way.result()
                if not staged:
                    return
                under_way = self._writer.submit(self._write_staged, staged, self._offset(slot))
                slot += staged.nbytes // size
        finally:
            if under_way is not None:
                wait([under_way])

    def _fill(self, stage: memoryview, records: Iterable[tuple[Buffer, Buffer]]) -> memoryview:
        size, end = self.geometry.slot_bytes, 0
        for header, payload in records:
            stage[end : end + HEADER_BYTES] = header
            stage[end + HEADER_BYTES : end + HEADER_BYTES + len(payload)] = payload
            end += size
        return stage[:end]

    def sync(self) -> None:
        """Wait until written pages are on the disk."""
        self._files.sync(self._fd)

    def cut(self, slots: int) -> None:
        """End the file after `slots` slots."""
        self._files.truncate(self._fd, self._offset(slots))

    def close(self) -> None:
        """Close; the object is of no use afterwards."""
        if self._writer is not None:
            self._writer.close()
        if self._direct is not None:
            self._files.close(self._direct)
            self._direct = None
        if self._reads is not None and self._reads != _NOT_OPENED:
            self._files.close(self._reads)
            self._reads = None
        self._files.close(self._fd)

    def _offset(self, slot: int) -> int:
        return HEAD_BYTES + slot * self.geometry.slot_bytes

    def _open_direct(self, access: int) -> int | None:
        if self.geometry.slot_bytes % BLOCK:
            return None
        try:
            return self._files.open(self.path, access | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this is how a file system says that it goes through its cache only
                raise
            return None

    def _write_staged(self, staged: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                return self._write_all(self._direct, staged, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a device with larger blocks than ours
                    raise
                self._files.close(self._direct)
                self._direct = None
        return self._write_all(self._fd, staged, offset)

    def _write_all(self, fd: int, data: memoryview, offset: int) -> None:
        while data:
            taken = self._files.write(fd, data, offset)
            if not taken:
                raise OSError(errno.ENOSPC, "the disk takes no more bytes", str(self.path))
            data, offset = data[taken:], offset + taken


def _let_go(pool: list[bytearray]) -> list[bytearray]:
    """Buffers of a pool on which no page lies any more: every view of a buffer counts as a reference to it.

    Fresh memory for every page would cost more than reading it: the kernel clears it, and the allocator gives it back each time.
    """
    probe = bytearray()
    counts = [sys.getrefcount(buffer) for buffer in [*pool, probe]]
    # `probe` has a name where a free buffer has its place in the pool: their counts are equal whatever the interpreter adds.
    return [buffer for buffer, count in zip(pool, counts, strict=False) if count == counts[-1]]


def runs_of(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) ranges of positions whose slots follow one another."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield first, at
            first = at
