"""Index selection by the native library: float32 scores summed channel by channel, exact top-k with the tie rule.

A score's last bits differ from the reference's (another order of sums), so choices agree wherever the margin between the
k-th and the next score exceeds rounding. Shapes as in `ref.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.index_select.ref import Selection, select_ref
from kvist.kernels.native import f32, i64, native_or_none, reference_runs, refuse_gradients, threads


def select_cpu(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
) -> Selection:
    """See `select`. bfloat16 runs the reference, whose rounding after every step is the release's meaning."""
    native = native_or_none()
    if native is None or q_NJI.dtype is not torch.float32:
        if native is not None:
            reference_runs("index_select", str(q_NJI.dtype))
        return select_ref(
            q_NJI, weight_NJ, keys_MI, visible_N, k=k, block_size=block_size, pool_NB=pool_NB, publish_blocks=publish_blocks
        )
    refuse_gradients(q_NJI, weight_NJ, keys_MI)
    q, weight, keys, visible = f32(q_NJI), f32(weight_NJ), f32(keys_MI), i64(visible_N)
    pool = None if pool_NB is None else i64(pool_NB)
    n, heads, width = q.shape
    topk_NK = torch.empty(n, k, dtype=torch.int64)
    blocks_NB = torch.empty(n, publish_blocks, dtype=torch.int64) if publish_blocks else None
    native.kvist_select(
        q.data_ptr(),
        weight.data_ptr(),
        keys.data_ptr(),
        visible.data_ptr(),
        0 if pool is None else pool.data_ptr(),
        topk_NK.data_ptr(),
        0 if blocks_NB is None else blocks_NB.data_ptr(),
        n,
        heads,
        width,
        keys.shape[0],
        k,
        block_size,
        0 if pool is None else pool.shape[1],
        publish_blocks,
        threads(),
    )
    return Selection(topk_NK, blocks_NB)
