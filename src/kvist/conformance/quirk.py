"""How the unmodified release decodes: an indexer whose group is incomplete scores against stale keys (facts section 5.1).

Owns that one deviation, as an explicit choice of memory for cases with `semantics: released`. The model never uses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.kernels.group_pool import Groups
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment


class ReleasedQuirkMemory(DenseMemory):
    """One request's memory with a single published slot of index keys.

    The slot keeps the keys of whichever source completed a group last, in this pass or an earlier one. Every indexer
    reads the slot, cut to the rows its own ratio lets it see. Main rows are not affected.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__(config, numerics)
        self.published: int | None = None

    def append(self, source: int, rows: Rows, groups: Groups, main_GC: Tensor, key_GI: Tensor) -> None:
        """As the reference memory does; the slot changes hands only if a group was completed."""
        if len(rows.segments) != 1:
            raise ValueError(f"the released decode is recorded for one request at a time, got {len(rows.segments)}")
        super().append(source, rows, groups, main_GC, key_GI)
        if len(key_GI):
            self.published = source

    def index_keys(self, source: int, segment: Segment) -> Tensor:
        """The published keys, zero rows behind them where a reader may look further than they reach."""
        owner = source if self.published is None else self.published
        keys_MI = super().index_keys(owner, segment)
        need = (segment.position + segment.length) // self.plan.layers[source].ratio
        lacking = max(0, need - len(keys_MI))
        return torch.cat([keys_MI, keys_MI.new_zeros(lacking, keys_MI.shape[1])])
