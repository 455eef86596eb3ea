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

import torch
from torch import Tensor

from kvist.cache.page_memory import PageMemory
from kvist.cache.record import Buffer

LOG = logging.getLogger(__name__)

PART_BYTES = 64 << 20
"""Bytes of a part: so long that the host's work for the next one is hidden even where processors are slow."""
FIRST_BYTES = 32 << 20
"""Bytes of a restore's first part, so that the link begins early, and is busy for as long as the host names the next."""
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

    def behind(self, event: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """`entered` behind an event of another stream."""
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)
        return self.entered()


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
        coming, first, size = iter(payloads), 0, self._first
        ids: Tensor | None = None
        with self._lanes() as lanes:
            while first < len(pages):
                wanted = min(size, len(pages) - first)
                part, places = self._owned(islice(coming, wanted))
                lane = next(lanes)
                self._send(lane, part, places)
                # The first copy is on its way before the page numbers, or work that is queued, are looked at.
                ids = self._numbers(pages) if ids is None else ids
                self._scatter(lane, ids[first : first + len(part)])
                # Of the link's time for a part, the host takes half to prepare as large a one: the next is as much larger.
                first, size = first + len(part), min(2 * size, self.part)
                if len(part) < wanted:
                    break
        # Behind the last part, as this takes a while; for places that are wanted at once see `_owned`.
        self._let_go()
        return first

    def save(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of the pool's `pages`, each in a place of `memory` of its own; returns when they are there. Raises
        MemoryError where no memory for places is left."""
        self._let_go()
        ids, first, size = self._numbers(pages), 0, self._first_saved
        places = self.memory.reserve(len(pages))
        try:
            with self._lanes() as lanes:
                while first < len(pages):
                    lane, stop = next(lanes), min(first + size, len(pages))
                    with lane.behind(self._sent):
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
        """Pages on their way into a lane's staging; their places stay taken until they have left."""
        with lane.entered():
            for places_RB, at in self._runs(places):
                lane.device_RB[at : at + len(places_RB)].copy_(places_RB, non_blocking=True)
        if lane.stream is not None:
            self._leaving.append((lane.stream.record_event(), held))

    def _let_go(self) -> None:
        """Forget what has left."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()

    def _scatter(self, lane: _Lane, ids: Tensor) -> None:
        """The pages in a lane's staging into those of the pool, behind what the current stream had to do with them."""
        if len(ids):
            with lane.behind(self._sent):
                self.pool_PB.index_copy_(0, ids, lane.pages_RE[: len(ids)])

    def _numbers(self, pages: Sequence[int]) -> Tensor:
        """Page numbers on the device, all at once: a small copy between large ones of another stream would wait for both.

        `_sent` then stands behind them and all earlier work of the current stream, which outlives both lanes' work.
        """
        if self._sent is not None:
            self._sent.synchronize()
        host_ids = self._host_ids[: len(pages)]
        numbers = host_ids.numpy()
        numbers[:] = pages
        if len(pages) and (numbers.min() < 0 or numbers.max() >= len(self.pool_PB)):
            bad = numbers[(numbers < 0) | (numbers >= len(self.pool_PB))]
            raise ValueError(f"page {bad[0]} is outside the pool of {len(self.pool_PB)} pages")
        ids = host_ids.to(self.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.device))
        return ids

    @contextmanager
    def _lanes(self) -> Iterator[Iterator[_Lane]]:
        """Lanes in turn; what follows on the current stream is behind their work."""
        try:
            yield cycle(self.lanes)
        finally:
            for lane in self.lanes:
                if lane.stream is not None:
                    torch.cuda.current_stream(self.device).wait_stream(lane.stream)
