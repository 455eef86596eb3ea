"""Triton kernels of `selection.py`: the k best allowed rows of every query, and the candidate blocks it may keep.

The k-th largest score is found exactly, bit by bit, over a query's scores held in registers; ties go to the lower index, as
everywhere. Imported only where Triton runs. Must not know how scores came about.

Shapes: B sequences, T queries each, M rows, Y candidate blocks of S rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device.order_triton import k_best, ordered


@triton.jit
def _select(scores, kept, ids, T, M, Y, RATIO: tl.constexpr, K: tl.constexpr, S: tl.constexpr, MP: tl.constexpr,
            POOLED: tl.constexpr):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, MP)
    visible = (query % T + 1) // RATIO
    allowed = row < tl.minimum(visible, M)
    if POOLED:
        allowed = allowed & (tl.load(kept + query * Y + row // S, mask=allowed, other=0) != 0)
    order = ordered(tl.load(scores + query * M + row, mask=allowed, other=0.0), allowed)
    taken, _ = k_best(order, K)
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(ids + query * K + place, row, mask=taken)


@triton.jit
def _blocks(scores, kept, T, M, Y, RATIO: tl.constexpr, K: tl.constexpr, S: tl.constexpr, YP: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, YP)
    visible = tl.minimum((query % T + 1) // RATIO, M)
    row = block[:, None] * S + tl.arange(0, S)[None, :]
    highest = tl.max(tl.load(scores + query * M + row, mask=row < visible, other=float("-inf")), 1)
    # The block of the newest visible row is always kept.
    highest = tl.where(block == (visible - 1) // S, float("inf"), highest)
    taken, _ = k_best(ordered(highest, block * S < visible), K)
    tl.store(kept + query * Y + block, taken.to(tl.int8), mask=block < Y)


def select_rows(scores_BTM: Tensor, kept_BTY: Tensor | None, ratio: int, k: int, block_size: int) -> Tensor:
    """int32 [B,T,k]: ids of each query's best visible rows (inside kept blocks, if given), ascending, -1 last."""
    b, t, m = scores_BTM.shape
    ids = torch.full((b, t, k), -1, dtype=torch.int32, device=scores_BTM.device)
    _select[(b * t,)](
        scores_BTM, kept_BTY, ids, t, m, -(-m // block_size), RATIO=ratio, K=k, S=block_size,
        MP=triton.next_power_of_2(max(m, 16)), POOLED=kept_BTY is not None, num_warps=_warps(m),
    )  # fmt: skip
    return ids


def keep_blocks(scores_BTM: Tensor, ratio: int, blocks: int, block_size: int) -> Tensor:
    """int8 [B,T,Y]: 1 for the candidate blocks that a query publishes. `block_size` must be a power of two."""
    b, t, m = scores_BTM.shape
    y = -(-m // block_size)
    kept = torch.empty(b, t, y, dtype=torch.int8, device=scores_BTM.device)
    _blocks[(b * t,)](
        scores_BTM, kept, t, m, y, RATIO=ratio, K=blocks, S=block_size, YP=triton.next_power_of_2(max(y, 16)),
        num_warps=_warps(m),
    )  # fmt: skip
    return kept


def _warps(m: int) -> int:
    return 4 if m <= 4096 else 8
