"""Window entries moved on a GPU: one launch, a program an entry.

Must not know layers. Shapes: K entries, C codes and G scales of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import require_gpu


@triton.jit
def _move(
    codes, scales, source, to_codes, to_scales, target, C: tl.constexpr, CP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr
):
    k = tl.program_id(0)
    at, to = tl.load(source + k).to(tl.int64), tl.load(target + k).to(tl.int64)
    c, g = tl.arange(0, CP), tl.arange(0, GP)
    code = tl.load(codes + at * C + c, mask=(c < C) & (at >= 0), other=0)
    scale = tl.load(scales + at * G + g, mask=(g < G) & (at >= 0), other=0)
    tl.store(to_codes + to * C + c, code, mask=c < C)
    tl.store(to_scales + to * G + g, scale, mask=g < G)


def move_rows_gpu(held: tuple[Tensor, Tensor], from_K: Tensor, into: tuple[Tensor, Tensor], to_K: Tensor) -> None:
    """See `move_rows`. All four tensors contiguous."""
    require_gpu()
    assert all(part.is_contiguous() for part in (*held, *into)), "entries lie one after the other"
    count, (codes, scales) = len(from_K), held
    if not count:
        return
    _move[(count,)](
        codes, scales, from_K, *into, to_K, C=codes.shape[1], CP=triton.next_power_of_2(codes.shape[1]), G=scales.shape[1],
        GP=triton.next_power_of_2(scales.shape[1]), num_warps=1,
    )  # fmt: skip
