"""Pages on a disk for measurements: a folder on the disk to measure, stores filled by rule, plain files, page cache dropped.

Owns the measured actions of `page_store`. Torch-free, so that the memory of its own process means something.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import WrongResult
from kvist.cache.record import Buffer, Page
from kvist.cache.store import PageStore

MODEL = b"benchmark's root"
FOLDER_VARIABLE = "KVIST_BENCH_DIR"
CHUNK = 1 << 20
BATCH = 146
"""Pages published at a time: 16 MiB of released ones, as the write-behind thread does."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk to be measured ($KVIST_BENCH_DIR, else the system's temporary folder), gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvist-pages-", dir=os.environ.get(FOLDER_VARIABLE)) as folder:
        yield Path(folder)


def key(number: int) -> bytes:
    """A key that looks like a digest: neighbours are far apart."""
    return random.Random(number).randbytes(16)


class Payloads:
    """Random pages that take turns: page `n` has the bytes of `n % TURNS`, so that giving one out costs nothing."""

    TURNS = 61

    def __init__(self, page_bytes: int) -> None:
        self._pages = [random.Random(turn).randbytes(page_bytes) for turn in range(self.TURNS)]

    def page(self, number: int) -> Page:
        """Page `number` with its key."""
        return Page(key(number), self._pages[number % self.TURNS])

    def require(self, number: int, data: Buffer | None) -> None:
        """Raises `WrongResult` unless `data` is page `number`."""
        if data is None or data != self._pages[number % self.TURNS]:
            raise WrongResult(f"page {number} is {'absent' if data is None else 'wrong'}")


def open_store(folder: Path, page_bytes: int, budget_bytes: int | None = None) -> PageStore:
    """A store for the measurements' pages."""
    return PageStore.open(folder, model=MODEL, page_bytes=page_bytes, page_tokens=0, budget_bytes=budget_bytes)


def drop_page_cache(folder: Path) -> None:
    """Make the kernel forget the files of a folder, written or not."""
    for path in folder.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill(store: PageStore, payloads: Payloads, numbers: range, batch: int) -> None:
    """Publish pages in batches. Raises `WrongResult` if one is refused."""
    for first in numbers[::batch]:
        pages = [payloads.page(n) for n in range(first, min(first + batch, numbers.stop))]
        if store.put(pages) != len(pages):
            raise WrongResult(f"not all of pages {first} to {first + len(pages)} were published: {store.counters}")


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Microseconds of single lookups, sorted."""

    times_us: Sequence[float]

    def at(self, share: float) -> float:
        """The quantile `share`."""
        return self.times_us[min(int(share * len(self.times_us)), len(self.times_us) - 1)]


def time_lookups(store: PageStore, payloads: Payloads, pages: int, count: int, *, read: bool) -> Lookups:
    """Random pages looked up (`read`: also read and proved), every third key unknown when only looked up."""
    rng, times = random.Random(pages), []
    for at in range(count):
        number = rng.randrange(pages) + (0 if read or at % 3 else pages)
        wanted = key(number)
        start = time.perf_counter()
        result = store.get(wanted) if read else store.contains(wanted)
        times.append((time.perf_counter() - start) * 1e6)
        if read:
            payloads.require(number, result if isinstance(result, memoryview) else None)
        elif result != (number < pages):
            raise WrongResult(f"page {number} of {pages} is found: {result}")
    return Lookups(times_us=sorted(times))


@dataclass(kw_only=True)
class Streams:
    """Seconds and bytes of sequential writes and reads through the store and of plain files, in alternating slices."""

    payload_bytes: int = 0
    store_write_s: float = 0.0
    store_read_s: float = 0.0
    plain_write_s: float = 0.0
    plain_read_s: float = 0.0

    def rate(self, name: str) -> float:
        """GB/s of `store_write`, `plain_read`, ..."""
        return self.payload_bytes / getattr(self, f"{name}_s") / 1e9


def stream(folder: Path, page_bytes: int, total_bytes: int, slice_bytes: int) -> Streams:
    """Write, then read with the page cache dropped, `total_bytes` both ways, slice by slice in turn, so that a disk whose
    speed drifts is the same disk for both. What is written is on the disk before a slice's clock stops; the store proves every
    page that it reads, and one of each slice is also compared."""
    payloads, result = Payloads(page_bytes), Streams()
    pages = slice_bytes // page_bytes
    block = memoryview(random.Random(0).randbytes(CHUNK))
    (folder / "store").mkdir()
    (folder / "plain").mkdir()
    store = open_store(folder / "store", page_bytes)
    slices = max(total_bytes // slice_bytes, 1)
    for number in range(slices):
        numbers = range(number * pages, number * pages + pages)
        for kind in ("plain", "store") if number % 2 else ("store", "plain"):
            start = time.perf_counter()
            if kind == "plain":
                _write_plain(folder / "plain" / str(number), block, pages * page_bytes)
                result.plain_write_s += time.perf_counter() - start
            else:
                fill(store, payloads, numbers, batch=BATCH)
                store.flush()
                result.store_write_s += time.perf_counter() - start
        result.payload_bytes += pages * page_bytes
    drop_page_cache(folder / "plain")
    drop_page_cache(folder / "store")
    for number in range(slices):
        keys = [key(n) for n in range(number * pages, number * pages + pages)]
        for kind in ("plain", "store") if number % 2 else ("store", "plain"):
            start = time.perf_counter()
            if kind == "plain":
                _read_plain(folder / "plain" / str(number))
                result.plain_read_s += time.perf_counter() - start
            else:
                _read_store(store, payloads, keys, number * pages)
                result.store_read_s += time.perf_counter() - start
    store.close()
    return result


def _write_plain(path: Path, block: memoryview, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, CHUNK):
            file.write(block[: min(CHUNK, size - at)])
        os.fdatasync(file.fileno())


def _read_plain(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        for at in range(0, path.stat().st_size, CHUNK):
            os.pread(file.fileno(), CHUNK, at)


def _read_store(store: PageStore, payloads: Payloads, keys: list[bytes], first: int) -> None:
    for number, data in enumerate(store.get_many(keys), first):
        if data is None:
            raise WrongResult(f"page {number} is absent: {store.counters}")
        if number == first:
            payloads.require(number, data)
