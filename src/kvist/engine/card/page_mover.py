"""Pages between host memory and a card's pool: restored before a replay, saved behind a step, at the speed of the link.

Large copies go through two lanes, each a stream with a staging buffer: while one scatters its pages over the pool, the other's
copy is under way. Must not know keys, files or requests; where pages come from is a function that gives their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from kvist.cache.page_rows import PageRows

PART_BYTES = 64 << 20
"""Bytes of a copy: long enough that the host's work for the next one is hidden, short enough that the last scatter is brief."""
READ_BYTES = 8 << 20
"""Bytes that one thread reads at a time where pages come from a function."""
READERS, PROVERS = 3, 4
"""Threads that read (a disk likes few), and that prove what was read meanwhile."""

Read = Callable[[int, int, memoryview], Callable[[], int]]
"""Put the pages first..stop-1 of those to be restored into memory; what comes back proves them, in order up to the first that is
missing, and says how many came. Both are called from threads."""


class _Lane:
    """A stream with staging for `pages` pages on the device."""

    def __init__(self, pages: int, page_bytes: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.device_PB = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)

    def entered(self) -> AbstractContextManager[object]:
        """The lane's stream as the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class _Staging:
    """Pinned memory for `records` records of `record_bytes`, filled by one thread at a time, and as much on the device."""

    def __init__(self, records: int, record_bytes: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.host_RB = torch.empty(records, record_bytes, dtype=torch.uint8, pin_memory=on_card)
        self.device_RB = torch.empty(records, record_bytes, dtype=torch.uint8, device=device)
        self.used = torch.cuda.Event() if on_card else None

    def fill(self, read: Read, first: int, stop: int) -> Callable[[], int]:
        """Read pages first..stop-1; see `Read`."""
        if self.used is not None:
            # What lay here before must be in the pool.
            self.used.synchronize()
        return read(first, stop, self.host_RB[: stop - first].numpy().data.cast("B"))


class PageMover:
    """Moves whole pages of a pool. `part_bytes`: of one copy. Memory: two parts on the device; where pages are read, READ_BYTES
    for each thread and once more, pinned and on the device.

    Raises ValueError for a part that holds no page.
    """

    def __init__(self, rows: PageRows, *, part_bytes: int = PART_BYTES) -> None:
        self.page_bytes, self.device = rows.layout.page_bytes, rows.bytes_PB.device
        self.part = part_bytes // self.page_bytes
        if self.part < 1:
            raise ValueError(f"parts of {part_bytes} bytes hold no page of {self.page_bytes}")
        # Wide elements: a page is a multiple of 128 bytes.
        self.pool_PB = rows.bytes_PB.view(torch.int64)
        self.lanes = [_Lane(self.part, self.page_bytes, self.device) for _ in range(2)]
        self._host_ids = torch.empty(len(self.pool_PB), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._sent = torch.cuda.Event() if self.device.type == "cuda" else None
        self._staging: list[_Staging] = []

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in (*(lane.device_PB for lane in self.lanes), *(one.device_RB for one in self._staging)))

    def restore(self, host_PB: Tensor, pages: Sequence[int]) -> None:
        """Host pages (uint8 [count, page bytes], pinned for full speed) into the pool's `pages`, in order.

        Returns at once: what is queued on the current stream afterwards sees the pages; the host's must stay as they are until
        then. Raises ValueError for pages that are not there, or other than the host holds.
        """
        self._require(host_PB, pages)
        with self._lanes() as lanes:
            ids: Tensor | None = None
            for first in range(0, len(pages), self.part):
                lane, part = next(lanes), slice(first, min(first + self.part, len(pages)))
                self._copy(lane, host_PB[part])
                # The first copy is on its way before the page numbers are looked at.
                ids = self._numbers(pages) if ids is None else ids
                self._scatter(lane, ids[part], lane.device_PB[: len(host_PB[part])])

    def restore_from(self, read: Read, pages: Sequence[int], *, record_bytes: int | None = None, page_at: int = 0) -> int:
        """The same from any source, read by several threads, up to the first page that is missing; returns how many came.

        `read` puts pages into memory `record_bytes` apart (a page's own size by default), each `page_at` bytes (a multiple of 8)
        behind its place.
        """
        record_bytes = self.page_bytes if record_bytes is None else record_bytes
        size, ahead = max(1, READ_BYTES // record_bytes), READERS + PROVERS
        starts = list(range(0, len(pages), size))
        if not self._staging or self._staging[0].host_RB.shape[1] != record_bytes:
            self._staging = [_Staging(size, record_bytes, self.device) for _ in range(ahead + 1)]
        count, ids = 0, self._numbers(pages)
        with self._lanes() as lanes, _threads(PROVERS) as provers, _threads(READERS) as readers:

            def filled(number: int) -> Future[int]:
                first, staging = starts[number], self._staging[number % len(self._staging)]
                return provers.submit(staging.fill(read, first, min(first + size, len(pages))))

            coming = [readers.submit(filled, number) for number in range(min(ahead, len(starts)))]
            for number, first in enumerate(starts):
                came, staging = coming[number].result().result(), self._staging[number % len(self._staging)]
                lane = next(lanes)
                with lane.entered():
                    staging.device_RB[:came].copy_(staging.host_RB[:came], non_blocking=True)
                self._scatter(lane, ids[first : first + came], staging.device_RB[:came, page_at : page_at + self.page_bytes])
                if staging.used is not None:
                    staging.used.record(lane.stream)
                count += came
                if came < min(size, len(pages) - first):
                    break
                # The next one's memory is free, or on its way to the pool: its thread waits.
                if number + ahead < len(starts):
                    coming.append(readers.submit(filled, number + ahead))
        return count

    def save(self, pages: Sequence[int], host_PB: Tensor) -> None:
        """The pool's `pages` into host pages (as for `restore`); returns when they are there."""
        self._require(host_PB, pages)
        ids = self._numbers(pages)
        with self._lanes() as lanes:
            for first in range(0, len(pages), self.part):
                lane, part = next(lanes), ids[first : first + self.part]
                with lane.entered():
                    staged_PB = lane.device_PB[: len(part)]
                    torch.index_select(self.pool_PB, 0, part, out=staged_PB.view(torch.int64))
                    host_PB[first : first + len(part)].copy_(staged_PB, non_blocking=True)
        for lane in self.lanes:
            if lane.stream is not None:
                lane.stream.synchronize()

    def _copy(self, lane: _Lane, host_PB: Tensor) -> None:
        with lane.entered():
            lane.device_PB[: len(host_PB)].copy_(host_PB, non_blocking=True)

    def _scatter(self, lane: _Lane, ids: Tensor, pages_PB: Tensor) -> None:
        if not len(ids):
            return
        with lane.entered():
            if lane.stream is not None and self._sent is not None:
                # They may have left after the lanes began; the current stream outlives both.
                lane.stream.wait_event(self._sent)
            self.pool_PB.index_copy_(0, ids, pages_PB.view(torch.int64))

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        """Page numbers on the device, all at once: a small copy between large ones of another stream would wait for both."""
        numbers = np.asarray(pages, dtype=np.int64)
        bad = numbers[(numbers < 0) | (numbers >= len(self.pool_PB))]
        if len(bad):
            raise ValueError(f"page {bad[0]} is outside the pool of {len(self.pool_PB)} pages")
        if self._sent is not None:
            self._sent.synchronize()
        self._host_ids[: len(numbers)].numpy()[:] = numbers
        ids = self._host_ids[: len(numbers)].to(self.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device))
        return ids

    @contextmanager
    def _lanes(self) -> Iterator[Iterator[_Lane]]:
        """Lanes in turn, behind the current stream's work; what follows there is behind theirs."""
        streams = [lane.stream for lane in self.lanes if lane.stream is not None]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            yield cycle(self.lanes)
        finally:
            for stream in streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def _require(self, host_PB: Tensor, pages: Sequence[int]) -> None:
        if host_PB.dtype is not torch.uint8 or tuple(host_PB.shape) != (len(pages), self.page_bytes):
            raise ValueError(
                f"host pages are {host_PB.dtype} {list(host_PB.shape)}; {len(pages)} pages of {self.page_bytes} bytes are uint8 "
                f"{[len(pages), self.page_bytes]}"
            )


def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="kvist-restore")
