"""The pass over the streams of two or more rows on Hopper and what follows it: when `pass.cu` and `finish.cu` can run, how they
are cut, and their launches. Must not know layers. Shapes as in `gpu.py`.
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
ROWS = 64
COLUMN_THREADS = 128
ROOM = 2
"""Channels and rows that four warps take at a time, and such columns of four warps on a multiprocessor, in one block or two."""
WIDE_ROWS = 1024
"""Rows from which two columns are one block: they read twice as much of a row at once (170 us for 180 at 4,096 rows)."""
FINISH_WARPS = 5
FINISH_RESIDENT = 3
MOST_WIDTH = 5120
SPREAD_ROWS = 512
"""Rows up to which each has a block of its own to make its coefficients."""
_FOLDER = Path(__file__).parent
_STREAM = _FOLDER.parent / "device" / "stream.cuh"
_POINTERS = ("y", "x", "pre", "post", "comb", "weight", "streams", "h", "parts", "squares")
_COUNTS = ("rows", "width", "splits", "steps")
_FINISH_POINTERS = ("h", "parts", "squares", "base", "scale", "norm", "quantised", "pre", "post", "comb")
_FINISH_COUNTS = ("rows", "width", "count", "iterations", "makers", "spread")


class _Call(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int32) for name in _COUNTS))


class _Finish(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _FINISH_POINTERS),
        *((name, ctypes.c_int32) for name in _FINISH_COUNTS),
        ("norm_eps", ctypes.c_float),
        ("hc_eps", ctypes.c_float),
    )


Build = Callable[[torch.device], dict[str, Kernel]]


def shared_bytes(columns: int) -> int:
    """Of a block: two steps of weights, three of rows."""
    return columns * (2 * 4 * 288 * 16 + 3 * 10 * COLUMN_THREADS * 16)


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernels for a card."""
    passes = tuple(
        (name + kind, shared_bytes(columns)) for name in ("leave_and_enter", "enter") for kind, columns in (("", 1), ("_wide", 2))
    )
    after = (_STREAM, _FOLDER / "collapse.cuh", _FOLDER / "finish.cu")
    index = device.index or 0
    return kernels((_STREAM, _FOLDER / "pass.cu"), passes, index) | kernels(after, (("finish", 4 * 32 * FINISH_WARPS),), index)


def fits(x_NSD: Tensor) -> bool:
    """Whether the kernel takes these streams: Hopper, more than one row, whole steps."""
    n, _, width = x_NSD.shape
    whole = width % STEP == 0 and width <= MOST_WIDTH and x_NSD.data_ptr() % 16 == 0
    hopper = x_NSD.device.type == "cuda" and torch.cuda.get_device_capability(x_NSD.device) == (9, 0)
    return hopper and not interpreted() and n > 1 and whole


def require_fit(x_NSD: Tensor) -> None:
    """Raise ValueError unless the kernel takes these streams."""
    n, _, width = x_NSD.shape
    if not fits(x_NSD):
        raise ValueError(
            f"{n} rows of {width} channels on {x_NSD.device}; the cut 'cuda' takes two or more rows of a multiple of {STEP} up "
            f"to {MOST_WIDTH} on a Hopper GPU, leave the cut out"
        )


def parts_of(rows: int, width: int, processors: int) -> tuple[int, int]:
    """Parts of the channels, and how many of them a block takes side by side.

    As many parts as there is room for at once, so that every block takes as long as its steps.
    """
    columns = 2 if rows >= WIDE_ROWS and width % (2 * STEP) == 0 else 1
    steps, room = width // (STEP * columns), max(1, ROOM // columns * processors // -(-rows // ROWS))
    return columns * max(part for part in range(1, min(room, steps) + 1) if steps % part == 0), columns


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
    splits, columns = parts_of(n, d, multiprocessors(x_NSD.device))
    sums = torch.empty(n * splits * 33, dtype=torch.float32, device=x_NSD.device)
    parts, squares = sums[: n * splits * 32], sums[n * splits * 32 :]
    tensors = (y_ND, x_NSD, *mix, _terms(fn_FX), streams, h_ND, parts, squares)
    pointers = {name: None if t is None else t.data_ptr() for name, t in zip(_POINTERS, tensors, strict=True)}
    call = _Call(**pointers, rows=n, width=d, splits=splits, steps=d // STEP // splits)
    name = ("enter" if y_ND is None else "leave_and_enter") + ("_wide" if columns == 2 else "")
    build(x_NSD.device)[name].launch(call, -(-n // ROWS) * splits // columns, COLUMN_THREADS * columns, overlap=True)
    return parts, squares, splits


def finish_hopper(
    h_ND: Tensor, parts: Tensor, squares: Tensor, splits: int, base_F: Tensor, scale_3: Tensor, norm_D: Tensor,
    quantised_ND: Tensor | None, after: Mix, *, iterations: int, hc_eps: float, norm_eps: float, build: Build = built,
) -> None:  # fmt: skip
    """Norm `h_ND` where it lies, write the same FP8-quantised if there is room for it, and the coefficients to `after`."""
    n, d = h_ND.shape
    spread = n <= SPREAD_ROWS
    makers = n if spread else -(-n // FINISH_WARPS)
    tensors = (h_ND, parts, squares, base_F, scale_3, norm_D, quantised_ND, *after)
    pointers = {name: None if t is None else t.data_ptr() for name, t in zip(_FINISH_POINTERS, tensors, strict=True)}
    call = _Finish(
        **pointers, rows=n, width=d, count=splits, iterations=iterations, makers=makers, spread=spread, norm_eps=norm_eps,
        hc_eps=hc_eps,
    )  # fmt: skip
    blocks = makers + min(n, FINISH_RESIDENT * multiprocessors(h_ND.device))
    build(h_ND.device)["finish"].launch(call, blocks, 32 * FINISH_WARPS, overlap=True)
