"""Engram tables read row by row while a model runs: distinct rows of a batch, a bounded row cache, prefetch by a thread.

Owns which rows are where and when they are read. Rows are addressed by token ids alone, so whoever has a request's ids can
announce its rows before any layer asks. Must not know hashing or gates. Facts section 8; report 2.4.2.
"""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from kvist.checkpoint.reads import FileReads, ReadFailed
from kvist.checkpoint.row_cache import RowCache
from kvist.checkpoint.tables import check_row_ids, table_parameters
from kvist.checkpoint.tensors import TensorFiles
from kvist.config import ModelConfig
from kvist.inventory import Parameter
from kvist.quant import unpack_fp8

DEFAULT_CACHE_BYTES = 256 << 20
MAX_PENDING = 64
PIECE_IDS = 8192
"""Ids of one prefetching job: rows come in the order in which they will be asked for, and nobody waits long for a job."""


@dataclass(kw_only=True)
class EngramCounters:
    """Since the start: rows asked for, distinct ones a call, those found held, rows read (for a caller; ahead), prefetches
    dropped because too many waited, failed reads, bytes read, and seconds that callers waited for rows."""

    asked: int = 0
    distinct: int = 0
    hits: int = 0
    read: int = 0
    read_ahead: int = 0
    dropped: int = 0
    failures: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of distinct rows that were held when asked for; 1 if none was asked for."""
        return self.hits / self.distinct if self.distinct else 1.0


@dataclass
class _Job:
    """`ids` int64, distinct and sorted once the job has begun (`begun`)."""

    ids: np.ndarray
    begun: bool = False
    future: Future[None] | None = None


class StoredTable:
    """Rows of one Engram layer, left in the file. Satisfies the model's `EngramReader`; safe to use from several threads.

    `dtype` is that of the values handed out. The values, and so all results, are those of a resident table.
    """

    def __init__(
        self,
        files: TensorFiles,
        parameter: Parameter,
        dtype: torch.dtype,
        reads: FileReads,
        cache_bytes: int,
        worker: ThreadPoolExecutor,
    ) -> None:
        self.dtype, self.reads, self.worker = dtype, reads, worker
        self.shape = parameter.shape
        self.planes = [(files.entry(spec.name), spec.shape[1]) for spec in parameter.specs()]
        self.cache = RowCache(sum(width for _, width in self.planes), cache_bytes, most_rows=self.shape[0])
        self.counters = EngramCounters()
        self.store: EngramStore | None = None
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []

    def rows(self, ids: Tensor) -> Tensor:
        """int64 ids [...] on any device -> values [..., dim] there. ValueError: id out of range; `ReadFailed`: no such bytes."""
        flat = check_row_ids(ids, self.shape[0])
        distinct, inverse = np.unique(flat.numpy(), return_inverse=True)
        raw = np.empty((len(distinct), self.cache.row_bytes), dtype=np.uint8)
        began = time.perf_counter()
        missing = self._take(distinct, raw)
        with self._lock:
            self.counters.asked += len(flat)
            self.counters.distinct += len(distinct)
            self.counters.hits += len(distinct) - len(missing)
        if len(missing):
            try:
                self._await(distinct[missing])
                missing = missing[self._take_part(distinct, raw, missing)]
                self._read(distinct, raw, missing, ahead=False)
            finally:
                with self._lock:
                    self.counters.stall_s += time.perf_counter() - began
        width = self.shape[1]
        codes, scales = torch.from_numpy(raw[:, :width]), torch.from_numpy(raw[:, width:])
        values = unpack_fp8(codes.contiguous(), scales.contiguous(), self.dtype)
        return values[torch.from_numpy(inverse.reshape(-1))].view(*ids.shape, width).to(ids.device)

    def prefetch(self, ids: Tensor) -> None:
        """Read these rows, as many as half the cache holds, in the background. Never waits; a failure is left to who asks."""
        first = ids.reshape(-1)[: self.cache.capacity // 2]
        flat = check_row_ids(first, self.shape[0]).numpy()
        with self._lock:
            self._jobs = [job for job in self._jobs if job.future is None or not job.future.done()]
            for start in range(0, len(flat), PIECE_IDS):
                if len(self._jobs) >= MAX_PENDING:
                    self.counters.dropped += 1
                    return
                job = _Job(flat[start : start + PIECE_IDS].copy())
                self._jobs.append(job)
                job.future = self.worker.submit(self._read_ahead, job)

    def _read_ahead(self, job: _Job) -> None:
        distinct = np.unique(job.ids)
        with self._lock:
            job.ids, job.begun = distinct, True
        raw = np.empty((len(distinct), self.cache.row_bytes), dtype=np.uint8)
        self._read(distinct, raw, self._take(distinct, raw), ahead=True)

    def _take(self, distinct: np.ndarray, raw: np.ndarray) -> np.ndarray:
        """Fill `raw` with the rows that are held; places of the others."""
        with self._lock:
            return np.flatnonzero(~self.cache.get(distinct, raw))

    def _take_part(self, distinct: np.ndarray, raw: np.ndarray, places: np.ndarray) -> np.ndarray:
        """`_take` for some places only: which of `places` are still missing."""
        part = np.empty((len(places), self.cache.row_bytes), dtype=np.uint8)
        missing = self._take(distinct[places], part)
        raw[places] = part
        return missing

    def _await(self, wanted: np.ndarray) -> None:
        """Wait for the prefetch under way if it brings any of these rows. One that has not begun will find them held."""
        with self._lock:
            jobs = [job for job in self._jobs if job.begun and np.isin(wanted, job.ids, assume_unique=True).any()]
        for job in jobs:
            assert job.future is not None
            # Its failure is not ours: what it did not bring is read after this, and that read names what is wrong.
            wait([job.future])

    def _read(self, distinct: np.ndarray, raw: np.ndarray, places: np.ndarray, *, ahead: bool) -> None:
        if not len(places):
            return
        ids = np.ascontiguousarray(distinct[places])
        fresh = np.empty((len(ids), self.cache.row_bytes), dtype=np.uint8)
        at = 0
        try:
            for entry, width in self.planes:
                plane = np.empty((len(ids), width), dtype=np.uint8)
                self.reads.rows_into(entry, width, ids, plane, f"table {entry.name!r}")
                fresh[:, at : at + width] = plane
                at += width
        except ReadFailed:
            with self._lock:
                self.counters.failures += 1
            raise
        raw[places] = fresh
        with self._lock:
            held = self.cache.get(ids, fresh)  # another thread may have kept some meanwhile
            self.cache.put(ids[~held], fresh[~held])
            self.counters.read += 0 if ahead else len(ids)
            self.counters.read_ahead += len(ids) if ahead else 0
            self.counters.bytes_read += fresh.nbytes


class EngramStore:
    """All Engram tables of an opened checkpoint, by layer index, sharing `cache_bytes` and one prefetching thread."""

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        reads: FileReads | None = None,
    ) -> None:
        if cache_bytes < 0:
            raise ValueError(f"an Engram cache of {cache_bytes} bytes; 0 keeps no rows, more keeps the last ones used")
        reads = reads or FileReads(random_access=True)
        worker = ThreadPoolExecutor(1, thread_name_prefix="engram-ahead")
        found = table_parameters(config)
        each = cache_bytes // max(1, len(found))
        self.tables = {layer: StoredTable(files, parameter, dtype, reads, each, worker) for layer, parameter in found.items()}
        for table in self.tables.values():
            table.store = self  # so that the store, whose end stops the thread, lives as long as any of its tables
        self._close = weakref.finalize(self, worker.shutdown, wait=False, cancel_futures=True)

    def counters(self) -> EngramCounters:
        """Sums over all tables."""
        return sum_counters([table.counters for table in self.tables.values()])

    def close(self) -> None:
        """Stop the prefetching thread; the model must not run afterwards."""
        self._close()


def sum_counters(parts: list[EngramCounters]) -> EngramCounters:
    """Field by field."""
    return EngramCounters(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(EngramCounters)})
