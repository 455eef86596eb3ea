"""Pages between host memory and a card's pool: restored before a replay, saved behind a step, at the speed of the link.

Large copies go through two lanes, each a stream with a staging buffer: while one scatters its pages over the pool, the other's
copy is under way. Must not know keys, files or requests; where pages come from is an iterator of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from kvist.cache.page_rows import PageRows
from kvist.cache.record import Buffer

PART_BYTES = 16 << 20
"""Bytes of a copy: long enough for the link's full rate, short enough that the first scatter begins early."""


class _Lane:
    """A stream with staging for `pages` pages on the device, and pinned staging on the host once it is needed."""

    def __init__(self, pages: int, page_bytes: int, device: torch.device) -> None:
        self.on_card = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_card else None
        self.device_PB = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)
        self._host_PB: Tensor | None = None

    @property
    def host_PB(self) -> Tensor:
        """Pinned staging; what was copied from it before has left."""
        if self._host_PB is None:
            self._host_PB = torch.empty(self.device_PB.shape, dtype=torch.uint8, pin_memory=self.on_card)
        if self.stream is not None:
            self.stream.synchronize()
        return self._host_PB

    def entered(self) -> AbstractContextManager[object]:
        """The lane's stream as the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class PageMover:
    """Moves whole pages of a pool. `part_bytes`: of one copy. Memory: two parts on the device, two pinned at most.

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

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(lane.device_PB.nbytes for lane in self.lanes)

    def restore(self, host_PB: Tensor, pages: Sequence[int]) -> None:
        """Host pages (uint8 [count, page bytes], pinned for full speed) into the pool's `pages`, in order.

        Returns at once: what is queued on the current stream afterwards sees the pages; the host's must stay as they are until
        then. Raises ValueError for pages that are not there, or other than the host holds.
        """
        self._check(host_PB, pages)
        ids = self._ids(pages)
        with self._lanes() as lanes:
            for first in range(0, len(pages), self.part):
                self._send(next(lanes), host_PB[first : first + self.part], ids[first : first + self.part])

    def restore_from(self, payloads: Iterable[Buffer | None], pages: Sequence[int]) -> int:
        """The same from any source of page bytes, in order, up to the first that is missing; returns how many came."""
        self._check_pages(pages)
        ids, count, source = self._ids(pages), 0, iter(payloads)
        with self._lanes() as lanes:
            while count < len(pages):
                lane, came, most = next(lanes), 0, min(self.part, len(pages) - count)
                staged_PB = lane.host_PB
                for payload in islice(source, most):
                    if payload is None:
                        break
                    staged_PB[came].numpy()[:] = np.frombuffer(payload, np.uint8)
                    came += 1
                self._send(lane, staged_PB[:came], ids[count : count + came])
                count += came
                if came < most:
                    break
        return count

    def save(self, pages: Sequence[int], host_PB: Tensor) -> None:
        """The pool's `pages` into host pages (as for `restore`); returns when they are there."""
        self._check(host_PB, pages)
        ids = self._ids(pages)
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

    def _send(self, lane: _Lane, host_PB: Tensor, ids: Tensor) -> None:
        if not len(ids):
            return
        with lane.entered():
            staged_PB = lane.device_PB[: len(ids)]
            staged_PB.copy_(host_PB, non_blocking=True)
            self.pool_PB.index_copy_(0, ids, staged_PB.view(torch.int64))

    def _ids(self, pages: Sequence[int]) -> Tensor:
        """Page numbers on the device, all at once and before the lanes begin: a small copy between two large ones of another
        stream would wait for both."""
        return torch.tensor(pages, dtype=torch.int64).to(self.device)

    @contextmanager
    def _lanes(self) -> Iterator[Iterator[_Lane]]:
        """Lanes in turn, behind the current stream's work; what follows on that stream is behind theirs."""
        streams = [lane.stream for lane in self.lanes if lane.stream is not None]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        yield cycle(self.lanes)
        for stream in streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def _check(self, host_PB: Tensor, pages: Sequence[int]) -> None:
        if host_PB.dtype is not torch.uint8 or tuple(host_PB.shape) != (len(pages), self.page_bytes):
            raise ValueError(
                f"host pages are {host_PB.dtype} {list(host_PB.shape)}; {len(pages)} pages of {self.page_bytes} bytes are uint8 "
                f"{[len(pages), self.page_bytes]}"
            )
        self._check_pages(pages)

    def _check_pages(self, pages: Sequence[int]) -> None:
        bad = [page for page in pages if not 0 <= page < len(self.pool_PB)]
        if bad:
            raise ValueError(f"page {bad[0]} is outside the pool of {len(self.pool_PB)} pages")
