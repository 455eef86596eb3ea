"""Triton pieces of several operators: exact decoding of FP4 and FP8 weights, panel products, rounding, FP8 quantising.

Every FP4 or FP8 value times its power-of-two scale is exact in bfloat16, and so are quantised activations: products lose
nothing and only float32 sums round. `PLAIN` selects arithmetic that Triton's interpreter can run (its bfloat16 truncates
and cannot be multiplied): float32 operands and no inline assembly. Must not know operators.

Shapes: a tile is [N outputs, T rows]; weights are panels of 64 outputs (`panels.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_RECIPROCAL = tl.constexpr(0.002232142857142857)
FP8_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
JUST_BELOW_TWO = tl.constexpr(1.9999998807907104)

# $4: four code bytes; $5 $6: factors of the low half, $7 $8: of the high half, each for four elements.
# A byte is moved to the top of 16 bits; sign and magnitude then need a shift and two logical operations to be bfloat16 bits.
_FP4_ASM = tl.constexpr("""
{
  .reg .b32 p, q, t, s;
  prmt.b32 p, $4, 0, 0x1404;
  prmt.b32 q, $4, 0, 0x3424;
  shr.u32 t, p, 2;  and.b32 t, t, 0x01C001C0;  shl.b32 s, p, 4;  lop3.b32 t, s, 0x80008000, t, 0xEA;  mul.bf16x2 $0, t, $5;
  shr.u32 t, q, 2;  and.b32 t, t, 0x01C001C0;  shl.b32 s, q, 4;  lop3.b32 t, s, 0x80008000, t, 0xEA;  mul.bf16x2 $1, t, $6;
  shr.u32 t, p, 6;  and.b32 t, t, 0x01C001C0;  lop3.b32 t, p, 0x80008000, t, 0xEA;  mul.bf16x2 $2, t, $7;
  shr.u32 t, q, 6;  and.b32 t, t, 0x01C001C0;  lop3.b32 t, q, 0x80008000, t, 0xEA;  mul.bf16x2 $3, t, $8;
}
""")
_FP8_ASM = tl.constexpr("""
{
  .reg .b32 p, q, t;
  prmt.b32 p, $2, 0, 0x1404;
  prmt.b32 q, $2, 0, 0x3424;
  and.b32 t, p, 0x7F007F00;  shr.u32 t, t, 4;  lop3.b32 t, p, 0x80008000, t, 0xEA;  mul.bf16x2 $0, t, $3;
  and.b32 t, q, 0x7F007F00;  shr.u32 t, t, 4;  lop3.b32 t, q, 0x80008000, t, 0xEA;  mul.bf16x2 $1, t, $4;
}
""")


@triton.jit
def rounded(x, PLAIN: tl.constexpr):
    """float32 -> float32 values that bfloat16 holds, to nearest even; NaN stays NaN."""
    if PLAIN:
        bits = x.to(tl.int32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        return tl.where(x == x, (up & -65536).to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def operand(x, PLAIN: tl.constexpr):
    """A product's operand: bfloat16, or float32 of the same values."""
    if PLAIN:
        return x.to(tl.float32)
    return x.to(tl.bfloat16)


@triton.jit
def fp4_pair(byte, low_scale, high_scale, PLAIN: tl.constexpr):
    """Code bytes [N,32] and E8M0 bytes [N,1] of both halves -> values of the low and the high nibbles."""
    if PLAIN:
        word = byte.to(tl.int32)
        low = ((word & 7) << 22) | ((word & 8) << 28)
        high = ((word & 0x70) << 18) | ((word & 0x80) << 24)
        # Shifted into place, a code's bits are its value times 2^-126; the factor makes up for it.
        low_factor = ((low_scale.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
        high_factor = ((high_scale.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
        return low.to(tl.float32, bitcast=True) * low_factor, high.to(tl.float32, bitcast=True) * high_factor
    low_factor = ((low_scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    high_factor = ((high_scale.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    byte, low_factor = tl.broadcast(byte, low_factor)
    byte, high_factor = tl.broadcast(byte, high_factor)
    return tl.inline_asm_elementwise(
        _FP4_ASM, "=r,=r,=r,=r,r,r,r,r,r", [byte, low_factor, high_factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@triton.jit
def fp8_values(byte, scale, PLAIN: tl.constexpr):
    """Code bytes [N,32] and E8M0 bytes [N,1] -> values."""
    if PLAIN:
        word = byte.to(tl.int32)
        bits = ((word & 0x7F) << 20) | ((word & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * ((scale.to(tl.int32) + 120) << 23).to(tl.float32, bitcast=True)
    factor = ((scale.to(tl.int16) + 120) << 7).to(tl.bfloat16, bitcast=True)
    byte, factor = tl.broadcast(byte, factor)
    return tl.inline_asm_elementwise(
        _FP8_ASM, "=r,=r,r,r,r", [byte, factor], dtype=tl.bfloat16, is_pure=True, pack=4
    )


@triton.jit
def panel_product(acc, codes, scales, x, row, alive, FIRST: tl.constexpr, LAST: tl.constexpr, CHUNKS: tl.constexpr,
                  K: tl.constexpr, N: tl.constexpr, FP4: tl.constexpr, PAIRED: tl.constexpr, PLAIN: tl.constexpr,
                  first=0):  # fmt: skip
    """acc [N,T] += panels' outputs x rows, over chunks first + FIRST to first + LAST.

    `codes`, `scales` point to the first panel; `x` to the first input of row 0; `row` int64 [T] are offsets of the rows,
    `alive` which of them exist.
    """
    n, k = tl.arange(0, N), tl.arange(0, 32)
    panel, r = n // 64, n % 64
    part = r % 2 if PAIRED else r // 32
    for step in range(FIRST, LAST):
        chunk = first + step
        at = panel * CHUNKS + chunk
        inner = chunk * 64 + k
        there = alive[None, :]
        beyond = alive[None, :]
        if K % 64 != 0:
            there = there & (inner < K)[:, None]
            beyond = beyond & (inner + 32 < K)[:, None]
        x_low = tl.load(x + row[None, :] + inner[:, None], mask=there, other=0.0)
        x_high = tl.load(x + row[None, :] + inner[:, None] + 32, mask=beyond, other=0.0)
        if FP4:
            byte = tl.load(codes + (at * 2048 + r * 32)[:, None] + k[None, :])
            low_scale = tl.load(scales + at * 128 + r)
            high_scale = tl.load(scales + at * 128 + 64 + r)
            low, high = fp4_pair(byte, low_scale[:, None], high_scale[:, None], PLAIN)
        else:
            place = codes + (at * 4096 + r * 64)[:, None] + k[None, :]
            low = fp8_values(tl.load(place), tl.load(scales + at * 4 + part)[:, None], PLAIN)
            high = fp8_values(tl.load(place + 32), tl.load(scales + at * 4 + 2 + part)[:, None], PLAIN)
        acc = tl.dot(low, operand(x_low, PLAIN), acc)
        acc = tl.dot(high, operand(x_high, PLAIN), acc)
    return acc


@triton.jit
def e4m3_steps(value):
    """|value| up to 448 (rounded) -> E4M3 magnitude codes int32 and their values float32: nearest, ties to even."""
    floor = tl.where(value > 0.015625, value, 0.015625)
    magic = (floor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 1048576.0
    shifted = value + magic
    exponent = (magic.to(tl.int32, bitcast=True) >> 23) - (127 + 20 - 6)
    code = (shifted.to(tl.int32, bitcast=True) & 31) + 8 * exponent
    return code, shifted - magic


@triton.jit
def fp8_group_scale(x, AXIS: tl.constexpr):
    """Groups along AXIS -> power-of-two scales float32 with AXIS kept: floor 1e-4, infinity where a value is not finite."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS, keep_dims=True)
    amax = tl.maximum(bits, FP8_FLOOR_BITS).to(tl.float32, bitcast=True)
    raised = (amax * FP8_RECIPROCAL) * JUST_BELOW_TWO
    return (raised.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def fake_fp8_groups(x, AXIS: tl.constexpr):
    """float32 with groups of 32 along AXIS -> the same rounded to FP8 under its scale; a broken group becomes NaN."""
    scale = fp8_group_scale(x, AXIS)
    _, value = e4m3_steps(tl.abs(x) / scale)
    return tl.where(x < 0, -value, value) * scale


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + tl.exp(-tl.where(x < -80.0, -80.0, x)))
