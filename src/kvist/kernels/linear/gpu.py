"""Rows times a stored FP8 (or FP4) weight on a GPU, by exact bfloat16 products of panels; inputs cut in parts for few rows.

Few rows: a program owns 64 outputs and a part of the inputs; the last part to arrive adds all parts in their order, so bits
never depend on timing. Many rows: wide tiles, whole inputs. So many that a bfloat16 copy of the weight pays: the copy, made for
the call, and cuBLAS. Must not know layers.

Shapes: N rows, I inputs, O outputs, G groups, T rows a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kvist.kernels.device import PanelWeight, interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.arrivals import arrivals, parts_for
from kvist.kernels.device.gpu import begin, early, few, let_next, panel_product, panel_values, rounded
from kvist.kernels.quantise import quantise

PLAIN = interpreted()
EXPANDED_ROWS = 96
"""Rows from which an FP8 weight is expanded first: 3 bytes a weight, 30 us, against products at 60% of cuBLAS's rate."""
EXPANDED_CHUNKS = 4
SHORT_INPUTS, SHORT_ROWS, SHORT_PANELS = 2048, 384, 512
"""A weight of at most so many inputs and at least so many panels is multiplied as it is up to so many rows (wq_b, us: at 144 rows
48 for 66, at 256 52 for 71)."""


class Cut(NamedTuple):
    """How a launch is cut: rows a tile, panels a program, programs at most, warps, pipeline stages."""

    tile: int
    panels: int
    programs: int
    warps: int
    stages: int


ONE = Cut(8, 2, 792, 4, 4)
FEW = Cut(16, 2, 792, 4, 4)
SOME = Cut(64, 1, 792, 4, 4)
MIDDLE = Cut(64, 2, 0, 4, 3)
MANY = Cut(256, 2, 0, 8, 3)


@triton.jit
def _product(x, codes, scales, out, parts, arrived, N_ROWS, size, K: tl.constexpr, R: tl.constexpr, GROUPS: tl.constexpr,
             T: tl.constexpr, PANELS: tl.constexpr, SPLITS: tl.constexpr, FP4: tl.constexpr,
             FEW_PROGRAMS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    N: tl.constexpr = 64 * PANELS
    CHUNKS: tl.constexpr = (K + 127) // 128 if FP4 else (K + 63) // 64
    SCALES: tl.constexpr = 64 if FP4 else 1
    STEPS: tl.constexpr = CHUNKS // SPLITS
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * T + tl.arange(0, T)
    alive = t < N_ROWS
    o = block * N + tl.arange(0, N)
    group = block * N // (R // GROUPS)
    panel = block.to(tl.int64) * PANELS * CHUNKS
    begin(PLAIN)
    if FEW_PROGRAMS:
        let_next(PLAIN)
    acc = panel_product(
        tl.zeros([N, T], tl.float32), codes + panel * 2048, scales + panel * SCALES, x + group * K,
        t.to(tl.int64) * (K * GROUPS), alive, part * STEPS, STEPS, K, N, FP4, False, PLAIN,
    )  # fmt: skip
    inside = alive[None, :] & (o < R)[:, None]
    place = t.to(tl.int64)[None, :] * R + o[:, None]
    if SPLITS == 1:
        tl.store(out + place, rounded(acc, PLAIN).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + part.to(tl.int64) * size + place, acc, mask=inside)
        # A release that covers the whole program's stores, then an acquire before others' stores are read.
        tl.debug_barrier()
        counter = arrived + block * tl.num_programs(1) + tile
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        tl.debug_barrier()
        if before == SPLITS - 1:
            total = tl.zeros([N, T], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(parts + other * size.to(tl.int64) + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + place, rounded(total, PLAIN).to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)


@triton.jit
def _expand(codes, scales, out, K: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr, PAIRED: tl.constexpr,
            PLAIN: tl.constexpr):  # fmt: skip
    """EACH chunks of an FP8 panel -> bfloat16 [R,K]."""
    panel = tl.program_id(0).to(tl.int64)
    r = panel * 64 + tl.arange(0, 64)
    k = tl.arange(0, 32)
    for step in range(EACH):
        chunk = tl.program_id(1) * EACH + step
        if chunk < CHUNKS:
            first, second = panel_values(codes, scales, panel * CHUNKS + chunk, PAIRED, PLAIN)
            d = chunk * 64 + k
            place = out + r[:, None] * K + d[None, :]
            tl.store(place, first.to(out.dtype.element_ty), mask=(r < R)[:, None] & (d < K)[None, :])
            tl.store(place + 32, second.to(out.dtype.element_ty), mask=(r < R)[:, None] & (d + 32 < K)[None, :])


def expanded(weight: PanelWeight) -> Tensor:
    """An FP8 weight's values, bfloat16 [O,I]; of a paired one gates and ups in turn."""
    if weight.form != "fp8" or weight.experts != 1:
        raise ValueError(f"{weight.experts} {weight.form} weights; one FP8 weight is expanded")
    panels, chunks = weight.codes.shape[1:3]
    out = torch.empty(weight.outputs, weight.inputs, dtype=torch.bfloat16, device=weight.codes.device)
    _expand[(panels, triton.cdiv(chunks, EXPANDED_CHUNKS))](
        weight.codes, weight.scales, out, K=weight.inputs, R=weight.outputs, CHUNKS=chunks, EACH=EXPANDED_CHUNKS,
        PAIRED=weight.paired, PLAIN=PLAIN, num_warps=4,
    )  # fmt: skip
    return out


def product_expanded(x_NX: Tensor, weight: PanelWeight, groups: int) -> Tensor:
    """Contiguous bfloat16 rows [N, G*I] -> [N,O] by cuBLAS on the expanded weight."""
    w_OI = expanded(weight)
    if groups == 1:
        return F.linear(x_NX, w_OI)
    out = torch.empty(len(x_NX), weight.outputs, dtype=x_NX.dtype, device=x_NX.device)
    # All groups at once: one alone leaves half of the card idle.
    x_GNI, w_GoI, out_GNo = x_NX.unflatten(1, (groups, -1)), w_OI.unflatten(0, (groups, -1)), out.unflatten(1, (groups, -1))
    torch.bmm(x_GNI.transpose(0, 1), w_GoI.transpose(1, 2), out=out_GNo.transpose(0, 1))
    return out


def expansion_pays(rows: int, weight: PanelWeight) -> bool:
    """Whether rows are multiplied with the weight's bfloat16 copy."""
    short = weight.inputs <= SHORT_INPUTS and weight.codes.shape[1] >= SHORT_PANELS
    return weight.form == "fp8" and rows >= (SHORT_ROWS if short else EXPANDED_ROWS)


def cut_for(rows: int, weight: PanelWeight, groups: int) -> Cut:
    """The cut for a number of rows. Programs of several panels need whole ones of them in a group."""
    cut = ONE if rows <= 8 else FEW if rows <= 16 else SOME if rows < EXPANDED_ROWS else MIDDLE if rows <= 192 else MANY
    if (weight.outputs // groups) % (64 * cut.panels) == 0:
        return cut
    return cut._replace(panels=1, warps=4)


def product_gpu(x_NX: Tensor, weight: PanelWeight, groups: int, cut: Cut) -> Tensor:
    """Contiguous bfloat16 rows [N, G*I] -> [N,O], float32 sums rounded once."""
    n, outputs, inputs = len(x_NX), weight.outputs, weight.inputs
    blocks, tiles = triton.cdiv(outputs, 64 * cut.panels), triton.cdiv(n, cut.tile)
    splits = parts_for(blocks * tiles, weight.codes.shape[2], cut.programs, x_NX.device)
    out = torch.empty(n, outputs, dtype=x_NX.dtype, device=x_NX.device)
    parts = out if splits == 1 else torch.empty(splits, n, outputs, dtype=torch.float32, device=x_NX.device)
    _product[(blocks, tiles, splits)](
        x_NX, weight.codes, weight.scales, out, parts, arrivals(weight.codes, blocks * tiles), n, n * outputs, K=inputs,
        R=outputs, GROUPS=groups, T=cut.tile, PANELS=cut.panels, SPLITS=splits, FP4=weight.form == "fp4",
        FEW_PROGRAMS=few(blocks * tiles * splits, x_NX.device), PLAIN=PLAIN,
        num_warps=cut.warps, num_stages=cut.stages, **early(PLAIN),
    )  # fmt: skip
    return out


def linear_gpu(x_NI: Tensor, w_OI: Tensor | PanelWeight, form: str | None, groups: int) -> Tensor:
    """See `linear`. A `PanelWeight` runs here; a plain bfloat16 weight is a cuBLAS product (there is nothing to decode)."""
    require_gpu()
    require_bfloat16("linear", x_NI)
    if form is not None:
        x_NI = quantise(x_NI, form, impl="gpu")
    if not isinstance(w_OI, PanelWeight):
        x_NGI, w_GOI = x_NI.unflatten(-1, (groups, -1)), w_OI.unflatten(0, (groups, -1))
        return torch.cat([F.linear(x_NGI[..., g, :], w_GOI[g]) for g in range(groups)], -1)
    if w_OI.experts != 1 or w_OI.paired:
        raise ValueError("linear takes the panels of one weight, not of experts or of a gate and an up; use experts")
    if x_NI.shape[-1] != w_OI.inputs * groups:
        raise ValueError(f"rows of {x_NI.shape[-1]} channels for a weight of {groups} x {w_OI.inputs} inputs")
    if groups > 1 and (w_OI.outputs % groups or w_OI.outputs // groups % 64):
        raise ValueError(f"{w_OI.outputs} outputs in {groups} groups: impl 'gpu' takes groups of a multiple of 64; use 'ref'")
    flat = x_NI.reshape(-1, x_NI.shape[-1]).contiguous()
    if not len(flat):
        return x_NI.new_zeros(*x_NI.shape[:-1], w_OI.outputs)
    if expansion_pays(len(flat), w_OI):
        out = product_expanded(flat, w_OI, groups)
    else:
        out = product_gpu(flat, w_OI, groups, cut_for(len(flat), w_OI, groups))
    return out.reshape(*x_NI.shape[:-1], w_OI.outputs)
