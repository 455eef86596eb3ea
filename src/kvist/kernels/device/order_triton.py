"""Exact choice of the k best in a program's registers: scores as ordered numbers, the k-th value found bit by bit.

Ties go to the lower index, as everywhere. Imported only where Triton runs. Must not know what is chosen.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(score, allowed):
    """float32 -> uint32 in the same order (-0 as 0), 0 where not allowed, which no score maps to."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(allowed, bits.to(tl.uint32, bitcast=True) ^ 0x80000000, 0).to(tl.uint32)


@triton.jit
def k_best(order, K: tl.constexpr):
    """Which of [L] are among the K best, first ones of equals, and the K-th value [1] (0: fewer than K)."""
    cut = tl.full([1], 0, tl.uint32)
    for step in range(32):
        trial = cut | (tl.full([1], 1, tl.uint32) << (31 - step))
        enough = tl.sum((order >= trial).to(tl.int32), 0) >= K
        cut = tl.where(enough, trial, cut)
    above = order > cut
    tied = (order == cut) & (order > 0)
    room = K - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room)), cut
