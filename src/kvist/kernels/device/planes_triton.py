"""Packed cache rows as the GPU kernels read them: E2M1 and E4M3 bytes to bfloat16 tiles, without tables and without rounding.

A row's channels are kept as two planes, even and odd: a byte holds one of each, so nothing is interleaved. Every value times its
group scale is exact in bfloat16. Owns formats only; must not know attention, scores or pages. Imported only where Triton runs.

Shapes: N rows, B channel pairs, G groups of a row. `PLAIN`: no inline assembly and float32 tiles that hold bfloat16 values
(Triton's interpreter has neither assembly nor bfloat16 products).
"""

# ruff: noqa: RET505 (Triton compiles what follows an `if` of constants unless it is an `else`)
from __future__ import annotations

import triton
import triton.language as tl

# Bytes spread to one a half word; the low nibbles' sign to bit 15, magnitude to exponent and mantissa, where a code reads as
# code * 2^-126 (subnormals included); then two exact products. (0x7E80 is 2^126.)
_FP4_ASM = tl.constexpr("""{
.reg .b32 y, z, t, u, c;
mov.b32 c, 0x7E807E80;
prmt.b32 y, $4, 0, 0x1404;
prmt.b32 z, $4, 0, 0x3424;
shl.b32 t, y, 4;
shr.b32 u, y, 2;
and.b32 t, t, 0x80008000;
and.b32 u, u, 0x01C001C0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $0, t, $5;
shl.b32 t, z, 4;
shr.b32 u, z, 2;
and.b32 t, t, 0x80008000;
and.b32 u, u, 0x01C001C0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $1, t, $6;
shr.b32 u, y, 6;
and.b32 t, y, 0x80008000;
and.b32 u, u, 0x01C001C0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $2, t, $5;
shr.b32 u, z, 6;
and.b32 t, z, 0x80008000;
and.b32 u, u, 0x01C001C0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $3, t, $6;
}""")

# Two codes a half word, the even channel low. An E4M3 code's bits read as code * 2^-120. (0x7B80 is 2^120.)
_FP8_ASM = tl.constexpr("""{
.reg .b32 t, u, c;
mov.b32 c, 0x7B807B80;
shl.b32 t, $2, 8;
shl.b32 u, $2, 4;
and.b32 t, t, 0x80008000;
and.b32 u, u, 0x07F007F0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $0, t, $3;
shr.b32 u, $2, 4;
and.b32 t, $2, 0x80008000;
and.b32 u, u, 0x07F007F0;
or.b32 t, t, u;
mul.rn.bf16x2 t, t, c;
mul.rn.bf16x2 $1, t, $3;
}""")


@triton.jit
def e4m3_scale(byte):
    """E4M3 scale bytes -> float32, 0x7F and 0xFF NaN."""
    code = byte.to(tl.int32)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    # 2^120 in one float32 product: the bits read as scale * 2^-120.
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0_scale(byte):
    """E8M0 scale bytes -> float32 powers of two, 255 NaN, 0 the subnormal 2^-127."""
    code = byte.to(tl.int32)
    edge = tl.where((code == 0) | (code == 255), 1 << 22, 0)
    return ((code << 23) | edge).to(tl.float32, bitcast=True)


@triton.jit
def _spread(scale, N: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """[N,G] -> [N,B], each group's scale at all its pairs."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [N, G, B // G]), [N, B])


@triton.jit
def fp4_planes(code, scale, N: tl.constexpr, B: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr):
    """E2M1 bytes uint8 [N,B] and scales float32 [N,G] -> even and odd channels [N,B] (bfloat16; `PLAIN`: float32)."""
    if PLAIN:
        wide = code.to(tl.int32)
        factor = _spread(scale, N, B, G)
        even = ((wide & 7) << 22) | ((wide & 8) << 28)
        odd = ((wide & 0x70) << 18) | ((wide & 0x80) << 24)
        # 2^126: the bits read as code * 2^-126.
        return (
            even.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor,
            odd.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor,
        )
    else:
        return tl.inline_asm_elementwise(
            _FP4_ASM, "=r,=r,=r,=r,r,r,r", [code, _spread(scale.to(tl.bfloat16), N, B, G)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def fp8_planes(pair, scale, N: tl.constexpr, B: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr):
    """Pairs of E4M3 codes int16 [N,B] and scales float32 [N,G] -> even and odd channels [N,B]."""
    if PLAIN:
        wide = pair.to(tl.int32)
        factor = _spread(scale, N, B, G)
        even = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        odd = ((wide & 0x7F00) << 12) | ((wide & 0x8000) << 16)
        return (
            even.to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor,
            odd.to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor,
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8_ASM, "=r,=r,r,r", [pair, _spread(scale.to(tl.bfloat16), N, B, G)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def value_planes(base, at, mask, WIDE: tl.constexpr, PLAIN: tl.constexpr):
    """Even and odd channels of unpacked values: pair number `at` of `base`, float32 (`WIDE`) or bfloat16 as int32 pairs."""
    if WIDE:
        even = tl.load(base + 2 * at, mask=mask, other=0.0)
        odd = tl.load(base + 2 * at + 1, mask=mask, other=0.0)
        return even, odd
    else:
        pair = tl.load(base + at, mask=mask, other=0)
        even, odd = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
        if not PLAIN:
            even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
        return even, odd


@triton.jit
def rounded(x):
    """float32 rounded to the nearest bfloat16, ties to even, kept as float32 (NaN stays NaN)."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, near.to(tl.float32, bitcast=True), x)


@triton.jit
def store_pairs(base, at, even, odd, mask, WIDE: tl.constexpr):
    """Write float32 even and odd channels as values at pair number `at`: float32, or two bfloat16 in an int32."""
    if WIDE:
        tl.store(base + 2 * at, even, mask=mask)
        tl.store(base + 2 * at + 1, odd, mask=mask)
    else:
        low = (rounded(even).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        tl.store(base + at, low | (rounded(odd).to(tl.int32, bitcast=True) & -65536), mask=mask)
