"""Hyper-connections of one to eight rows on Hopper: the pass over the streams, and what later launches need to norm and mix.

`streams_row` is the whole operator's first launch (`row.cu`); norm, quantiser and coefficients are made inside the launches that
read them (`collapse.cuh`). Must not know layers. Shapes as in `gpu.py`. A row's bits are what they are alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import Parts
from kvist.kernels.hyper_connections.ref import Mix

CHANNELS = 64
THREADS = 256
MOST_WIDTH = 5120
STREAM_SOURCE = Path(__file__).parents[1] / "device" / "stream.cuh"
COLLAPSE_SOURCE = Path(__file__).with_name("collapse.cuh")
_SHARED_BYTES = 4 * CHANNELS * 4 + 8 * 24 * 4 + 10 * 4
_POINTERS = ("y", "parts", "x", "pre", "post", "comb", "weight", "streams", "h", "sums", "squares")
MOST_ROWS = 8
_COUNTS = ("count", "width", "chunks", "share")
_STREAMS = ("h", "squares", "parts", "norm", "base", "scale", "normed", "quantised", "pre", "post", "comb")


class _Call(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int32) for name in _COUNTS))


class StreamsCall(ctypes.Structure):
    """`Streams` of `collapse.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _STREAMS),
        *((name, ctypes.c_int32) for name in ("width", "count", "iterations")),
        ("norm_eps", ctypes.c_float),
        ("hc_eps", ctypes.c_float),
    )


class Passed(NamedTuple):
    """The next streams [N,S,D], their collapse [N,D] before its norm, and the sums that its norm and coefficients need."""

    x_NSD: Tensor
    h_ND: Tensor
    sums: Tensor
    squares: Tensor


class Head(NamedTuple):
    """What stands before a sublayer: a pass, base [24], scale [3], norm [D] (float32) and the numbers of both."""

    passed: Passed
    base_F: Tensor
    scale_3: Tensor
    norm_D: Tensor
    iterations: int
    hc_eps: float
    norm_eps: float

    def call(self, mix: Mix | None, normed: Tensor | None = None, quantised: Tensor | None = None) -> StreamsCall:
        """The kernels' structure: where coefficients, the normed row, and the same quantised go; none of them must be made."""
        p = self.passed
        tensors = (p.h_ND, p.squares, p.sums, self.norm_D, self.base_F, self.scale_3, normed, quantised, *(mix or (None,) * 3))
        return StreamsCall(
            *(None if t is None else t.data_ptr() for t in tensors), p.h_ND.shape[1], p.squares.shape[1], self.iterations,
            self.norm_eps, self.hc_eps,
        )  # fmt: skip

    def empty_mix(self) -> Mix:
        """Room for the coefficients."""
        (n, s, _), device = self.passed.x_NSD.shape, self.passed.h_ND.device
        pre, post, comb = torch.empty(n * s * (s + 2), dtype=torch.float32, device=device).split((n * s, n * s, n * s * s))
        return Mix(pre.view(n, s), post.view(n, s), comb.view(n, s, s))


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernel for a card."""
    sources = (STREAM_SOURCE, Path(__file__).with_name("row.cu"))
    return kernels(sources, (("streams_row", _SHARED_BYTES),), device.index or 0)


def streams_row(
    y: Tensor | Parts | None,
    x_NSD: Tensor,
    mix: Mix,
    fn_FX: Tensor | None,
    *,
    build: Callable[[torch.device], dict[str, Kernel]] = built,
) -> Passed:
    """Leave with `y` (bfloat16 [N,D], or parts of it; None: the streams are the input) and `mix`, then enter with `mix.pre_NS`.

    `fn_FX` None: only leave; the other results are then not set. Contiguous tensors; D a multiple of 64, up to 5,120.
    """
    n, s, d = x_NSD.shape
    if not 1 <= n <= MOST_ROWS or s != 4 or d % CHANNELS or d > MOST_WIDTH:
        raise ValueError(
            f"streams {list(x_NSD.shape)}; this pass takes [N, 4, D], N up to {MOST_ROWS}, "
            f"and D a multiple of {CHANNELS} up to {MOST_WIDTH}"
        )
    device, blocks = x_NSD.device, d // CHANNELS
    streams = x_NSD if y is None else torch.empty_like(x_NSD)
    h = torch.empty(n, d, dtype=x_NSD.dtype, device=device)
    both = torch.empty(33 * n * blocks, dtype=torch.float32, device=device)
    sums, squares = both[: 32 * n * blocks], both[32 * n * blocks :].view(n, blocks)
    parts = y if isinstance(y, Parts) else None
    whole = y if isinstance(y, Tensor) else None
    tensors = (whole, None if parts is None else parts.sums, x_NSD, *mix, fn_FX, streams, h, sums, squares)
    call = _Call(
        *(None if t is None else t.data_ptr() for t in tensors), n, d, *((1, 1) if parts is None else (parts.chunks, parts.share))
    )
    build(device)["streams_row"].launch(call, n * blocks, THREADS, overlap=True)
    return Passed(streams, h, sums, squares)
