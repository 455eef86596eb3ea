"""The router of two to eight rows in one launch on Hopper, with the norm, FP8 and coefficients that stand before it (`rows.cu`).

Scores and choices have the bits that `experts/row.py` gives a row alone. Which sizes it takes, and its launch. Knows no layers.
Shapes: N rows, D model width, E experts, K chosen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import blocks_of, counters
from kvist.kernels.hyper_connections.ref import Mix
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, MOST_WIDTH, STREAM_SOURCE, Head, StreamsCall

THREADS = 256
MOST_ROWS = 8
MOST_EXPERTS = 384
MOST_GATES = 3
MOST_CHOSEN = 16
CHOOSE_SOURCE = Path(__file__).with_name("choose.cuh")
_SHARED_BYTES = 4 * MOST_GATES * MOST_ROWS * (THREADS // 32)
_POINTERS = ("gate", "bias_text", "bias_image", "text", "ids", "weights", "scores")
_COUNTS = ("count", "experts", "chosen", "scorers", "normalise")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("streams", StreamsCall),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("temperature", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class Routed(NamedTuple):
    """Quantised rows bfloat16 [N,D], ids int64 [N,K] ascending (-1 in a row that is not finite), weights float32 [N,K], and the
    coefficients."""

    quantised_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    mix: Mix


Build = Callable[[torch.device], dict[str, Kernel]]


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernel for a card."""
    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, CHOOSE_SOURCE, Path(__file__).with_name("rows.cu"))
    return kernels(sources, (("route_rows", _SHARED_BYTES),), device.index or 0)


def fits(experts: int, k: int, width: int, blocks: int) -> bool:
    """Whether the kernel takes these sizes."""
    most = min(MOST_EXPERTS, MOST_GATES * blocks)
    return k <= min(experts, MOST_CHOSEN) and experts <= most and width <= MOST_WIDTH


def route_rows(
    head: Head, gate_ED: Tensor, bias_text_E: Tensor, bias_image_E: Tensor, text_N: Tensor, *, k: int, temperature: float,
    normalise: bool, scale: float, build: Build = built, blocks: int | None = None,
) -> Routed:  # fmt: skip
    """Norm the collapses of `head`, quantise them, and choose experts as `routing.route` does. Gate bfloat16, biases float32.

    Calls with one gate must follow one another. Raises ValueError for sizes that do not fit.
    """
    h, experts = head.passed.h_ND, len(gate_ED)
    (n, d), device = h.shape, h.device
    blocks = blocks_of(device) if blocks is None else blocks
    if not 2 <= n <= MOST_ROWS or gate_ED.shape[1] != d or not fits(experts, k, d, blocks):
        most = min(MOST_EXPERTS, MOST_GATES * blocks)
        raise ValueError(
            f"{n} rows of {d} channels, {k} of {experts} experts in {blocks} blocks; this router takes 2 to {MOST_ROWS} rows of "
            f"up to {MOST_WIDTH} channels and up to {MOST_CHOSEN} of {most} experts; use route_gpu"
        )
    mix, quantised = head.empty_mix(), torch.empty_like(h)
    ids = torch.empty(n, k, dtype=torch.int64, device=device)
    weights = torch.empty(n, k, dtype=torch.float32, device=device)
    scores = counters(gate_ED, 2 * MOST_ROWS * experts)
    tensors = (gate_ED, bias_text_E, bias_image_E, text_N, ids, weights, scores)
    scorers = min(experts, blocks)
    call = _Call(
        *(tensor.data_ptr() for tensor in tensors), head.call(mix, None, quantised), n, experts, k, scorers, int(normalise),
        temperature, scale,
    )  # fmt: skip
    build(device)["route_rows"].launch(call, scorers + n, THREADS, overlap=True)
    return Routed(quantised, ids, weights, mix)
