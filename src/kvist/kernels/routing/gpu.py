"""Routing on a GPU in one launch: projection, sqrt(softplus), bias, choice and weights.

Programs own T rows, a block of experts and a part of the inputs; the last to arrive at a row tile adds the parts in their
order and chooses, so bits never depend on timing. bfloat16 products are exact, sums float32. Must not know layers.

Shapes: N rows, D model width, E experts, K chosen, T rows a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.arrivals import arrivals
from kvist.kernels.device.gpu import operand

PLAIN = interpreted()
MOST_EXPERTS = 1024
MOST_PARTS = 16


class Cut(NamedTuple):
    """Rows a tile, experts a block, inputs a step, programs to aim for, warps, pipeline stages."""

    tile: int
    block: int
    step: int
    programs: int
    warps: int
    stages: int


FEW = Cut(16, 32, 64, 128, 8, 4)
MANY = Cut(16, 64, 64, 0, 8, 3)
FEW_ROWS = 128


@triton.jit
def _scores(logits):
    """sqrt(softplus), where log(1 + e) keeps the digits of a small e."""
    grown = tl.exp(tl.where(logits > 20.0, 20.0, logits))
    one = 1.0 + grown
    small = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.sqrt(tl.where(logits > 20.0, logits, small))


@triton.jit
def _route(x, gate, bias_text, bias_image, text, parts, ids, weights, arrived, N_ROWS, temperature, scale, D: tl.constexpr,
           E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, T: tl.constexpr, B: tl.constexpr,
           STEP: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = (tile * T + tl.arange(0, T)).to(tl.int64)
    alive = n < N_ROWS
    e = block * B + tl.arange(0, B)
    acc = tl.zeros([T, B], tl.float32)
    for step in range(STEPS):
        d = (part * STEPS + step) * STEP + tl.arange(0, STEP)
        row = tl.load(x + n[:, None] * D + d[None, :], mask=alive[:, None] & (d < D)[None, :], other=0.0)
        weight = tl.load(gate + e[None, :] * D + d[:, None], mask=(e < E)[None, :] & (d < D)[:, None], other=0.0)
        acc = tl.dot(operand(row, PLAIN), operand(weight, PLAIN), acc)
    rows = tile * T + tl.arange(0, T)
    size = tl.num_programs(0) * T * E
    tl.store(parts + part * size + rows[:, None] * E + e[None, :], acc, mask=(e < E)[None, :] & alive[:, None])
    # A release that covers the whole program's stores, then an acquire before others' stores are read.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == tl.num_programs(1) * SPLITS - 1:
        tl.store(arrived + tile, 0)
        expert = tl.arange(0, EP)[None, :]
        known = expert < E
        logits = tl.zeros([T, EP], tl.float32)
        for other in tl.static_range(SPLITS):
            logits += tl.load(parts + other * size + rows[:, None] * E + expert, mask=known & alive[:, None], other=0.0,
                              cache_modifier=".cg")  # fmt: skip
        score = _scores(logits / temperature)
        is_text = tl.load(text + n, mask=alive, other=0)[:, None] != 0
        bias = tl.where(
            is_text, tl.load(bias_text + expert, mask=known, other=0.0), tl.load(bias_image + expert, mask=known, other=0.0)
        )
        order = score + bias
        # A row with a NaN chooses nothing.
        whole = tl.max((known & (order != order)).to(tl.int32), 1, keep_dims=True) == 0
        left = known & whole & alive[:, None]
        chosen = left & (expert < 0)
        for _ in range(K):
            best = tl.max(tl.where(left, order, float("-inf")), 1, keep_dims=True)
            first = tl.min(tl.where(left & (order == best), expert, EP), 1, keep_dims=True)
            chosen = chosen | (expert == first)
            left = left & (expert != first)
        weight = tl.where(chosen, score, 0.0)
        if NORMALISE:
            weight = weight / (tl.sum(weight, 1, keep_dims=True) + 1e-20)
        slot = tl.arange(0, 16)[None, :]
        empty = (slot < K) & alive[:, None] & (whole == 0)
        tl.store(ids + n[:, None] * K + slot, tl.zeros([T, 16], tl.int64) - 1, mask=empty)
        tl.store(weights + n[:, None] * K + slot, tl.zeros([T, 16], tl.float32), mask=empty)
        place = n[:, None] * K + tl.cumsum(chosen.to(tl.int32), 1) - 1
        tl.store(ids + place, (expert + tl.zeros([T, EP], tl.int32)).to(tl.int64), mask=chosen)
        tl.store(weights + place, weight * scale, mask=chosen)


def route_gpu(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_text_E: Tensor,
    bias_image_E: Tensor,
    text_N: Tensor,
    *,
    k: int,
    temperature: float,
    normalise: bool,
    scale: float,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """See `route`. The gate must be bfloat16, as it is stored; at most 1,024 experts and 16 chosen."""
    require_gpu()
    require_bfloat16("routing", x_ND, gate_ED)
    (n, d), (experts, inputs) = x_ND.shape, gate_ED.shape
    if d != inputs:
        raise ValueError(f"rows of {d} channels for a gate of {inputs}")
    if experts > MOST_EXPERTS or k > 16 or d % 64:
        raise ValueError(
            f"{k} of {experts} experts on {d} channels; impl 'gpu' takes up to 16 of {MOST_EXPERTS} on a multiple "
            "of 64 channels, use impl 'ref'"
        )
    ids = torch.empty(n, k, dtype=torch.int64, device=x_ND.device)
    weights = torch.empty(n, k, dtype=torch.float32, device=x_ND.device)
    if not n:
        return ids, weights
    cut = (FEW if n <= FEW_ROWS else MANY) if cut is None else cut
    tiles, blocks, steps = triton.cdiv(n, cut.tile), triton.cdiv(experts, cut.block), d // cut.step
    most = max(1, cut.programs // (tiles * blocks))
    splits = max(part for part in range(1, min(most, steps, MOST_PARTS) + 1) if steps % part == 0)
    parts = torch.empty(splits * tiles * cut.tile * experts, dtype=torch.float32, device=x_ND.device)
    _route[(tiles, blocks, splits)](
        x_ND.contiguous(), gate_ED.contiguous(), bias_text_E.float(), bias_image_E.float(), text_N.contiguous(), parts, ids,
        weights, arrivals(gate_ED, tiles), n, temperature, scale, D=d, E=experts, EP=triton.next_power_of_2(experts), K=k,
        NORMALISE=normalise, T=cut.tile, B=cut.block, STEP=cut.step, SPLITS=splits, STEPS=steps // splits, PLAIN=PLAIN,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return ids, weights
