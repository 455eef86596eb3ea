"""Index scores, top-k and candidate blocks (report 2.3 and 2.3.1, facts section 5). Ties: the lower index wins.

Implementations: `ref` (torch, tiles of queries), `rows` (torch, one query at a time: bits independent of the batch),
`wide` (float64 sums), `cpu` (native), `gpu` (Triton).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.index_select.cpu import select_cpu
from kvist.kernels.index_select.ref import Selection, index_scores, select_ref, select_rows, select_wide, top_rows

_RUNS: dict[str, Callable[..., Selection]] = {"ref": select_ref, "rows": select_rows, "wide": select_wide, "cpu": select_cpu}

__all__ = ["Selection", "index_scores", "select", "top_rows"]


def select(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None = None,
    publish_blocks: int = 0,
    impl: str = "ref",
) -> Selection:
    """Pick the rows each query attends.

    `q_NJI` rotated, quantised index queries; `weight_NJ` head weights; `keys_MI` index keys of one request; `visible_N`
    int64, query n may see rows [0, visible_n); `pool_NB` candidate block ids (ascending, -1 last) that restrict the
    choice; `publish_blocks` > 0 also returns that many best blocks of the visible rows, the newest one always kept.
    Returns row ids [N,k] ascending padded with -1 (a pool below k leaves -1, never a masked row), and block ids or None.
    Raises ValueError for an unknown `impl`, GpuUnavailable where `gpu` cannot run.
    """
    run = _gpu() if impl == "gpu" else _RUNS.get(impl)
    if run is None:
        raise ValueError(f"index_select has no impl {impl!r}; known: ref, rows, wide, cpu, gpu")
    return run(q_NJI, weight_NJ, keys_MI, visible_N, k=k, block_size=block_size, pool_NB=pool_NB, publish_blocks=publish_blocks)


def _gpu() -> Callable[..., Selection]:
    require_gpu()
    from kvist.kernels.index_select.gpu import select_gpu

    return select_gpu
