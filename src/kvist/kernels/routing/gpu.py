"""Routing on a GPU: projection in parts, then sqrt(softplus), bias, choice and weights row by row.

Programs of the first launch own T rows, a block of experts and a part of the inputs; the second adds a row's parts in their
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
from kvist.kernels.device.gpu import begin, early, let_next, operand
from kvist.kernels.device.order_triton import ordered

PLAIN = interpreted()
MOST_EXPERTS = 1024
MOST_PARTS = 40


class Cut(NamedTuple):
    """Rows a tile, experts a block, inputs a step, programs to aim for, warps, pipeline stages."""

    tile: int
    block: int
    step: int
    programs: int
    warps: int
    stages: int


ONE = Cut(16, 32, 64, 120, 4, 4)
FEW = Cut(16, 64, 64, 240, 4, 3)
MANY = Cut(64, 128, 64, 0, 8, 4)
FEW_ROWS = 256


@triton.jit
def _scores(logits):
    """sqrt(softplus), where log(1 + e) keeps the digits of a small e."""
    grown = tl.exp(tl.where(logits > 20.0, 20.0, logits))
    one = 1.0 + grown
    small = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.sqrt(tl.where(logits > 20.0, logits, small))


@triton.jit
def _logits(x, gate, parts, N_ROWS, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
            SPLITS: tl.constexpr, STEPS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """A part of the products of T rows and B experts, into `parts` [N,SPLITS,E]."""
    part, block, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin(PLAIN)
    let_next(PLAIN)
    n = (tile * T + tl.arange(0, T)).to(tl.int64)
    alive = n < N_ROWS
    e = block * B + tl.arange(0, B)
    acc = tl.zeros([T, B], tl.float32)
    for step in range(STEPS):
        d = (part * STEPS + step) * STEP + tl.arange(0, STEP)
        row = tl.load(x + n[:, None] * D + d[None, :], mask=alive[:, None], other=0.0)
        weight = tl.load(gate + e[None, :] * D + d[:, None], mask=(e < E)[None, :], other=0.0)
        acc = tl.dot(operand(row, PLAIN), operand(weight, PLAIN), acc)
    tl.store(parts + (n * SPLITS + part)[:, None] * E + e[None, :], acc, mask=(e < E)[None, :] & alive[:, None])


@triton.jit
def _choose(parts, bias_text, bias_image, text, ids, weights, temperature, scale, E: tl.constexpr, EP: tl.constexpr,
            K: tl.constexpr, NORMALISE: tl.constexpr, SPLITS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """One row."""
    n = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    known = expert < E
    for_text = tl.load(bias_text + expert, mask=known, other=0.0)
    for_image = tl.load(bias_image + expert, mask=known, other=0.0)
    begin(PLAIN)
    let_next(PLAIN)
    bias = tl.where(tl.load(text + n) != 0, for_text, for_image)
    logits = tl.zeros([EP], tl.float32)
    for part in tl.static_range(SPLITS):
        logits += tl.load(parts + (n * SPLITS + part) * E + expert, mask=known, other=0.0)
    score = _scores(logits / temperature)
    order = score + bias
    # A row with a NaN chooses nothing.
    whole = tl.max((known & (order != order)).to(tl.int32), 0) == 0
    # Larger scores first, lower experts first among equals; 0 is nobody.
    key = (ordered(order, known & whole).to(tl.int64) << 16) | (0xFFFF - expert).to(tl.int64)
    left = tl.where(known & whole, key, 0)
    for _ in range(K):
        best = tl.max(left, 0)
        left = tl.where(left == best, 0, left)
    chosen = known & whole & (left == 0)
    weight = tl.where(chosen, score, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    slot = tl.arange(0, 16)
    empty = (slot < K) & (whole == 0)
    tl.store(ids + n * K + slot, tl.zeros([16], tl.int64) - 1, mask=empty)
    tl.store(weights + n * K + slot, tl.zeros([16], tl.float32), mask=empty)
    place = n * K + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + place, expert.to(tl.int64), mask=chosen)
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
    cut = (ONE if n == 1 else FEW if n <= FEW_ROWS else MANY) if cut is None else cut
    tiles, blocks, steps = triton.cdiv(n, cut.tile), triton.cdiv(experts, cut.block), d // cut.step
    most = max(1, cut.programs // (tiles * blocks))
    splits = max(part for part in range(1, min(most, steps, MOST_PARTS) + 1) if steps % part == 0)
    parts = torch.empty(n * splits * experts, dtype=torch.float32, device=x_ND.device)
    _logits[(splits, blocks, tiles)](
        x_ND.contiguous(), gate_ED.contiguous(), parts, n, D=d, E=experts, T=cut.tile, B=cut.block, STEP=cut.step,
        SPLITS=splits, STEPS=steps // splits, PLAIN=PLAIN, num_warps=cut.warps, num_stages=cut.stages, **early(PLAIN),
    )  # fmt: skip
    _choose[(n,)](
        parts, bias_text_E.float(), bias_image_E.float(), text_N.contiguous(), ids, weights, temperature, scale, E=experts,
        EP=triton.next_power_of_2(max(experts, 32)), K=k, NORMALISE=normalise, SPLITS=splits, PLAIN=PLAIN, num_warps=2,
        **early(PLAIN),
    )  # fmt: skip
    return ids, weights
