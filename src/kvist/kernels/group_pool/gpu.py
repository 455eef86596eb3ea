"""Groups that new rows end, on a GPU, straight from rows and the raw tails of their requests: pooled and normed in one launch.

Every row is treated as if it ended a group: what a row that ends none gives means nothing. Must not know pages or layers.
Shapes: N rows, R tokens of a group, C channels, S slots, T cells of a tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_gpu
from kvist.kernels.device.gpu import begin, early, let_next, rounded

PLAIN = interpreted()


@triton.jit
def _member(new, tail, n, slot, position, before, back, channel, inside, C: tl.constexpr, CELLS: tl.constexpr):
    """Channels and gates of the token `back` before row n: a row of this call, or one that the tail holds."""
    here = inside & (back <= before)
    there = inside & (back > before)
    row = new + (n - back) * 2 * C + channel
    cell = tail + (slot * CELLS + (position - back + CELLS) % CELLS) * 2 * C + channel
    value = tl.where(back <= before, tl.load(row, mask=here, other=0.0), tl.load(cell, mask=there, other=0.0))
    gate = tl.where(back <= before, tl.load(row + C, mask=here, other=0.0), tl.load(cell + C, mask=there, other=0.0))
    return value, gate


@triton.jit
def _pool(new, tail, slots, positions, offsets, norm, out, eps, R: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
          CELLS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """One row: keep it in its cell, pool the group that it ends, norm."""
    n = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CP)
    inside = channel < C
    weight = tl.load(norm + channel, mask=inside, other=0.0)
    begin(PLAIN)
    let_next(PLAIN)
    slot, position, before = tl.load(slots + n), tl.load(positions + n), tl.load(offsets + n)
    value, gate = _member(new, tail, n, slot, position, before, 0, channel, inside, C, CELLS)
    own = tail + (slot * CELLS + position % CELLS) * 2 * C + channel
    tl.store(own, value, mask=inside)
    tl.store(own + C, gate, mask=inside)
    peak = gate
    for back in tl.static_range(1, R):
        _, other = _member(new, tail, n, slot, position, before, back, channel, inside, C, CELLS)
        peak = tl.maximum(peak, other)
    total = tl.exp(gate - peak)
    for back in tl.static_range(1, R):
        _, other = _member(new, tail, n, slot, position, before, back, channel, inside, C, CELLS)
        total += tl.exp(other - peak)
    pooled = tl.zeros([CP], tl.float32)
    for ahead in tl.static_range(R):
        value, gate = _member(new, tail, n, slot, position, before, R - 1 - ahead, channel, inside, C, CELLS)
        pooled += value * (tl.exp(gate - peak) / total)
    pooled = rounded(pooled, PLAIN)
    factor = 1.0 / tl.sqrt(tl.sum(pooled * pooled, 0) / C + eps)
    tl.store(out + n * C + channel, rounded(pooled * factor * weight, PLAIN).to(out.dtype.element_ty), mask=inside)


def pool_rows_gpu(
    new_NX: Tensor,
    tail_ST2C: Tensor,
    slot_N: Tensor,
    position_N: Tensor,
    offset_N: Tensor,
    ratio: int,
    norm: tuple[Tensor, float],
) -> Tensor:
    """Latents bfloat16 [N,C] of the groups of `ratio` tokens that the rows end, pooled and normed by (weight, eps).

    `new_NX` float32 [N,2C] channels, then gates; `tail_ST2C` float32: those of earlier tokens, of position p in cell p % T; the
    rows are put there. int64 slots, positions, and how many rows of its run stand before each. A tail must hold ratio - 1 cells
    more than a run has rows. Raises GpuUnavailable, or ValueError.
    """
    require_gpu()
    n, width = len(new_NX), new_NX.shape[1] // 2
    cells = tail_ST2C.shape[1]
    if new_NX.dtype is not torch.float32 or tail_ST2C.dtype is not torch.float32 or not tail_ST2C.is_contiguous():
        raise ValueError(f"groups are pooled in float32, got {new_NX.dtype} rows and a {tail_ST2C.dtype} tail")
    if cells < ratio:
        raise ValueError(f"a tail of {cells} cells; groups of {ratio} need {ratio} or more")
    out = torch.empty(n, width, dtype=torch.bfloat16, device=new_NX.device)
    if n:
        _pool[(n,)](
            new_NX.contiguous(), tail_ST2C, slot_N, position_N, offset_N, norm[0], out, norm[1], R=ratio, C=width,
            CP=triton.next_power_of_2(width), CELLS=cells, PLAIN=PLAIN, num_warps=4, **early(PLAIN),
        )  # fmt: skip
    return out
