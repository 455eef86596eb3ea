"""Cache and activation quantisers on a GPU, with the norm and rotation before them: values, or rows of bytes in place.

One program a row. The bytes are those of `kvist.quant`; a group with a value that is not finite gets its format's NaN scale.
Must not know layers, pages' meaning or who reads the bytes.

Shapes: N rows, C channels, P rotated pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.gpu import (
    JUST_BELOW_TWO,
    begin,
    e4m3_steps,
    early,
    fp8_group_scale,
    let_next,
    power_reciprocal,
    rounded,
)

PLAIN = interpreted()
FORMS = {"none": 0, "fp8": 1, "mxfp4": 2, "main_fp4": 3}
GROUPS = {"fp8": 32, "mxfp4": 32, "main_fp4": 16}
MOST_WIDTH = 16384
SHARE = 1024
"""Channels a program takes of a row that is only quantised."""
MXFP4_RECIPROCAL = tl.constexpr(0.16666666666666666)
MXFP4_FLOOR_BITS = tl.constexpr(0x01C00000)  # 6 * 2^-126
MAIN_FLOOR = tl.constexpr(0.01171875)  # 6 * 2^-9


@triton.jit
def e2m1_steps(value):
    """Magnitudes -> E2M1 magnitude codes int32 and values float32: nearest, ties to even, at most 6."""
    value = tl.where(value > 6.0, 6.0, value)
    floor = tl.where(value > 1.0, value, 1.0)
    magic = (floor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 4194304.0
    shifted = value + magic
    exponent = (magic.to(tl.int32, bitcast=True) >> 23) - (127 + 22)
    return ((shifted.to(tl.int32, bitcast=True) & 7) + 2 * exponent) & 7, shifted - magic


@triton.jit
def _mxfp4_scale(x):
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    amax = tl.maximum(bits, MXFP4_FLOOR_BITS).to(tl.float32, bitcast=True)
    raised = (amax * MXFP4_RECIPROCAL) * JUST_BELOW_TWO
    return (raised.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _main_scale(x):
    """E4M3 scale codes int32 and values float32 (NaN where a group is not finite), [groups,1]."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    amax = bits.to(tl.float32, bitcast=True)
    raised = tl.where(amax > MAIN_FLOOR, amax, MAIN_FLOOR)
    quotient = tl.div_rn(raised, tl.full(raised.shape, 6.0, tl.float32))
    code, value = e4m3_steps(tl.where(quotient > 448.0, 448.0, quotient))
    broken = bits >= 0x7F800000
    return tl.where(broken, 0x7F, code), tl.where(broken, float("nan"), value)


@triton.jit
def _group(x, FORM: tl.constexpr):
    """Groups [g,group] -> codes int32 with sign, values float32, scale bytes int32 [g,1]."""
    if FORM == 1:
        scale = fp8_group_scale(x, 1)
        code, value = e4m3_steps(tl.abs(x) * power_reciprocal(scale))
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        stored = (scale.to(tl.int32, bitcast=True) >> 23) & 255
    elif FORM == 2:
        scale = _mxfp4_scale(x)
        code, value = e2m1_steps(tl.abs(x) * power_reciprocal(scale))
        sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
        stored = (scale.to(tl.int32, bitcast=True) >> 23) & 255
    else:
        stored, scale = _main_scale(x)
        code, value = e2m1_steps(tl.div_rn(tl.abs(x), tl.broadcast_to(scale, x.shape)))
        sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    bits = (value * scale).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return code | sign, bits.to(tl.float32, bitcast=True), stored


@triton.jit
def _normed(x, weight, channel, inside, C, eps, NORM: tl.constexpr, PLAIN: tl.constexpr):
    """x * rsqrt(mean x^2 + eps) * weight, rounded to bfloat16."""
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
        return rounded(x * factor * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32), PLAIN)
    return x


@triton.jit
def _row(x, weight, cos, sin, out, codes, scales, page_of, row_of, stride_x, page_codes, page_scales, eps, C: tl.constexpr,
         CP: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
         VALUES: tl.constexpr, BYTES: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
         PLAIN: tl.constexpr):  # fmt: skip
    """One row: norm, rotation of the last 2 PAIRS channels, format; values to `out` and bytes to a page's row."""
    begin(PLAIN)
    let_next(PLAIN)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CP)
    inside = channel < C
    value = tl.load(x + row * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
    value = _normed(value, weight, channel, inside, C, eps, NORM, PLAIN)
    if PAIRS > 0:
        even, odd = tl.split(tl.reshape(value, (CP // 2, 2)))
        pair = tl.arange(0, CP // 2) - (C // 2 - PAIRS)
        turning = (pair >= 0) & (pair < PAIRS)
        c = tl.load(cos + row * PAIRS + pair, mask=turning, other=1.0)
        s = tl.load(sin + row * PAIRS + pair, mask=turning, other=0.0)
        turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (CP,))
        value = tl.where(channel >= C - 2 * PAIRS, rounded(turned, PLAIN), value)
    if FORM == 0:
        tl.store(out + row * C + channel, value.to(out.dtype.element_ty), mask=inside)
    else:
        code, fake, stored = _group(tl.reshape(value, (CP // GROUP, GROUP)), FORM)
        if VALUES:
            tl.store(out + row * C + channel, rounded(tl.reshape(fake, (CP,)), PLAIN).to(out.dtype.element_ty), mask=inside)
        if BYTES:
            page, at = tl.load(page_of + row).to(tl.int64), tl.load(row_of + row).to(tl.int64)
            if page >= 0:
                group = tl.arange(0, CP // GROUP)
                tl.store(scales + page * page_scales + at * SCALE_STRIDE + group, tl.reshape(stored, (CP // GROUP,)).to(tl.uint8),
                         mask=group < C // GROUP)  # fmt: skip
                place = codes + page * page_codes + at * CODE_STRIDE
                if FORM == 1:
                    tl.store(place + channel, tl.reshape(code, (CP,)).to(tl.uint8), mask=inside)
                else:
                    low, high = tl.split(tl.reshape(code, (CP // 2, 2)))
                    half = tl.arange(0, CP // 2)
                    tl.store(place + half, (low | (high << 4)).to(tl.uint8), mask=half < C // 2)


def _check(x: Tensor, form: str) -> None:
    require_gpu()
    width, group = x.shape[-1], GROUPS.get(form, 2)
    if width % group or width < 1:
        raise ValueError(f"last dimension is {width}, not a multiple of the group size {group}; pad it with zeros")
    if width > MOST_WIDTH:
        raise ValueError(f"rows of {width} channels; impl 'gpu' takes up to {MOST_WIDTH}, use impl 'ref'")


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


def rows_gpu(
    x: Tensor,
    *,
    form: str = "none",
    norm: tuple[Tensor, float] | None = None,
    table: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """bfloat16 [..., C] -> the same shape: RMSNorm (weight, eps), rotation by (cos, sin) [N,P], then a quantiser by name."""
    width = x.shape[-1]
    if norm is None and table is None and width > SHARE and width % SHARE == 0:
        # Groups know nothing of each other: shares of a wide row are rows.
        return rows_gpu(x.reshape(-1, SHARE), form=form).view(x.shape)
    _check(x, form)
    require_bfloat16("quantise", x)
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    n, width = flat.shape
    out = torch.empty(n, width, dtype=x.dtype, device=x.device)
    if n:
        weight, eps = (out, 0.0) if norm is None else norm
        cos, sin = (out, out) if table is None else (t.contiguous() for t in table)
        _row[(n,)](
            flat, weight, cos, sin, out, out, out, out, out, flat.stride(0), 0, 0, eps, C=width,
            CP=triton.next_power_of_2(max(width, 32)), PAIRS=0 if table is None else cos.shape[1], NORM=norm is not None,
            FORM=FORMS[form], GROUP=GROUPS.get(form, 1), VALUES=True, BYTES=False, CODE_STRIDE=0, SCALE_STRIDE=0, PLAIN=PLAIN,
            num_warps=_warps(width), **early(PLAIN),
        )  # fmt: skip
    return out.view(x.shape)


def write_rows(
    x_NC: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_N: Tensor,
    row_N: Tensor,
    *,
    form: str,
    norm: tuple[Tensor, float] | None = None,
    table: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Norm, rotate and pack rows into place: `codes`, `scales` uint8 views [pages, rows, bytes], row n at [page_N[n], row_N[n]].

    `form` fp8 (window entries), main_fp4 or mxfp4 (page rows). int32 or int64 places; page -1 writes nothing. Two rows must
    not share a place. Raises ValueError for views whose rows are not C channels of that form.
    """
    _check(x_NC, form)
    require_bfloat16("write_rows", x_NC)
    n, width = x_NC.shape
    group = GROUPS[form]
    wanted = (width if form == "fp8" else width // 2, width // group)
    if (codes.shape[2], scales.shape[2]) != wanted or codes.stride(2) != 1 or scales.stride(2) != 1:
        raise ValueError(
            f"{form} rows of {width} channels take {wanted[0]} code and {wanted[1]} scale bytes, contiguous; the views hold "
            f"{codes.shape[2]} and {scales.shape[2]}"
        )
    if not n:
        return
    x_NC = x_NC if x_NC.stride(-1) == 1 else x_NC.contiguous()
    weight, eps = (x_NC, 0.0) if norm is None else norm
    cos, sin = (x_NC, x_NC) if table is None else (t.contiguous() for t in table)
    _row[(n,)](
        x_NC, weight, cos, sin, x_NC, codes, scales, page_N, row_N, x_NC.stride(0), codes.stride(0), scales.stride(0), eps,
        C=width, CP=triton.next_power_of_2(max(width, 32)), PAIRS=0 if table is None else cos.shape[1], NORM=norm is not None,
        FORM=FORMS[form], GROUP=group, VALUES=False, BYTES=True, CODE_STRIDE=codes.stride(1), SCALE_STRIDE=scales.stride(1),
        PLAIN=PLAIN, num_warps=1 if width <= 512 else _warps(width), **early(PLAIN),
    )  # fmt: skip
