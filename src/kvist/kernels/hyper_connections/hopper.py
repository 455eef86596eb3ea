"""The pass over the streams of two or more rows on Hopper and what follows it: when `pass.cu` and `finish.cu` can run, how they
are cut, and their launches. Must not know layers. Shapes as in `gpu.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
ROOM = 2
"""Channels and rows of a column of warps, and how many columns a multiprocessor has room for, in one block or two."""
FEW_ROWS = 16
"""Rows up to which a warp takes 8 of them, not 16 (6.3 us for 6.9 at 16 rows, 7.5 for 7.3 at 32)."""
WIDE_ROWS = 512
"""Rows from which two columns are one block: they read twice as much of a row at once (165 us for 177 at 4,096 rows)."""
FINISH_WARPS = 5
FINISH_RESIDENT = 3
FINISH_BYTES = 4 * 33 * 32
"""Sums of up to 32 rows."""
MOST_WIDTH = 5120
ALONE_ROWS = 256
SHARE = 8
"""Rows up to which each has a block of its own to make its coefficients, and how many share one otherwise."""
_FOLDER = Path(__file__).parent
_STREAM = _FOLDER.parent / "device" / "stream.cuh"
_POINTERS = ("y", "x", "pre", "post", "comb", "weight", "streams", "h", "parts", "squares")
_COUNTS = ("rows", "width", "splits", "steps")
_FINISH_POINTERS = ("h", "parts", "squares", "base", "scale", "norm", "quantised", "pre", "post", "comb")
_FINISH_COUNTS = ("rows", "width", "count", "iterations", "makers", "share")


class _Call(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int32) for name in _COUNTS))


class _Finish(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _FINISH_POINTERS),
        *((name, ctypes.c_int32) for name in _FINISH_COUNTS),
        ("norm_eps", ctypes.c_float),
        ("hc_eps", ctypes.c_float),
    )


class Form(NamedTuple):
    """How a launch is cut: the kernels' ending, columns and threads of a block."""

    name: str
    columns: int
    threads: int

    @property
    def shared_bytes(self) -> int:
        """Of a block: two steps of weights, three of rows."""
        return self.columns * (2 * 4 * 288 * 16 + 3 * 5 * ROWS * STEP // 8 * 16)


FEW, SOME, WIDE = Form("_few", 1, 256), Form("", 1, 128), Form("_wide", 2, 256)
KERNELS = {name + form.name: form for name in ("leave_and_enter", "enter") for form in (FEW, SOME, WIDE)}
Build = Callable[[torch.device], dict[str, Kernel]]


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernels for a card."""
    passes = tuple((name, form.shared_bytes) for name, form in KERNELS.items())
    after = (_STREAM, _FOLDER / "collapse.cuh", _FOLDER / "finish.cu")
    index = device.index or 0
    return kernels((_STREAM, _FOLDER / "pass.cu"), passes, index) | kernels(after, (("finish", FINISH_BYTES),), index)


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


def form_of(rows: int, width: int) -> Form:
    """The cut for a number of rows."""
    return FEW if rows <= FEW_ROWS else WIDE if rows >= WIDE_ROWS and width % (2 * STEP) == 0 else SOME


def parts_of(rows: int, width: int, processors: int) -> int:
    """Parts of the channels: as many as there is room for at once, so that every block takes as long as its steps."""
    columns = form_of(rows, width).columns
    steps, room = width // (STEP * columns), max(1, ROOM // columns * processors // -(-rows // ROWS))
    return columns * max(part for part in range(1, min(room, steps) + 1) if steps % part == 0)


def share_of(rows: int) -> int:
    """Rows whose coefficients a block makes."""
    return 1 if rows <= ALONE_ROWS else SHARE


def cut_weight(fn_FX: Tensor) -> Tensor:
    """float32 [24, 4 * D] -> bfloat16 [D / 32, 4 streams, 9 units, 32 lanes, 8]: three terms adding up to it, smallest first, as
    a product's left operand.

    The 72 rows are nine eights (logits 8 j to 8 j + 7, term). Lane 4 g + t has row g of an eight, channels 8 t to 8 t + 7 of 32:
    unit 2 i + h the first (h = 0) or last four of them, of eights 2 i and 2 i + 1; unit 8 both halves of the last eight.
    """
    terms, rest = [], fn_FX.contiguous()
    for _ in range(3):
        head = (rest.view(torch.int32) & -65536).view(torch.float32)
        terms.append(head)
        rest = rest - head
    # [term, j, g, stream, step, t, h, pair, channel], then [step, stream, eight, g, t, h, pair, channel]
    laid = torch.stack(terms[::-1]).unflatten(2, (4, -1, 4, 2, 2, 2)).unflatten(1, (3, 8))
    laid = laid.permute(4, 3, 1, 0, 2, 5, 6, 7, 8).flatten(2, 3)
    paired = laid[:, :, :8].unflatten(2, (4, 2)).permute(0, 1, 2, 6, 4, 5, 7, 3, 8).flatten(2, 3)
    last = laid[:, :, 8].permute(0, 1, 2, 3, 5, 4, 6).unsqueeze(2)
    return torch.cat((paired.flatten(5), last.flatten(5)), 2).flatten(3, 4).bfloat16().contiguous()


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
    form, splits = form_of(n, d), parts_of(n, d, multiprocessors(x_NSD.device))
    sums = torch.empty(n * splits * 33, dtype=torch.float32, device=x_NSD.device)
    parts, squares = sums[: n * splits * 32], sums[n * splits * 32 :]
    tensors = (y_ND, x_NSD, *mix, _terms(fn_FX), streams, h_ND, parts, squares)
    pointers = {name: None if t is None else t.data_ptr() for name, t in zip(_POINTERS, tensors, strict=True)}
    call = _Call(**pointers, rows=n, width=d, splits=splits, steps=d // STEP // splits)
    kernel = build(x_NSD.device)[("enter" if y_ND is None else "leave_and_enter") + form.name]
    kernel.launch(call, -(-n // ROWS) * splits // form.columns, form.threads, overlap=True)
    return parts, squares, splits


def finish_hopper(
    h_ND: Tensor, parts: Tensor, squares: Tensor, splits: int, base_F: Tensor, scale_3: Tensor, norm_D: Tensor,
    quantised_ND: Tensor | None, after: Mix, *, iterations: int, hc_eps: float, norm_eps: float, build: Build = built,
) -> None:  # fmt: skip
    """Norm `h_ND` where it lies, write the same FP8-quantised if there is room for it, and the coefficients to `after`."""
    n, d = h_ND.shape
    share = share_of(n)
    makers = -(-n // share)
    tensors = (h_ND, parts, squares, base_F, scale_3, norm_D, quantised_ND, *after)
    pointers = {name: None if t is None else t.data_ptr() for name, t in zip(_FINISH_POINTERS, tensors, strict=True)}
    call = _Finish(
        **pointers, rows=n, width=d, count=splits, iterations=iterations, makers=makers, share=share, norm_eps=norm_eps,
        hc_eps=hc_eps,
    )  # fmt: skip
    blocks = makers + min(n, FINISH_RESIDENT * multiprocessors(h_ND.device))
    build(h_ND.device)["finish"].launch(call, blocks, 32 * FINISH_WARPS, overlap=True)
