"""Hyper-connections on a GPU: leaving one sublayer and entering the next with one pass over the streams.

The first launch holds T rows and a part of the channels of all streams a program: it mixes, writes the new streams and their
collapse, and adds its part of the projection and of both sums of squares. The second adds the parts in their order: some
programs norm the collapse, which is still in L2, others make the coefficients (Sinkhorn in registers). The projection is
float32: rows are exact in bfloat16 and the weight is cut in three bfloat16 terms (24 bits). Must not know layers.

Shapes: N rows, S = 4 streams, D model width, T rows a tile, B channels a step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.gpu import begin, early, fake_fp8_groups, let_next, operand, rounded, sigmoid
from kvist.kernels.hyper_connections.hopper import finish_hopper, fits, pass_hopper, require_fit
from kvist.kernels.hyper_connections.ref import Mix

PLAIN = interpreted()
STREAMS = 4
LOGITS = 2 * STREAMS + STREAMS * STREAMS


MOST_TRITON_ROWS = 1
"""Rows up to which the Triton pass is used on Hopper: one row takes 4.6 us so and 5.9 by `pass.cu`, 2 rows 8.4 and 5.5."""


class Cut(NamedTuple):
    """Of the pass: rows a tile, channels a step, programs to aim for, warps, pipeline stages. Of the end: rows a program that
    makes coefficients, channels a program that norms.
    """

    tile: int
    step: int
    programs: int
    warps: int
    stages: int
    rows: int = 1
    channels: int = 1024


ONE = Cut(1, 64, 80, 4, 1, 1, 512)
FEW = Cut(16, 32, 320, 4, 2)
MANY = Cut(16, 32, 1024, 4, 2, 4)
FEW_ROWS = 256


@triton.jit
def _cut(x, PLAIN: tl.constexpr):
    """float32 -> its first 8 bits as a product's operand, and what is left."""
    bits = x.to(tl.int32, bitcast=True)
    head = (bits & -65536).to(tl.float32, bitcast=True)
    if PLAIN:
        return head, x - head
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - head


@triton.jit
def _weight(fn, stream, d, D):
    """One stream's channels of the weight [32,B], eight of the 32 rows zero."""
    f = tl.arange(0, 32)[:, None]
    return tl.load(fn + f * (4 * D) + stream * D + d[None, :], mask=f < 24, other=0.0)


@triton.jit
def _project(acc, x, fn, stream, d, D, T: tl.constexpr, PLAIN: tl.constexpr):
    """acc [T,32] += one stream's channels x their part of the weight [24, 4 D]; one row: acc [32,B] of products alone."""
    f = tl.arange(0, 32)
    if T == 1:
        acc += x * _weight(fn, stream, d, D)
    else:
        weight = tl.load(fn + f[None, :] * (4 * D) + stream * D + d[:, None], mask=(f < 24)[None, :], other=0.0)
        left = operand(x, PLAIN)
        # Cutting mantissas after 8 bits, three terms hold all 24, and each cut is exact.
        first, rest = _cut(weight, PLAIN)
        second, rest = _cut(rest, PLAIN)
        third, rest = _cut(rest, PLAIN)
        acc = tl.dot(left, third, acc)
        acc = tl.dot(left, second, acc)
        acc = tl.dot(left, first, acc)
    return acc


@triton.jit
def _stream(x, n, alive, stream, d, D):
    return tl.load(x + n[:, None] * (4 * D) + stream * D + d[None, :], mask=alive[:, None], other=0.0).to(tl.float32)


@triton.jit
def _column(x, n, alive, width: tl.constexpr, at: tl.constexpr):
    """One coefficient of every row, [T,1]."""
    return tl.load(x + n * width + at, mask=alive, other=0.0)[:, None]


@triton.jit
def _mixed(y, x0, x1, x2, x3, c0, c1, c2, c3, post, out, n, alive, stream, d, D, PLAIN: tl.constexpr):
    """One new stream [T,B], written and returned as bfloat16 holds it."""
    total = rounded(post * y + (c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3), PLAIN)
    tl.store(out + n[:, None] * (4 * D) + stream * D + d[None, :], total.to(out.dtype.element_ty), mask=alive[:, None])
    return total


@triton.jit
def _pick(x, f, at):
    return tl.sum(tl.where(f == at, x, 0.0), 1)


@triton.jit
def _reciprocal(x, PLAIN: tl.constexpr):
    """1 / x within a unit in the last place, for x neither tiny nor huge: one instruction where a division takes eight."""
    if PLAIN:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softmax4(a, b, c, d, eps, PLAIN: tl.constexpr):
    highest = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - highest), tl.exp(b - highest), tl.exp(c - highest), tl.exp(d - highest)
    r = _reciprocal((a + b) + (c + d), PLAIN)
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _factor(a, b, c, d, fa, fb, fc, fd, inverse, eps, PLAIN: tl.constexpr):
    """The factor of a row or column from those of the other four, and its reciprocal."""
    inverse = (a * fa + c * fc) + (b * fb + d * fd + eps * inverse)
    return _reciprocal(inverse, PLAIN), inverse


@triton.jit
def _coefficients(total, base, scale, pre, post, comb, n, alive, D, hc_eps, norm_eps, T: tl.constexpr,
                  ITERATIONS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Sums [T,32] (24 logits, squares of all streams, squares of the collapse) -> the three coefficients, written.

    A row's sixteen mixing weights live in one thread, so that balancing them costs no exchange between threads.
    """
    f = tl.arange(0, 32)[None, :]
    total = total * (1.0 / tl.sqrt(_pick(total, f, 24) / (4.0 * D) + norm_eps))[:, None]
    part = tl.where(f < 4, 0, tl.where(f < 8, 1, 2))
    logits = total * tl.load(scale + part) + tl.load(base + f, mask=f < 24, other=0.0)
    gate = sigmoid(logits)
    there, at = alive[:, None] & (f >= 0), n[:, None]
    tl.store(pre + at * 4 + f, gate + hc_eps, mask=there & (f < 4))
    tl.store(post + at * 4 + f - 4, 2.0 * gate, mask=there & (f >= 4) & (f < 8))
    p00, p01 = _pick(logits, f, 8), _pick(logits, f, 9)
    p02, p03 = _pick(logits, f, 10), _pick(logits, f, 11)
    p10, p11 = _pick(logits, f, 12), _pick(logits, f, 13)
    p12, p13 = _pick(logits, f, 14), _pick(logits, f, 15)
    p20, p21 = _pick(logits, f, 16), _pick(logits, f, 17)
    p22, p23 = _pick(logits, f, 18), _pick(logits, f, 19)
    p30, p31 = _pick(logits, f, 20), _pick(logits, f, 21)
    p32, p33 = _pick(logits, f, 22), _pick(logits, f, 23)
    p00, p01, p02, p03 = _softmax4(p00, p01, p02, p03, hc_eps, PLAIN)
    p10, p11, p12, p13 = _softmax4(p10, p11, p12, p13, hc_eps, PLAIN)
    p20, p21, p22, p23 = _softmax4(p20, p21, p22, p23, hc_eps, PLAIN)
    p30, p31, p32, p33 = _softmax4(p30, p31, p32, p33, hc_eps, PLAIN)
    # Rows and columns keep their factors u and v, and these their reciprocals r and c: an element is p u v, and dividing a row by
    # its sum and eps makes r the sum of its p v and eps r.
    one = tl.full([T], 1.0, tl.float32)
    u0, u1, u2, u3, r0, r1, r2, r3 = one, one, one, one, one, one, one, one
    v0, c0 = _factor(p00, p10, p20, p30, u0, u1, u2, u3, one, hc_eps, PLAIN)
    v1, c1 = _factor(p01, p11, p21, p31, u0, u1, u2, u3, one, hc_eps, PLAIN)
    v2, c2 = _factor(p02, p12, p22, p32, u0, u1, u2, u3, one, hc_eps, PLAIN)
    v3, c3 = _factor(p03, p13, p23, p33, u0, u1, u2, u3, one, hc_eps, PLAIN)
    for _ in range(ITERATIONS - 1):
        u0, r0 = _factor(p00, p01, p02, p03, v0, v1, v2, v3, r0, hc_eps, PLAIN)
        u1, r1 = _factor(p10, p11, p12, p13, v0, v1, v2, v3, r1, hc_eps, PLAIN)
        u2, r2 = _factor(p20, p21, p22, p23, v0, v1, v2, v3, r2, hc_eps, PLAIN)
        u3, r3 = _factor(p30, p31, p32, p33, v0, v1, v2, v3, r3, hc_eps, PLAIN)
        v0, c0 = _factor(p00, p10, p20, p30, u0, u1, u2, u3, c0, hc_eps, PLAIN)
        v1, c1 = _factor(p01, p11, p21, p31, u0, u1, u2, u3, c1, hc_eps, PLAIN)
        v2, c2 = _factor(p02, p12, p22, p32, u0, u1, u2, u3, c2, hc_eps, PLAIN)
        v3, c3 = _factor(p03, p13, p23, p33, u0, u1, u2, u3, c3, hc_eps, PLAIN)
    place = comb + n * 16
    tl.store(place + 0, p00 * u0 * v0, mask=alive)
    tl.store(place + 1, p01 * u0 * v1, mask=alive)
    tl.store(place + 2, p02 * u0 * v2, mask=alive)
    tl.store(place + 3, p03 * u0 * v3, mask=alive)
    tl.store(place + 4, p10 * u1 * v0, mask=alive)
    tl.store(place + 5, p11 * u1 * v1, mask=alive)
    tl.store(place + 6, p12 * u1 * v2, mask=alive)
    tl.store(place + 7, p13 * u1 * v3, mask=alive)
    tl.store(place + 8, p20 * u2 * v0, mask=alive)
    tl.store(place + 9, p21 * u2 * v1, mask=alive)
    tl.store(place + 10, p22 * u2 * v2, mask=alive)
    tl.store(place + 11, p23 * u2 * v3, mask=alive)
    tl.store(place + 12, p30 * u3 * v0, mask=alive)
    tl.store(place + 13, p31 * u3 * v1, mask=alive)
    tl.store(place + 14, p32 * u3 * v2, mask=alive)
    tl.store(place + 15, p33 * u3 * v3, mask=alive)


@triton.jit
def _pass(y, x, old_pre, old_post, old_comb, fn, streams, h, parts, squares, N_ROWS, D: tl.constexpr, T: tl.constexpr,
          B: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, LEAVE: tl.constexpr, ENTER: tl.constexpr,
          PLAIN: tl.constexpr):  # fmt: skip
    """Parts of tile `program 1`: streams, their collapse `h`, a part's sums: `parts` [N,SPLITS,32], `squares` [N,SPLITS]."""
    part, tile = tl.program_id(0), tl.program_id(1)
    n = (tile * T + tl.arange(0, T)).to(tl.int64)
    alive = n < N_ROWS
    AHEAD: tl.constexpr = T == 1 and ENTER and STEPS == 1
    if AHEAD:  # the only step's weights, before what comes from the launch before is waited for
        d = part * B + tl.arange(0, B)
        f0, f1, f2, f3 = _weight(fn, 0, d, D), _weight(fn, 1, d, D), _weight(fn, 2, d, D), _weight(fn, 3, d, D)
    begin(PLAIN)
    let_next(PLAIN)
    if LEAVE:
        c00, c01 = _column(old_comb, n, alive, 16, 0), _column(old_comb, n, alive, 16, 1)
        c02, c03 = _column(old_comb, n, alive, 16, 2), _column(old_comb, n, alive, 16, 3)
        c10, c11 = _column(old_comb, n, alive, 16, 4), _column(old_comb, n, alive, 16, 5)
        c12, c13 = _column(old_comb, n, alive, 16, 6), _column(old_comb, n, alive, 16, 7)
        c20, c21 = _column(old_comb, n, alive, 16, 8), _column(old_comb, n, alive, 16, 9)
        c22, c23 = _column(old_comb, n, alive, 16, 10), _column(old_comb, n, alive, 16, 11)
        c30, c31 = _column(old_comb, n, alive, 16, 12), _column(old_comb, n, alive, 16, 13)
        c32, c33 = _column(old_comb, n, alive, 16, 14), _column(old_comb, n, alive, 16, 15)
        s0, s1 = _column(old_post, n, alive, 4, 0), _column(old_post, n, alive, 4, 1)
        s2, s3 = _column(old_post, n, alive, 4, 2), _column(old_post, n, alive, 4, 3)
    if ENTER:
        p0, p1 = _column(old_pre, n, alive, 4, 0), _column(old_pre, n, alive, 4, 1)
        p2, p3 = _column(old_pre, n, alive, 4, 2), _column(old_pre, n, alive, 4, 3)
    acc = tl.zeros([32, B] if T == 1 else [T, 32], tl.float32)
    length, collapsed = tl.zeros([T, B], tl.float32), tl.zeros([T, B], tl.float32)
    for step in range(STEPS):
        d = (part * STEPS + step) * B + tl.arange(0, B)
        x0, x1 = _stream(x, n, alive, 0, d, D), _stream(x, n, alive, 1, d, D)
        x2, x3 = _stream(x, n, alive, 2, d, D), _stream(x, n, alive, 3, d, D)
        if LEAVE:
            out = tl.load(y + n[:, None] * D + d[None, :], mask=alive[:, None], other=0.0).to(tl.float32)
            z0 = _mixed(out, x0, x1, x2, x3, c00, c10, c20, c30, s0, streams, n, alive, 0, d, D, PLAIN)
            z1 = _mixed(out, x0, x1, x2, x3, c01, c11, c21, c31, s1, streams, n, alive, 1, d, D, PLAIN)
            z2 = _mixed(out, x0, x1, x2, x3, c02, c12, c22, c32, s2, streams, n, alive, 2, d, D, PLAIN)
            x3 = _mixed(out, x0, x1, x2, x3, c03, c13, c23, c33, s3, streams, n, alive, 3, d, D, PLAIN)
            x0, x1, x2 = z0, z1, z2
        if ENTER:
            one = rounded(p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3, PLAIN)
            tl.store(h + n[:, None] * D + d[None, :], one.to(h.dtype.element_ty), mask=alive[:, None])
            collapsed += one * one
            length += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
            if AHEAD:
                acc += x0 * f0 + x1 * f1 + x2 * f2 + x3 * f3
            else:
                acc = _project(acc, x0, fn, 0, d, D, T, PLAIN)
                acc = _project(acc, x1, fn, 1, d, D, T, PLAIN)
                acc = _project(acc, x2, fn, 2, d, D, T, PLAIN)
                acc = _project(acc, x3, fn, 3, d, D, T, PLAIN)
    if ENTER:
        f = tl.arange(0, 32)[None, :]
        if T == 1:
            sums = tl.sum(acc, 1)[None, :]
        else:
            sums = acc
        sums = tl.where(f == 24, tl.sum(length, 1)[:, None], sums)
        tl.store(parts + (n * SPLITS + part)[:, None] * 32 + f, sums, mask=alive[:, None])
        tl.store(squares + n * SPLITS + part, tl.sum(collapsed, 1), mask=alive)


@triton.jit
def _end(h, parts, squares, base, scale, norm, quantised, pre, post, comb, N_ROWS, hc_eps, norm_eps, D: tl.constexpr,
         SPLITS: tl.constexpr, SP: tl.constexpr, W: tl.constexpr, BLOCKS: tl.constexpr, T: tl.constexpr,
         ITERATIONS: tl.constexpr, QUANTISE: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """First cdiv(N,T) programs: coefficients of T rows. The others: the norm of W channels of a row."""
    begin(PLAIN)
    let_next(PLAIN)
    tiles = tl.cdiv(N_ROWS, T)
    if tl.program_id(0) < tiles:
        n = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
        alive = n < N_ROWS
        sums = tl.zeros([T, 32], tl.float32)
        # Many parts in one load: one after the other, each would wait for memory.
        GROUP: tl.constexpr = 256 // T if SP > 256 // T else SP
        these = tl.arange(0, GROUP)[:, None, None]
        first = parts + (n * SPLITS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        for start in tl.static_range(0, SPLITS, GROUP):
            other = start + these
            sums += tl.sum(tl.load(first + other * 32, mask=(other < SPLITS) & alive[None, :, None], other=0.0), 0)
        _coefficients(sums, base, scale, pre, post, comb, n, alive, D, hc_eps, norm_eps, T, ITERATIONS, PLAIN)
    else:
        at = tl.program_id(0) - tiles
        row, d = (at // BLOCKS).to(tl.int64), at % BLOCKS * W + tl.arange(0, W)
        part, inside = tl.arange(0, SP), d < D
        one = tl.load(h + row * D + d, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(tl.load(squares + row * SPLITS + part, mask=part < SPLITS, other=0.0), 0)
        one = rounded(one * (1.0 / tl.sqrt(total / D + norm_eps)) * weight, PLAIN)
        tl.store(h + row * D + d, one.to(h.dtype.element_ty), mask=inside)
        if QUANTISE:
            one = tl.reshape(fake_fp8_groups(tl.reshape(one, (W // 32, 32)), 1), (W,))
            tl.store(quantised + row * D + d, one.to(quantised.dtype.element_ty), mask=inside)


def cut_for(rows: int) -> Cut:
    """The cut for a number of rows."""
    return ONE if rows == 1 else FEW if rows <= FEW_ROWS else MANY


def _splits(cut: Cut, rows: int, width: int) -> tuple[int, int]:
    """Parts of the channels and steps a part."""
    steps = width // cut.step
    most = max(1, -(-cut.programs // triton.cdiv(rows, cut.tile)))
    parts = max(part for part in range(1, min(most, steps) + 1) if steps % part == 0)
    return parts, steps // parts


def _check(x_NSD: Tensor, *others: Tensor) -> None:
    require_gpu()
    require_bfloat16("hyper_connections", x_NSD, *others)
    _, s, d = x_NSD.shape
    if s != STREAMS or d % 64:
        raise ValueError(f"{s} streams of {d} channels; impl 'gpu' takes {STREAMS} streams of a multiple of 64, use impl 'ref'")


class Entered(NamedTuple):
    """The next streams, the normed input of the next sublayer, the same FP8-quantised (or None), and its coefficients."""

    x_NSD: Tensor
    h_ND: Tensor
    quantised_ND: Tensor | None
    mix: Mix


def _pass_triton(
    leave: bool, y: Tensor, x: Tensor, mix: Mix, weight: Tensor, streams: Tensor, h: Tensor, cut: Cut
) -> tuple[Tensor, Tensor, int]:
    """As `pass_hopper`."""
    n, _, d = x.shape
    splits, steps = _splits(cut, n, d)
    sums = torch.empty(n * splits * 33, dtype=torch.float32, device=x.device)
    parts, squares = sums[: n * splits * 32], sums[n * splits * 32 :]
    _pass[(splits, triton.cdiv(n, cut.tile))](
        y, x, *mix, weight, streams, h, parts, squares, n, D=d, T=cut.tile, B=cut.step, SPLITS=splits, STEPS=steps,
        LEAVE=leave, ENTER=True, PLAIN=PLAIN, num_warps=cut.warps, num_stages=cut.stages, **early(PLAIN),
    )  # fmt: skip
    return parts, squares, splits


def pass_gpu(
    y_ND: Tensor | None,
    x_NSD: Tensor,
    mix: Mix,
    fn_FX: Tensor,
    base_F: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    quantised: bool = False,
    cut: Cut | Literal["cuda"] | None = None,
) -> Entered:
    """Leave with `y_ND` and `mix` (None: the streams are the input already), then enter with `mix.pre_NS`.

    `cut` None: as measured best for the rows (more than one row on Hopper: as "cuda"); "cuda": the first launch by `pass.cu`,
    two or more rows on Hopper.
    """
    _check(x_NSD, *(() if y_ND is None else (y_ND,)))
    n, s, d = x_NSD.shape
    if fn_FX.dtype is not torch.float32 or tuple(fn_FX.shape) != (LOGITS, s * d):
        raise ValueError(f"projection {fn_FX.dtype} {list(fn_FX.shape)}; expected float32 {[LOGITS, s * d]}")
    x, device = x_NSD.contiguous(), x_NSD.device
    y = x if y_ND is None else y_ND.contiguous()
    streams = x if y_ND is None else torch.empty_like(x)
    h = torch.empty(n, d, dtype=x.dtype, device=device)
    h_quantised = torch.empty_like(h) if quantised else h
    after = Mix(*(torch.empty(n, *rest, dtype=torch.float32, device=device) for rest in ((s,), (s,), (s, s))))
    if n:
        weight, before = fn_FX.contiguous(), Mix(*(part.contiguous() for part in mix))
        by_cuda = cut == "cuda" or (cut is None and n > MOST_TRITON_ROWS and fits(x))
        cut = cut if isinstance(cut, Cut) else cut_for(n)
        if by_cuda:
            require_fit(x)
            parts, squares, splits = pass_hopper(None if y_ND is None else y, x, before, weight, streams, h)
            finish_hopper(
                h, parts, squares, splits, base_F, scale_3, norm_D, h_quantised if quantised else None, after,
                iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps,
            )  # fmt: skip
        else:
            parts, squares, splits = _pass_triton(y_ND is not None, y, x, before, weight, streams, h, cut)
            blocks = triton.cdiv(d, cut.channels)
            _end[(triton.cdiv(n, cut.rows) + n * blocks,)](
                h, parts, squares, base_F, scale_3, norm_D, h_quantised, *after, n, hc_eps, norm_eps, D=d, SPLITS=splits,
                SP=triton.next_power_of_2(splits), W=cut.channels, BLOCKS=blocks, T=cut.rows, ITERATIONS=iterations,
                QUANTISE=quantised, PLAIN=PLAIN, num_warps=4, **early(PLAIN),
            )  # fmt: skip
    return Entered(streams, h, h_quantised if quantised else None, after)


def enter_gpu(
    x_NSD: Tensor, pre_NS: Tensor, *weights: Tensor, iterations: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Mix]:
    """See `enter`."""
    fn_FX, base_F, scale_3, norm_D = weights
    mix = Mix(pre_NS, pre_NS, pre_NS)
    entered = pass_gpu(
        None, x_NSD, mix, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps
    )  # fmt: skip
    return entered.h_ND, entered.mix


def leave_gpu(y_ND: Tensor, x_NSD: Tensor, mix: Mix) -> Tensor:
    """See `leave`."""
    _check(x_NSD, y_ND)
    (n, _, d), x = x_NSD.shape, x_NSD.contiguous()
    streams = torch.empty_like(x)
    if n:
        step = 256 if d % 256 == 0 else 64
        post, comb = mix.post_NS.contiguous(), mix.comb_NSS.contiguous()
        _pass[(d // step, n)](
            y_ND.contiguous(), x, post, post, comb, post, streams, x, post, post, n, D=d, T=1, B=step, SPLITS=d // step,
            STEPS=1, LEAVE=True, ENTER=False, PLAIN=PLAIN, num_warps=2, **early(PLAIN),
        )  # fmt: skip
    return streams
