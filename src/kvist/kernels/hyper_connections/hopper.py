"""The pass over the streams of two or more rows on Hopper: when `pass.cu` can run, how it is cut, and its launch.

Must not know layers. Shapes as in `gpu.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvist.kernels.device import interpreted
from kvist.kernels.device.arrivals import refuse_capture
from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.pages import multiprocessors
from kvist.kernels.hyper_connections.ref import Mix

STEP = 32
ROWS = 16
WARPS = 4
RESIDENT = 2
"""Channels and rows of a warp at a time, warps a program, programs that a multiprocessor holds."""
_SOURCE = Path(__file__).with_name("pass.cu")
_POINTERS = ("y", "x", "pre", "post", "comb", "weight", "streams", "h", "parts", "squares")
_COUNTS = ("rows", "width", "splits", "steps", "row_warps")


class _Call(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int32) for name in _COUNTS))


Build = Callable[[torch.device], dict[str, Kernel]]


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernels for a card."""
    return kernels((_SOURCE,), (("leave_and_enter", 0), ("enter", 0)), device.index or 0)


def fits(x_NSD: Tensor) -> bool:
    """Whether the kernel takes these streams: Hopper, more than one row, whole steps."""
    n, _, width = x_NSD.shape
    hopper = x_NSD.device.type == "cuda" and torch.cuda.get_device_capability(x_NSD.device) == (9, 0)
    return hopper and not interpreted() and n > 1 and width % STEP == 0 and x_NSD.data_ptr() % 16 == 0


def require_fit(x_NSD: Tensor) -> None:
    """Raise ValueError unless the kernel takes these streams."""
    n, _, width = x_NSD.shape
    if not fits(x_NSD):
        raise ValueError(
            f"{n} rows of {width} channels on {x_NSD.device}; the cut 'cuda' takes two or more rows of a multiple of {STEP} on "
            "a Hopper GPU, leave the cut out"
        )


def parts_of(rows: int, width: int, processors: int) -> tuple[int, int]:
    """Parts of the channels, and warps of a program that lie side by side in rows; the others lie so in channels.

    As many parts as there is room for at once: then every program takes as long as its steps.
    """
    steps = width // STEP
    row_warps = 1 if rows <= ROWS and steps % WARPS == 0 else WARPS
    columns, tiles = WARPS // row_warps, -(-rows // (ROWS * row_warps))
    room = max(columns, RESIDENT * processors * columns // tiles)
    return max(part for part in range(columns, min(room, steps) + 1, columns) if steps % part == 0), row_warps


def cut_weight(fn_FX: Tensor) -> Tensor:
    """float32 [24, 4 * D] -> bfloat16 [D / 32, 4, 3, 3, 32, 8]: three terms that add up to it, smallest first, in the order
    of a product's right operand (lane 4 g + t: logit g of eight, channels 8 t to 8 t + 7 of 32).
    """
    terms, rest = [], fn_FX.contiguous()
    for _ in range(3):
        head = (rest.view(torch.int32) & -65536).view(torch.float32)
        terms.append(head)
        rest = rest - head
    laid = torch.stack(terms[::-1]).unflatten(2, (4, -1, 4, 8)).unflatten(1, (3, 8))
    return laid.permute(4, 3, 1, 0, 2, 5, 6).flatten(4, 5).bfloat16().contiguous()


_cut = WeakIdKeyDictionary()


def _terms(fn_FX: Tensor) -> Tensor:
    """The weight as the kernel reads it, made once and kept as long as the weight. Raises RuntimeError if made in a capture."""
    if fn_FX not in _cut:
        refuse_capture(fn_FX.device)
        _cut[fn_FX] = cut_weight(fn_FX)
    terms = _cut[fn_FX]
    assert isinstance(terms, Tensor)
    return terms


def pass_hopper(
    y_ND: Tensor | None, x_NSD: Tensor, mix: Mix, fn_FX: Tensor, streams: Tensor, h_ND: Tensor, *, build: Build = built
) -> tuple[Tensor, Tensor, int]:
    """Contiguous tensors; writes `streams` (where y is given) and `h_ND` before its norm. Sums [N,P,32], [N,P], and P."""
    n, _, d = x_NSD.shape
    splits, row_warps = parts_of(n, d, multiprocessors(x_NSD.device))
    sums = torch.empty(n * splits * 33, dtype=torch.float32, device=x_NSD.device)
    parts, squares = sums[: n * splits * 32], sums[n * splits * 32 :]
    tensors = (y_ND, x_NSD, *mix, _terms(fn_FX), streams, h_ND, parts, squares)
    _launch("enter" if y_ND is None else "leave_and_enter", tensors, splits, row_warps, build)
    return parts, squares, splits


def _launch(name: str, tensors: tuple[Tensor | None, ...], splits: int, row_warps: int, build: Build) -> None:
    x_NSD = tensors[1]
    assert x_NSD is not None
    n, _, d = x_NSD.shape
    call = _Call(
        **{part: None if t is None else t.data_ptr() for part, t in zip(_POINTERS, tensors, strict=True)},
        rows=n, width=d, splits=splits, steps=d // STEP // splits, row_warps=row_warps,
    )  # fmt: skip
    blocks = -(-n // (ROWS * row_warps)) * (splits * row_warps // WARPS)
    build(x_NSD.device)[name].launch(call, blocks, 32 * WARPS, overlap=True)
