"""Both ends of the streams on a GPU, a launch each. Must not know layers. Shapes: N rows, S streams, D model width, V ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.gpu import begin, early, let_next, rounded

PLAIN = interpreted()
SHARE = 1024
"""Channels a program takes."""


@triton.jit
def _embed(tokens, embed, out, D, S: tl.constexpr, W: tl.constexpr, PLAIN: tl.constexpr):
    """A share of one row's channels, into every stream."""
    n, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * W + tl.arange(0, W)
    begin(PLAIN)
    let_next(PLAIN)
    value = tl.load(embed + tl.load(tokens + n) * D + d, mask=d < D, other=0.0)
    for stream in tl.static_range(S):
        tl.store(out + (n * S + stream) * D + d, value, mask=d < D)


@triton.jit
def _mean(x, out, ring, slots, positions, stride, D, S: tl.constexpr, W: tl.constexpr, CELLS: tl.constexpr,
          PLAIN: tl.constexpr):  # fmt: skip
    """A share of one row's channels, also into the row's cell of a ring if there is one."""
    n, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * W + tl.arange(0, W)
    begin(PLAIN)
    let_next(PLAIN)
    total = tl.zeros([W], tl.float32)
    for stream in tl.static_range(S):
        total += tl.load(x + (n * S + stream) * D + d, mask=d < D, other=0.0).to(tl.float32)
    mean = rounded(total / S, PLAIN).to(out.dtype.element_ty)
    tl.store(out + n * stride + d, mean, mask=d < D)
    if CELLS > 0:
        cell = tl.load(slots + n) * CELLS + tl.load(positions + n) % CELLS
        tl.store(ring + cell * stride + d, mean, mask=d < D)


def embed_streams_gpu(token_N: Tensor, embed_VD: Tensor, streams: int) -> Tensor:
    """See `embed_streams`; bfloat16."""
    require_gpu()
    require_bfloat16("streams", embed_VD)
    n, d = len(token_N), embed_VD.shape[1]
    out = torch.empty(n, streams, d, dtype=embed_VD.dtype, device=embed_VD.device)
    if n:
        _embed[(triton.cdiv(d, SHARE), n)](
            token_N.contiguous(), embed_VD, out, d, S=streams, W=SHARE, PLAIN=PLAIN, num_warps=4, **early(PLAIN)
        )
    return out


def mean_streams_gpu(
    x_NSD: Tensor, out_NX: Tensor, at: int, keep: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:  # fmt: skip
    """The means [N,D] of contiguous bfloat16 streams, written into `out_NX` from channel `at` on; returns `out_NX`.

    `keep`: a ring [slots, cells, X] that gets the same, of position p in cell p % cells, with int64 slots and positions [N].
    """
    require_gpu()
    require_bfloat16("streams", x_NSD, out_NX)
    n, s, d = x_NSD.shape
    ring, slots, positions = (out_NX, out_NX, out_NX) if keep is None else keep
    if n:
        _mean[(triton.cdiv(d, SHARE), n)](
            x_NSD.contiguous(), out_NX[:, at:], ring[..., at:], slots, positions, out_NX.stride(0), d, S=s, W=SHARE,
            CELLS=0 if keep is None else ring.shape[1], PLAIN=PLAIN, num_warps=4, **early(PLAIN),
        )  # fmt: skip
    return out_NX
