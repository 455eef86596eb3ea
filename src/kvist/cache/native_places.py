"""Where one pass's rows lie for calls that run whole layers: addresses of tables, rings and pages, and the groups it completes.

Satisfies the model's `LayerPlaces` without importing it. Must not know weights, layers' roles or scheduling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from kvist.cache.placement import Placement
from kvist.cache.rings import TailRings
from kvist.kernels.native.layer import NewGroups
from kvist.kernels.native.pages import PageSource, WindowRing


class NativePlaces:
    """Views of a memory that live as long as its placement. `block`: queries see their whole segment, nothing is kept."""

    def __init__(
        self,
        place: Placement,
        rings: Sequence[WindowRing],
        sources: Mapping[int, PageSource],
        tails: Mapping[int, TailRings],
        *,
        block: bool,
    ) -> None:
        self.segments_S5, self.block = place.table_S5, block
        self._place, self._rings, self._sources, self._tails = place, rings, sources, tails

    def ring(self, layer: int) -> int:
        """Address of a layer's window ring."""
        return ctypes.addressof(self._rings[layer])

    def source(self, source: int) -> int:
        """Address of a source's planes."""
        return ctypes.addressof(self._sources[source])

    def positions(self, source: int) -> Tensor:
        """First positions int64 [G] of the groups that this pass completes; one tensor for all sources of a ratio."""
        return self._place.grouping(*self._ratio_and_ring(source)).positions_G

    def groups(self, source: int, table: tuple[Tensor, Tensor]) -> NewGroups:
        """How they come together; `table` is the rotary table [G,P] of their positions, kept alive by the caller."""
        ratio, size = self._ratio_and_ring(source)
        plan, tail = self._place.grouping(ratio, size), self._tails.get(source)
        parts = (plan.batch_GR, plan.early_E, plan.ring_E, plan.slots_G, plan.positions_G, plan.keep_K, plan.cell_K)
        rings = (0, 0) if tail is None else (tail.kv.data_ptr(), tail.gate.data_ptr())
        return NewGroups(
            *(part.data_ptr() for part in parts),
            len(plan.positions_G),
            len(plan.early_E),
            len(plan.keep_K),
            ratio,
            *rings,
            table[0].data_ptr(),
            table[1].data_ptr(),
        )

    def _ratio_and_ring(self, source: int) -> tuple[int, int]:
        tail = self._tails.get(source)
        return self._sources[source].ratio, 0 if tail is None else tail.size
