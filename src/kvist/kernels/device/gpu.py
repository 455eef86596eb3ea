"""Triton pieces of several operators: exact decoding of FP4 and FP8 weights, panel products, rounding, FP8 quantising.

Every FP4 or FP8 value times its power-of-two scale is exact in bfloat16, and so are quantised activations: products lose
nothing and only float32 sums round. `PLAIN` selects arithmetic that Triton's interpreter can run (its bfloat16 truncates
and cannot be multiplied): float32 operands and no inline assembly. Must not know operators.

Shapes: a tile is [N outputs, T rows]; weights are panels of 64 outputs (`panels.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvist.kernels.device.pages import multiprocessors

FP8_RECIPROCAL = tl.constexpr(0.002232142857142857)
FP8_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
JUST_BELOW_TWO = tl.constexpr(1.9999998807907104)

# $4: two words of four codes; $5 to $8: the factors of the four runs, each for two elements. See FP4_BITS in panels.py.
_FP4_ASM = tl.constexpr("""
{
  .reg .b32 t;
  and.b32 t, $4, 0x81C081C0;  mul.bf16x2 $0, t, $5;
  shl.b32 t, $4, 3;  and.b32 t, t, 0x81C081C0;  mul.bf16x2 $1, t, $6;
  shl.b32 t, $4, 6;  and.b32 t, t, 0x81C081C0;  mul.bf16x2 $2, t, $7;
  shr.u32 t, $4, 8;  and.b32 t, t, 0x006C006C;  mul.lo.u32 t, t, 1057;  and.b32 t, t, 0x81C081C0;  mul.bf16x2 $3, t, $8;
}
""")
# $2: two words of two codes; $3 $4: factors of both runs.
_FP8_ASM = tl.constexpr("""
{
  .reg .b32 t, s;
  shl.b32 t, $2, 4;  and.b32 t, t, 0x07F007F0;  shl.b32 s, $2, 8;  lop3.b32 t, s, 0x80008000, t, 0xEA;  mul.bf16x2 $0, t, $3;
  shr.u32 t, $2, 4;  and.b32 t, t, 0x07F007F0;  lop3.b32 t, $2, 0x80008000, t, 0xEA;  mul.bf16x2 $1, t, $4;
}
""")


@triton.jit
def begin(PLAIN: tl.constexpr):
    """Wait until what was launched before has ended. Every program of a kernel launched `early` passes here before it reads
    results or writes anything."""
    if not PLAIN:
        gdc_wait()


@triton.jit
def let_next(PLAIN: tl.constexpr):
    """Let the next launch come, once all programs are here; it waits for this launch's results by itself. Called after `begin`.

    Only where programs are `few`: else the next ones find multiprocessors unevenly free, and stay there.
    """
    if not PLAIN:
        gdc_launch_dependents()


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
def _factor(exponents, RUN: tl.constexpr, PLAIN: tl.constexpr):
    """Byte RUN of each word is the exponent field of a power of two."""
    if PLAIN:
        return (((exponents >> (8 * RUN)) & 255) << 23).to(tl.float32, bitcast=True)
    bits = exponents << 7 if RUN == 0 else exponents >> (8 * RUN - 7)
    return (bits & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp4_values(word, scales, PLAIN: tl.constexpr):
    """Words [N,32] of four codes and scales [N,1] -> values of the four runs. A code's bits are its value times 2^-126."""
    # Scales are at most 2^1 (128): no byte overflows into the next.
    scales += 0x7E7E7E7E
    f0, f1 = _factor(scales, 0, PLAIN), _factor(scales, 1, PLAIN)
    f2, f3 = _factor(scales, 2, PLAIN), _factor(scales, 3, PLAIN)
    if PLAIN:
        w = word.to(tl.int32)
        b0 = w & 0x81C0
        b1 = (w << 3) & 0x81C0
        b2 = (w << 6) & 0x81C0
        b3 = (((w >> 8) & 0x006C) * 1057) & 0x81C0
        return (
            (b0 << 16).to(tl.float32, bitcast=True) * f0, (b1 << 16).to(tl.float32, bitcast=True) * f1,
            (b2 << 16).to(tl.float32, bitcast=True) * f2, (b3 << 16).to(tl.float32, bitcast=True) * f3,
        )  # fmt: skip
    _, f0 = tl.broadcast(word, f0)
    _, f1 = tl.broadcast(word, f1)
    _, f2 = tl.broadcast(word, f2)
    _, f3 = tl.broadcast(word, f3)
    return tl.inline_asm_elementwise(
        _FP4_ASM, "=r,=r,=r,=r,r,r,r,r,r", [word, f0, f1, f2, f3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def fp8_values(word, f0, f1, PLAIN: tl.constexpr):
    """Words [N,32] of two codes and factors [N,1] of both runs -> values. A code's bits are its value times 2^-120."""
    if PLAIN:
        w = word.to(tl.int32)
        low = ((w << 8) & 0x8000) | ((w << 4) & 0x07F0)
        high = (w & 0x8000) | ((w >> 4) & 0x07F0)
        return (low << 16).to(tl.float32, bitcast=True) * f0, (high << 16).to(tl.float32, bitcast=True) * f1
    _, f0 = tl.broadcast(word, f0)
    _, f1 = tl.broadcast(word, f1)
    return tl.inline_asm_elementwise(
        _FP8_ASM, "=r,=r,r,r,r", [word, f0, f1], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def _rows_run(x, row, alive, begin, K: tl.constexpr, WHOLE: tl.constexpr, PLAIN: tl.constexpr):
    """Inputs begin to begin + 31 of the rows, [32,T]."""
    inner = begin + tl.arange(0, 32)
    there = alive[None, :]
    if not WHOLE:
        there = there & (inner < K)[:, None]
    return operand(tl.load(x + row[None, :] + inner[:, None], mask=there, other=0.0), PLAIN)


@triton.jit
def panel_product(acc, codes, scales, x, row, alive, first, STEPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
                  FP4: tl.constexpr, PAIRED: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """acc [N,T] += panels' outputs x rows, over STEPS chunks from `first` on.

    `codes`, `scales` point to the first panel; `x` to the first input of row 0; `row` int64 [T] are offsets of the rows,
    `alive` which of them exist.
    """
    RUNS: tl.constexpr = 4 if FP4 else 2
    CHUNKS: tl.constexpr = (K + 32 * RUNS - 1) // (32 * RUNS)
    WHOLE: tl.constexpr = K % (32 * RUNS) == 0
    n, k = tl.arange(0, N), tl.arange(0, 32)
    panel, r = n // 64, n % 64
    for step in range(STEPS):
        at = panel * CHUNKS + first + step
        begin = (first + step) * (32 * RUNS)
        word = tl.load(codes + (at * 2048 + r * 32)[:, None] + k[None, :], eviction_policy="evict_first")
        x0 = _rows_run(x, row, alive, begin, K, WHOLE, PLAIN)
        x1 = _rows_run(x, row, alive, begin + 32, K, WHOLE, PLAIN)
        if FP4:
            x2 = _rows_run(x, row, alive, begin + 64, K, WHOLE, PLAIN)
            x3 = _rows_run(x, row, alive, begin + 96, K, WHOLE, PLAIN)
            w0, w1, w2, w3 = fp4_values(word, tl.load(scales + at * 64 + r)[:, None], PLAIN)
            acc = tl.dot(w0, x0, acc)
            acc = tl.dot(w1, x1, acc)
            acc = tl.dot(w2, x2, acc)
            acc = tl.dot(w3, x3, acc)
        else:
            # Both runs of an output's block are two bytes of one word.
            part = r % 2 if PAIRED else r // 32
            pair = ((tl.load(scales + at) + 0x78787878) >> (16 * part))[:, None]
            w0, w1 = fp8_values(word, _factor(pair, 0, PLAIN), _factor(pair, 1, PLAIN), PLAIN)
            acc = tl.dot(w0, x0, acc)
            acc = tl.dot(w1, x1, acc)
    return acc


@triton.jit
def panel_values(codes, scales, at, PAIRED: tl.constexpr, PLAIN: tl.constexpr):
    """Chunk `at` of an FP8 weight -> values [64,32] of its first and its second 32 inputs."""
    n, k = tl.arange(0, 64), tl.arange(0, 32)
    word = tl.load(codes + at * 2048 + (n * 32)[:, None] + k[None, :])
    part = n % 2 if PAIRED else n // 32
    pair = ((tl.load(scales + at) + 0x78787878) >> (16 * part))[:, None]
    return fp8_values(word, _factor(pair, 0, PLAIN), _factor(pair, 1, PLAIN), PLAIN)


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
def power_reciprocal(scale):
    """Powers of two (infinity allowed) -> their exact reciprocals, 0 for infinity: a division by a scale that rounds nothing."""
    exponent = 254 - ((scale.to(tl.int32, bitcast=True) >> 23) & 255)
    return (tl.where(exponent > 0, exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fake_fp8_groups(x, AXIS: tl.constexpr):
    """float32 with groups of 32 along AXIS -> the same rounded to FP8 under its scale; a broken group becomes NaN."""
    scale = fp8_group_scale(x, AXIS)
    _, value = e4m3_steps(tl.abs(x) * power_reciprocal(scale))
    return tl.where(x < 0, -value, value) * scale


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + tl.exp(-tl.where(x < -80.0, -80.0, x)))


def early(plain: bool) -> dict[str, bool]:
    """Launch option of a kernel that calls `begin`: its programs may start before the launch before it has ended."""
    return {} if plain else {"launch_pdl": True}


def few(programs: int, device: torch.device) -> bool:
    """Whether so many programs are all on the device at once, evenly."""
    return programs <= 3 * multiprocessors(device)
