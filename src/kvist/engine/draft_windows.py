"""The draft blocks' windows, filled when somebody drafts: a plain decode step only keeps what they are computed from.

Owns the target states of the last plain steps. Must not know when drafting pays, nor how drafts are judged. Drafts never decide
an output, so neither does it when their windows are filled; they hold the same positions as if they were filled every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.engine.budget import DRAFT_ROWS
from kvist.engine.request import Job
from kvist.engine.scheduler import Piece
from kvist.model.dspark import DraftBlocks
from kvist.model.rows import Rows, Segment


class _Row(NamedTuple):
    """Whose row it was, in which of its admissions, and its position."""

    job: Job
    admitted: int
    position: int

    @property
    def lives(self) -> bool:
        """Whether the request still holds the slot that it had."""
        return self.job.slot is not None and self.job.admitted == self.admitted


class _Pass(NamedTuple):
    """Target states [N,D] each of one step and whose rows they are."""

    targets: tuple[Tensor, ...]
    rows: list[_Row]


class DraftWindows:
    """Between the decoder half and the draft blocks. `saw` after every pass, `fill` before drafting."""

    def __init__(self, blocks: DraftBlocks, memory: PagedMemory, window: int) -> None:
        self.blocks, self.memory, self.window = blocks, memory, window
        self._kept: deque[_Pass] = deque()
        self._rows = 0

    @property
    def pending(self) -> int:
        """Rows that are kept now."""
        return self._rows

    def saw(self, targets: tuple[Tensor, ...], rows: Rows, pieces: Sequence[Piece]) -> None:
        """The target states of `rows`, the decoder rows of a step's pieces.

        A step of one such row a request is kept; `window` steps later its rows are out of every draft's sight. Others, whose
        rows are many or may be taken back, are written at once.
        """
        if len(rows.segments) == len(rows.token_ids_N) == len(pieces):
            self._kept.append(_Pass(targets, [_Row(piece.job, piece.job.admitted, piece.stop - 1) for piece in pieces]))
            self._rows += len(pieces)
            if len(self._kept) > self.window:
                self._rows -= len(self._kept.popleft().rows)
            if self._rows > DRAFT_ROWS:  # many requests run: windows are filled in between, many rows at once
                self.fill()
        else:
            self.fill()
            self.blocks.observe(targets, rows, self.memory)

    def fill(self) -> None:
        """Write what was kept of requests that still run, each one's positions in order."""
        places: dict[int, list[int]] = {}
        flat = [row for kept in self._kept for row in kept.rows]
        for place, row in enumerate(flat):
            if row.lives:
                places.setdefault(row.admitted, []).append(place)
        segments, at = [], 0
        for mine in places.values():
            first = flat[mine[0]]
            assert first.job.slot is not None
            position, length = first.position, len(mine)
            segments.append(Segment(slot=first.job.slot, start=at, length=length, position=position, publish_from=position))
            at += length
        if segments:
            self._write([place for mine in places.values() for place in mine], flat, tuple(segments))
        self._kept.clear()
        self._rows = 0

    def _write(self, order: list[int], flat: list[_Row], segments: tuple[Segment, ...]) -> None:
        device = self._kept[0].targets[0].device
        order_N = torch.tensor(order, device=device)
        targets = tuple(
            torch.cat(parts).index_select(0, order_N) for parts in zip(*(kept.targets for kept in self._kept), strict=True)
        )
        rows = Rows(
            token_ids_N=torch.zeros_like(order_N),
            positions_N=torch.tensor([flat[place].position for place in order], device=device),
            text_N=torch.ones_like(order_N, dtype=torch.bool),
            segments=segments,
        )
        self.blocks.observe(targets, rows, self.memory)
