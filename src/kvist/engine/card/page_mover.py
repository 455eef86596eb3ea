"""Pages between host memory and a card's pool: restored before a replay, saved behind a step, at the speed of the link.

Runs of neighbouring places move as one copy each, in parts through two lanes, each a stream with a staging buffer: while one
scatters its pages over the pool, the other's copy is under way. Must not know keys, files or requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor

from kvist.cache.page_memory import PageMemory
from kvist.cache.record import Buffer

LOG = logging.getLogger(__name__)

PART_BYTES = 64 << 20
"""Bytes of a part: so long that the host's work for the next one is hidden even where processors are slow."""
FIRST_BYTES = 32 << 20
"""Bytes of a restore's first part, so that the link begins early, and is busy for as long as the host names the next."""
GROWTH = 2
"""How much larger each of a restore's parts is than the one before, at most."""
FIRST_SAVED_BYTES = 8 << 20
"""Bytes of a save's first part, whose places are named afterwards; its others are at most as large as a restore's first."""


class _Lane:
    """A stream with staging for `records` records on the device, and the pages of it, at `page` of each, in wide elements."""

    def __init__(self, records: int, record_bytes: int, page: slice, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.device_RB = torch.empty(records, record_bytes, dtype=torch.uint8, device=device)
        self.pages_RE = self.device_RB[:, page].view(torch.int64)

    def entered(self) -> AbstractContextManager[object]:
        """The lane's stream as the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class PageMover:
    """Moves whole pages of a pool, uint8 [pages, page bytes], to and from places of `memory`, whose pieces it gives: pinned ones.

    `record_bytes`, `page_at`: as `PageMemory` wants them. `part_bytes`: of one copy at most. Raises ValueError for a part that
    holds no page.
    """

    def __init__(
        self, pool_PB: Tensor, *, record_bytes: int | None = None, page_at: int = 0, part_bytes: int = PART_BYTES
    ) -> None:
        self.device, page_bytes = pool_PB.device, pool_PB.shape[1]
        self.memory = PageMemory(self._piece, page_bytes=page_bytes, record_bytes=record_bytes, page_at=page_at)
        size = self.memory.record_bytes
        self.part = min(part_bytes // size, len(pool_PB))
        if self.part < 1:
            raise ValueError(f"parts of {part_bytes} bytes hold no page of {size}")
        self._first, self._first_saved = (max(1, min(self.part, most // size)) for most in (FIRST_BYTES, FIRST_SAVED_BYTES))
        # Wide elements: a page is a multiple of 128 bytes.
        self.pool_PB = pool_PB.view(torch.int64)
        self.lanes = [_Lane(self.part, size, slice(page_at, page_at + page_bytes), self.device) for _ in range(2)]
        self._pieces_RB = list[Tensor]()
        self._host_ids = torch.empty(len(self.pool_PB), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._sent = torch.cuda.Event() if self.device.type == "cuda" else None
        self._leaving = deque[tuple[torch.cuda.Event, list[Buffer]]]()

    @property
    def nbytes(self) -> int:
        """Most bytes on the device: staging, and what a save gathers for each lane."""
        return sum(lane.device_RB.nbytes + self._first * self.pool_PB.shape[1] * 8 for lane in self.lanes)

    def restore(self, payloads: Iterable[Buffer | None], pages: Sequence[int]) -> int:
        """Bytes of pages into the pool's `pages`, in order, up to the first that is missing; returns how many came.

        Pages that lie in `memory` leave from there, others are copied into it. The copies are under way when this returns: what
        is queued on the current stream afterwards sees the pages. Raises ValueError for pages that the pool does not have.
        """
        coming, first, size, numbered = iter(payloads), 0, self._first, False
        # Allocated for the current stream, which outlives both lanes' work.
        ids = self.pool_PB.new_empty(len(pages))
        with self._lanes() as lanes:
            while first < len(pages):
                wanted = min(size, len(pages) - first)
                part, places = self._owned(islice(coming, wanted))
                lane = next(lanes)
                with lane.entered():
                    self._send(lane, part, places)
                    if not numbered:
                        # The first copy is on its way before the page numbers are looked at.
                        self._number(pages, ids)
                        numbered = True
                    self._scatter(lane, ids[first : first + len(part)])
                # The host takes less than a third of the link's time for a part to prepare as large a one.
                first, size = first + len(part), min(GROWTH * size, self.part)
                if len(part) < wanted:
                    break
        self._let_go()
        return first

    def save(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of the pool's `pages`, each in a place of `memory` of its own; returns when they are there. Raises
        MemoryError where no memory for places is left."""
        self._let_go()
        ids, first, size = self.pool_PB.new_empty(len(pages)), 0, self._first_saved
        self._number(pages, ids)
        places = self.memory.reserve(len(pages))
        try:
            with self._lanes() as lanes:
                while first < len(pages):
                    lane, stop = next(lanes), min(first + size, len(pages))
                    with lane.entered():
                        lane.pages_RE[: stop - first].copy_(self.pool_PB[ids[first:stop]])
                        for places_RB, at in self._runs(places[first:stop]):
                            places_RB.copy_(lane.device_RB[at : at + len(places_RB)], non_blocking=True)
                    first, size = stop, min(2 * size, self._first)
        finally:
            # Making so many views takes the host as long as the copies the link. Whatever happened: places that are let go must
            # not be written to any more.
            held = self.memory.pages(places)
            for lane in self.lanes:
                if lane.stream is not None:
                    lane.stream.synchronize()
        return held

    def _piece(self, nbytes: int) -> memoryview:
        """Pinned memory, where there is a card. Raises MemoryError if the host has none left to pin."""
        try:
            piece = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            have = sum(piece_RB.nbytes for piece_RB in self._pieces_RB)
            raise MemoryError(f"no {nbytes:,} bytes of host memory to pin for pages, beside {have:,}: {error}") from error
        self._pieces_RB.append(piece.view(-1, self.memory.record_bytes))
        return piece.numpy().data

    def _owned(self, payloads: Iterator[Buffer | None]) -> tuple[list[Buffer], list[int]]:
        """Pages up to the first that is missing or finds no place, copied into `memory` where they lie elsewhere, and places."""
        held = list[Buffer]()
        for payload in payloads:
            if payload is None:
                break
            held.append(payload)
        places = self.memory.places_of(held)
        elsewhere = [at for at, place in enumerate(places) if place < 0] if -1 in places else []
        if elsewhere:
            self._let_go()
        for at in elsewhere:
            try:
                held[at] = self.memory.own(held[at])
            except MemoryError as error:
                LOG.warning("pages that do not come back count as missing: %s", error)
                del held[at:], places[at:]
                break
            (places[at],) = self.memory.places_of(held[at : at + 1])
        return held, places

    def _runs(self, places: list[int]) -> Iterator[tuple[Tensor, int]]:
        """Records [n, record bytes] of neighbouring places, and at which of `places` each run begins."""
        for first, stop in self.memory.runs(places):
            piece, at = divmod(places[first], self.memory.each)
            yield self._pieces_RB[piece][at : at + stop - first], first

    def _send(self, lane: _Lane, held: list[Buffer], places: list[int]) -> None:
        """Pages on their way into the staging of a lane that is entered; their places stay taken until they have left."""
        for places_RB, at in self._runs(places):
            lane.device_RB[at : at + len(places_RB)].copy_(places_RB, non_blocking=True)
        if lane.stream is not None:
            self._leaving.append((lane.stream.record_event(), held))

    def _let_go(self) -> None:
        """Forget what has left."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()

    def _scatter(self, lane: _Lane, ids: Tensor) -> None:
        """The pages in a lane's staging, which is entered, into those of the pool."""
        if not len(ids):
            return
        if lane.stream is not None and self._sent is not None:
            # They may have been sent by the other lane.
            lane.stream.wait_event(self._sent)
        self.pool_PB.index_copy_(0, ids, lane.pages_RE[: len(ids)])

    def _number(self, pages: Sequence[int], ids: Tensor) -> None:
        """Page numbers on the device, all at once: a small copy between large ones of another stream would wait for both."""
        numbers = np.asarray(pages, dtype=np.int64)
        bad = numbers[(numbers < 0) | (numbers >= len(self.pool_PB))]
        if len(bad):
            raise ValueError(f"page {bad[0]} is outside the pool of {len(self.pool_PB)} pages")
        if self._sent is not None:
            self._sent.synchronize()
        host_ids = self._host_ids[: len(numbers)]
        host_ids.numpy()[:] = numbers
        ids.copy_(host_ids, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device))

    @contextmanager
    def _lanes(self) -> Iterator[Iterator[_Lane]]:
        """Lanes in turn, behind the current stream's work; what follows there is behind theirs."""
        streams = [lane.stream for lane in self.lanes if lane.stream is not None]
        if streams:
            current = torch.cuda.current_stream(self.device)
            before = current.record_event()
        for stream in streams:
            stream.wait_event(before)
        try:
            yield cycle(self.lanes)
        finally:
            for stream in streams:
                current.wait_stream(stream)
