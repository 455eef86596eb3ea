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
        values = np.array(table, dtype=np.int64).reshape(-1, 5)
        self._columns = tuple(np.ascontiguousarray(column) for column in values.T)
        self.table_S5 = torch.from_numpy(values)
        self._groupings: dict[tuple[int, int], Grouping] = {}

    def grouping(self, ratio: int, ring: int) -> Grouping:
        """How this pass's groups of `ratio` tokens come together when earlier tokens lie in rings of `ring` cells."""
        if (ratio, ring) not in self._groupings:
            self._groupings[ratio, ring] = self._group(ratio, ring)
        return self._groupings[ratio, ring]

    def _group(self, ratio: int, ring: int) -> Grouping:
        slot_S, start_S, _, position_S, publish_S = self._columns
        stop_S = position_S + self._columns[2]
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
        arrays = (row_M.reshape(-1, ratio), early_E, ring_E, slot_S[of_M[::ratio]], member_M[::ratio], keep_K, cell_K)
        # Contiguous, because native code reads them by address.
        lasting = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in arrays)
        batch, early, cells, slots, positions, keep, kept = lasting
        return Grouping(batch, early, cells, slots, positions, tuple((count_S // ratio).tolist()), keep, kept)


def _ragged(first_S: Ints, count_S: Ints) -> tuple[Ints, Ints]:
    """Runs of consecutive numbers, `count` from `first` each: the run of each number and the numbers, all int64 [sum]."""
    of_M = np.repeat(np.arange(len(first_S)), count_S)
    before_S = np.cumsum(count_S) - count_S
    return of_M, np.arange(len(of_M)) - before_S[of_M] + first_S[of_M]
