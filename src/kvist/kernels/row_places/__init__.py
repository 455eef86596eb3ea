"""Where new rows stand, from positions and slots: window spans, ring cells, page places, rotary tables (facts sections 3, 4).

Implementations: `ref` (torch), `gpu` (Triton, one launch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.row_places.ref import GroupPlaces, RowPlaces, row_places_ref

__all__ = ["GroupPlaces", "RowPlaces", "row_places"]


def row_places(
    position_N: Tensor,
    slot_N: Tensor,
    table_ST: Tensor,
    freq_2P: Tensor,
    *,
    ratios: Sequence[int],
    window: int,
    cells: int,
    page_tokens: int,
    heads: int,
    impl: str = "ref",
) -> RowPlaces:
    """int64 [N] positions and slots -> everything that a step's operators ask of a row.

    `table_ST` int32 page tables, -1 where none is; `freq_2P` float32 frequencies of layers without rows, then of those with;
    `ratios` of the sources, ascending; `cells` of a ring; `page_tokens` of a page; `heads` of an index query. Raises ValueError
    for an unknown `impl`, GpuUnavailable where `gpu` cannot run.
    """
    run: Callable[..., RowPlaces]
    if impl == "ref":
        run = row_places_ref
    elif impl == "gpu":
        require_gpu()
        from kvist.kernels.row_places.gpu import row_places_gpu

        run = row_places_gpu
    else:
        raise ValueError(f"row_places has no impl {impl!r}; known: ref, gpu")
    return run(
        position_N, slot_N, table_ST, freq_2P, ratios=tuple(ratios), window=window, cells=cells, page_tokens=page_tokens,
        heads=heads,
    )  # fmt: skip
