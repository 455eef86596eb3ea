"""Index selection of a ragged batch over packed keys in pages: one native call for all requests.

The bits are those of `select(impl="cpu")` on the unpacked keys. Shapes as in `ref.py`; S segments.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvist.kernels.index_select.ref import Selection
from kvist.kernels.native import f32, i64, native_or_none, refuse_gradients, threads
from kvist.kernels.native.pages import PageSource


def select_pages(
    source: PageSource,
    segments_S5: Tensor,
    q_NJI: Tensor,
    weight_NJ: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None = None,
    publish_blocks: int = 0,
) -> Selection:
    """Pick the rows each query attends (see `select`); what a query may see follows from its position. float32 queries."""
    native = native_or_none()
    assert native is not None and q_NJI.dtype is torch.float32, "callers use the generic path otherwise"
    refuse_gradients(q_NJI, weight_NJ)
    q, weight = f32(q_NJI), f32(weight_NJ)
    pool = None if pool_NB is None else i64(pool_NB)
    n, heads, _ = q.shape
    topk_NK = torch.empty(n, k, dtype=torch.int64)
    blocks_NB = torch.empty(n, publish_blocks, dtype=torch.int64) if publish_blocks else None
    native.kvist_pages_select(
        ctypes.addressof(source),
        segments_S5.data_ptr(),
        len(segments_S5),
        q.data_ptr(),
        weight.data_ptr(),
        0 if pool is None else pool.data_ptr(),
        topk_NK.data_ptr(),
        0 if blocks_NB is None else blocks_NB.data_ptr(),
        heads,
        k,
        block_size,
        0 if pool is None else pool.shape[1],
        publish_blocks,
        threads(),
    )
    return Selection(topk_NK, blocks_NB)
