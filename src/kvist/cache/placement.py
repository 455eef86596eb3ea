"""Where the rows of one forward pass lie in the engine's memory: index tensors made once a pass and read by every layer.

Owns the structural view of a ragged batch (`BatchRows`): the cache takes batches from the model without importing it.
Must not know bytes, layers or weights. Shapes: N rows, S segments, G complete groups of R tokens. Design section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
FEW_ROWS = 32
"""A pass of at most so many rows is placed by Python numbers, a larger one by arrays: the same numbers."""


class BatchSegment(Protocol):
    """Consecutive rows of one request. Rows at positions below `publish_from` are replayed: they own no global rows."""

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def publish_from(self) -> int: ...


class BatchRows(Protocol):
    """A ragged batch: one segment a request, positions int64 [N]."""

    @property
    def segments(self) -> Sequence[BatchSegment]: ...
    @property
    def positions_N(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """One request's rows in a pass: batch rows [start, start + length) stand at positions [position, stop)."""

    slot: int
    start: int
    length: int
    position: int
    publish_from: int

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.position + self.length

    @property
    def rows(self) -> slice:
        """The batch rows."""
        return slice(self.start, self.start + self.length)


class Grouping(NamedTuple):
    """How the groups of one ratio that this pass completes are put together.

    `batch_GR`: batch row of each member (0 where the member came earlier); `early_E` and `ring_E`: flat member numbers that
    came earlier and the cells of the flattened tail ring that hold them; `slots_G`, `positions_G`: request and first
    position of each group; `counts`: groups a segment; `keep_K`, `cell_K`: batch rows to keep and their ring cells.
    """

    batch_GR: Tensor
    early_E: Tensor
    ring_E: Tensor
    slots_G: Tensor
    positions_G: Tensor
    counts: tuple[int, ...]
    keep_K: Tensor
    cell_K: Tensor


class Placement:
    """The spans of one pass and the index tensors that layers derive from them, each made once."""

    def __init__(self, rows: BatchRows, device: torch.device) -> None:
        self.key, self.device = rows.segments, device
        self.spans = tuple(
            Span(slot=s.slot, start=s.start, length=s.length, position=s.position, publish_from=max(s.position, s.publish_from))
            for s in rows.segments
        )
        slots = [span.slot for span in self.spans]
        assert len(set(slots)) == len(slots), f"a pass has two segments of one request: slots {slots}"
        self.total = sum(span.length for span in self.spans)
        table = [(s.slot, s.start, s.length, s.position, s.publish_from) for s in self.spans]
        self.table_S5 = torch.tensor(table, dtype=torch.int64).view(-1, 5)
        self._groupings: dict[tuple[int, int], Grouping] = {}

    def grouping(self, ratio: int, ring: int) -> Grouping:
        """How this pass's groups of `ratio` tokens come together when earlier tokens lie in rings of `ring` cells."""
        if (ratio, ring) not in self._groupings:
            self._groupings[ratio, ring] = self._group(ratio, ring)
        return self._groupings[ratio, ring]

    def _group(self, ratio: int, ring: int) -> Grouping:
        few = self.total <= FEW_ROWS
        parts: Sequence[Sequence[int]] | Sequence[Ints]
        if few:
            parts = grouped_few(self.spans, ratio, ring)
            together = torch.tensor([number for part in parts for number in part], dtype=torch.int64)
        else:
            parts = grouped_many(self.table_S5.numpy(), ratio, ring)
            together = torch.from_numpy(np.concatenate(parts))
        # One copy to the device; parts are contiguous, because native code reads them by address.
        pieces = together.to(self.device).split([len(part) for part in parts[:-1]] + [len(self.spans)])
        batch_M, early_E, ring_E, slots_G, positions_G, keep_K, cell_K, _ = pieces
        counts = tuple(int(count) for count in parts[-1])
        return Grouping(batch_M.view(-1, ratio), early_E, ring_E, slots_G, positions_G, counts, keep_K, cell_K)


def grouped_few(spans: Sequence[Span], ratio: int, ring: int) -> tuple[list[int], ...]:
    """Numbers of a `Grouping` in this order: batch row of each member, `early_E`, `ring_E`, `slots_G`, `positions_G`, `keep_K`,
    `cell_K`, `counts`. Runs of Python numbers: for the few rows of a decode step arrays cost several times as much.
    """
    batch, early, ring_cells, slots, positions, keep, cells, counts = parts = tuple(list[int]() for _ in range(8))
    for span in spans:
        first = span.publish_from // ratio * ratio
        last = max(span.stop // ratio * ratio, first)
        before = min(max(span.position - first, 0), last - first)
        row, cell = span.start - span.position, span.slot * ring
        early += range(len(batch), len(batch) + before)
        ring_cells += [cell + member % ring for member in range(first, first + before)]
        batch += [0] * before
        batch += range(first + before + row, last + row)
        counts.append((last - first) // ratio)
        slots += [span.slot] * counts[-1]
        positions += range(first, last, ratio)
        kept = range(max(span.position, span.stop - ring), span.stop)
        keep += range(kept.start + row, kept.stop + row)
        cells += [cell + member % ring for member in kept]
    return parts


def grouped_many(table_S5: Ints, ratio: int, ring: int) -> tuple[Ints, ...]:
    """The same of a segment table, for any number of rows."""
    slot_S, start_S, length_S, position_S, publish_S = table_S5.T
    stop_S = position_S + length_S
    first_S = publish_S // ratio * ratio
    count_S = np.maximum(stop_S // ratio * ratio - first_S, 0)
    of_M, member_M = _ragged(first_S, count_S)
    row_M = member_M - position_S[of_M] + start_S[of_M]
    early_E = (row_M < start_S[of_M]).nonzero()[0]
    ring_E = slot_S[of_M[early_E]] * ring + member_M[early_E] % max(ring, 1)
    row_M[early_E] = 0
    kept_S = np.maximum(position_S, stop_S - ring)
    of_K, member_K = _ragged(kept_S, stop_S - kept_S)
    keep_K = member_K - position_S[of_K] + start_S[of_K]
    cell_K = slot_S[of_K] * ring + member_K % max(ring, 1)
    return row_M, early_E, ring_E, slot_S[of_M[::ratio]], member_M[::ratio], keep_K, cell_K, count_S // ratio


def _ragged(first_S: Ints, count_S: Ints) -> tuple[Ints, Ints]:
    """Runs of consecutive numbers, `count` from `first` each: the run of each number and the numbers, all int64 [sum]."""
    of_M = np.repeat(np.arange(len(first_S)), count_S)
    before_S = np.cumsum(count_S) - count_S
    return of_M, np.arange(len(of_M)) - before_S[of_M] + first_S[of_M]
