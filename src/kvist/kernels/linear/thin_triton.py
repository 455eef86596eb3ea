"""A few rows times a plain bfloat16 weight on a GPU, where a library's product is mostly launches: compressors, index weights.

Programs own 32 outputs and a part of the inputs; the last part to arrive adds all in their order, so bits never depend on timing.
Must not know layers. Shapes: N rows, I inputs, O outputs, T rows a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.arrivals import arrivals
from kvist.kernels.device.gpu import begin, early, let_next, operand, rounded

PLAIN = interpreted()
MOST_ROWS = 16
"""More rows are a library's."""
BLOCK, STEP, PROGRAMS = 32, 256, 660
"""Outputs a program owns, inputs it multiplies at a time, programs to aim for."""


@triton.jit
def _thin(x, weight, out, parts, arrived, N_ROWS, size, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, B: tl.constexpr,
          STEP: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    o, t = block * B + tl.arange(0, B), tl.arange(0, T)
    known, alive = o < R, t < N_ROWS
    first = part * STEPS * STEP + tl.arange(0, STEP)
    # The weight does not wait for what was launched before.
    held = tl.load(weight + o.to(tl.int64)[:, None] * K + first[None, :], mask=known[:, None], other=0.0)
    begin(PLAIN)
    let_next(PLAIN)
    acc = tl.zeros([B, T], tl.float32)
    for step in tl.static_range(STEPS):
        k = first + step * STEP
        row = tl.load(x + t[None, :] * K + k[:, None], mask=alive[None, :], other=0.0)
        if step > 0:
            held = tl.load(weight + o.to(tl.int64)[:, None] * K + k[None, :], mask=known[:, None], other=0.0)
        acc = tl.dot(operand(held, PLAIN), operand(row, PLAIN), acc)
    inside = known[:, None] & alive[None, :]
    place = t[None, :] * R + o[:, None]
    mine = SPLITS == 1
    if SPLITS > 1:
        tl.store(parts + part * size + place, acc, mask=inside)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        tl.debug_barrier()
        mine = before == SPLITS - 1
        if mine:
            acc = tl.zeros([B, T], tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(parts + other * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(arrived + block, 0)
    if mine:
        if out.dtype.element_ty == tl.float32:
            tl.store(out + place, acc, mask=inside)
        else:
            tl.store(out + place, rounded(acc, PLAIN).to(out.dtype.element_ty), mask=inside)


def thin_fits(x_NI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `thin_gpu` takes these sizes."""
    inputs = weight_OI.shape[1]
    return 0 < len(x_NI) <= MOST_ROWS and (inputs % STEP == 0 or inputs in (64, 128))


def thin_gpu(x_NI: Tensor, weight_OI: Tensor, *, wide: bool, forked: bool = False) -> Tensor:
    """bfloat16 rows [N,I] and weight [O,I] -> [N,O]: float32 sums as they are (`wide`) or rounded once to bfloat16.

    Only where `thin_fits`. Calls with one weight must follow one another. `forked`: the stream waits for another one, which a
    launch before its turn would not. Raises GpuUnavailable, or ValueError for other dtypes.
    """
    require_gpu()
    require_bfloat16("linear", x_NI, weight_OI)
    (n, inputs), outputs, device = x_NI.shape, len(weight_OI), x_NI.device
    step = min(STEP, inputs)
    steps, blocks = inputs // step, triton.cdiv(outputs, BLOCK)
    splits = max(part for part in range(1, steps + 1) if steps % part == 0 and part <= max(1, PROGRAMS // blocks))
    out = torch.empty(n, outputs, dtype=torch.float32 if wide else torch.bfloat16, device=device)
    parts = torch.empty(splits * n * outputs if splits > 1 else 0, dtype=torch.float32, device=device)
    _thin[(blocks, splits)](
        x_NI.contiguous(), weight_OI, out, parts, arrivals(weight_OI, blocks), n, n * outputs, K=inputs, R=outputs, T=MOST_ROWS,
        B=BLOCK, STEP=step, SPLITS=splits, STEPS=steps // splits, PLAIN=PLAIN, num_warps=4, **early(PLAIN or forked),
    )  # fmt: skip
    return out
