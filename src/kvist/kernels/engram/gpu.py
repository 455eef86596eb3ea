"""Engram rows of new tokens, and their gates, on a GPU: hash, gather, dequantise and quantise in one launch.

Tables may lie in pinned host memory: the kernel reads them through unified addresses, so no thread of the host takes part.
Must not know layers or requests; what the numbers mean is said in `model/engram.py` (facts section 8).

Shapes: N rows, X columns (n-gram orders x heads), W channels of a table row, S streams, D model width, B tokens back, R cells.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.gpu import begin, early, fake_fp8_groups, let_next, rounded, sigmoid

PLAIN = interpreted()


class HashTables(NamedTuple):
    """One layer's hash: `multipliers` int64 [B + 1], `primes` and `offsets` int64 [X], on the device; the pad class."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


class StoredRows(NamedTuple):
    """A table as stored, on the device or pinned on the host: uint8 `codes` [rows, W] (E4M3), `scales` [rows, W/32] (E8M0)."""

    codes: Tensor
    scales: Tensor


@triton.jit
def _gather(tokens, positions, offsets_of, text, classes, history, slots, multipliers, primes, offsets, codes, scales, out, pad,
            table_rows, HEADS: tl.constexpr, BACK: tl.constexpr, CELLS: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
            PLAIN: tl.constexpr):  # fmt: skip
    """One column of one row."""
    n, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots + n).to(tl.int64), tl.load(positions + n).to(tl.int64)
    before = tl.load(offsets_of + n).to(tl.int64)
    seen = tl.load(text + n).to(tl.int32)
    mixed = tl.where(seen != 0, tl.load(classes + tl.load(tokens + n)), pad) * tl.load(multipliers)
    for back in tl.static_range(1, BACK + 1):
        # A token of the same pass, or one of an earlier pass; none before position 0.
        here, there = back <= before, (back > before) & (position >= back)
        mine = n - back
        token = tl.load(tokens + mine, mask=here, other=0)
        own = tl.load(classes + token, mask=here & (tl.load(text + mine, mask=here, other=0) != 0), other=-1)
        past = tl.load(history + slot * CELLS + (position - back + CELLS) % CELLS, mask=there, other=-1)
        held = tl.where(here, own, past)
        seen = tl.where(held >= 0, seen, 0)
        term = tl.where(seen != 0, held, pad) * tl.load(multipliers + back)
        mixed = tl.where(back <= column // HEADS + 1, mixed ^ term, mixed)
    row = (mixed % tl.load(primes + column) + tl.load(offsets + column)) % table_rows
    group, inner = tl.arange(0, W // 32)[:, None], tl.arange(0, 32)[None, :]
    code = tl.load(codes + row * W + group * 32 + inner).to(tl.int32)
    scale = tl.load(scales + row * (W // 32) + group).to(tl.int32)
    magnitude = code & 0x7F
    small = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    value = tl.where(code >= 128, -value, value) * (scale << 23).to(tl.float32, bitcast=True)
    value = rounded(fake_fp8_groups(rounded(value, PLAIN), 1), PLAIN)
    tl.store(out + (n * X + column) * W + group * 32 + inner, value.to(out.dtype.element_ty))


@triton.jit
def _keep(tokens, positions, text, classes, history, slots, CELLS: tl.constexpr, PLAIN: tl.constexpr):
    """One row."""
    n = tl.program_id(0)
    begin(PLAIN)
    let_next(PLAIN)
    seen = tl.load(text + n) != 0
    held = tl.load(classes + tl.load(tokens + n), mask=seen, other=-1)
    tl.store(history + tl.load(slots + n) * CELLS + tl.load(positions + n) % CELLS, held)


@triton.jit
def _add(x, kv, weight, text, eps, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PLAIN: tl.constexpr):
    """One stream of one row, in place."""
    n, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DP)
    inside = d < D
    mine = x + (n * S + stream) * D + d
    of_row = kv + n * (S + 1) * D + d
    value = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(of_row + stream * D, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(value * tl.load(weight + stream * D + d, mask=inside, other=0.0) * key, 0)
    own, its = tl.sum(value * value, 0) / D + eps, tl.sum(key * key, 0) / D + eps
    dot = dot * (1.0 / tl.sqrt(own)) * (1.0 / tl.sqrt(its)) * (1.0 / tl.sqrt(tl.full((), D, tl.float32)))
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = sigmoid(tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root))
    gate = tl.where(tl.load(text + n) != 0, gate, 0.0)
    memory = tl.load(of_row + S * D, mask=inside, other=0.0).to(tl.float32)
    tl.store(mine, rounded(value + gate * memory, PLAIN).to(x.dtype.element_ty), mask=inside)


def gather_rows(
    token_N: Tensor, position_N: Tensor, offset_N: Tensor, text_N: Tensor, class_V: Tensor, history_SR: Tensor, slot_N: Tensor,
    tables: HashTables, stored: StoredRows, heads: int,
) -> Tensor:  # fmt: skip
    """Quantised inputs of Engram's projection, bfloat16 [N, X*W]. Row n stands at `position_N[n]` of the request in `slot_N[n]`.

    The `offset_N[n]` rows before it are the tokens before it; those further back are read from `history_SR`: int64 classes, of
    position p in cell p % R, -1 where an image stands. `class_V` int64 classes by token id; `text_N` bool, False inside an image.
    Ids beyond the stored rows wrap around: a full table has none. Raises GpuUnavailable, or ValueError for a history that is too
    short.
    """
    require_gpu()
    n, columns, width = len(token_N), len(tables.primes), stored.codes.shape[1]
    back, cells = len(tables.multipliers) - 1, history_SR.shape[1]
    if cells < back:
        raise ValueError(f"a history of {cells} tokens a request; n-grams look {back} back")
    out = torch.empty(n, columns * width, dtype=torch.bfloat16, device=token_N.device)
    if n:
        _gather[(n, columns)](
            token_N, position_N, offset_N, text_N, class_V, history_SR, slot_N, *tables[:3], stored.codes, stored.scales, out,
            tables.pad, len(stored.codes), HEADS=heads, BACK=back, CELLS=cells, X=columns, W=width, PLAIN=PLAIN, num_warps=1,
        )  # fmt: skip
    return out


def keep_classes(
    token_N: Tensor, position_N: Tensor, text_N: Tensor, class_V: Tensor, history_SR: Tensor, slot_N: Tensor
) -> None:
    """Put rows' classes where `gather_rows` of later passes looks for them; -1 for rows inside an image. Raises GpuUnavailable.

    Rows of one slot must fit into its cells, and leave those that a `gather_rows` at the same time may read.
    """
    require_gpu()
    if len(token_N):
        _keep[(len(token_N),)](
            token_N, position_N, text_N, class_V, history_SR, slot_N, CELLS=history_SR.shape[1], PLAIN=PLAIN, num_warps=1,
            **early(PLAIN),
        )  # fmt: skip


def add_memory(x_NSD: Tensor, kv_NX: Tensor, weight_SD: Tensor, text_N: Tensor, eps: float) -> None:
    """Add to every stream, in place, what the memory says through its gate: `kv_NX` bfloat16 [N, (S+1)*D] keys, then the value.

    `weight_SD` float32 product of both norm weights; `text_N` bool: other rows' gates are closed. Raises GpuUnavailable, or
    ValueError for another dtype.
    """
    require_gpu()
    require_bfloat16("engram", x_NSD, kv_NX)
    n, s, d = x_NSD.shape
    if not x_NSD.is_contiguous() or not kv_NX.is_contiguous() or kv_NX.shape != (n, (s + 1) * d):
        raise ValueError(f"streams {list(x_NSD.shape)} and projections {list(kv_NX.shape)} must be contiguous and fit together")
    if n:
        _add[(n, s)](
            x_NSD, kv_NX, weight_SD, text_N, eps, S=s, D=d, DP=triton.next_power_of_2(d), PLAIN=PLAIN, num_warps=8,
        )  # fmt: skip
