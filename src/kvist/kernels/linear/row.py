"""One row times an FP8 weight on Hopper, with what stands before the product in the same launch: norm, quantiser, sums of parts.

Which weights `row.cu` takes, how a launch is cut, and its launches. Must not know layers. Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight
from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import CODES, Parts, blocks_of, most_parts, slots_of
from kvist.kernels.hyper_connections.ref import Mix
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE, Head, StreamsCall

WARPS = 8
STAGES = 5
NEAR = 3
"""Stages that a launch fills before its inputs where these are near: what a multiprocessor asks for comes back in order."""
THREADS = 32 * WARPS
ROW_THREADS = 256
MOST_INPUTS = {"from_row": 8192, "from_row_quantised": 8192, "from_parts": 2048, "from_streams": 5120}
MOST_SHARED_BYTES = 220 << 10
PIECES_SOURCE = Path(__file__).with_name("pieces.cuh")
_POINTERS = (
    "codes", "scales", "rows", "parts", "norm", "out", "out_parts", "rank", "entry_norm", "cosines", "sines",
    "entry_codes", "entry_scales", "slot", "cell",
)  # fmt: skip
_STRIDES = ("code_slot", "code_cell", "scale_slot", "scale_cell")
_COUNTS = (
    "count", "inputs", "panels", "chunks", "share", "blocks", "groups", "in_width", "in_chunks", "in_share", "entry_width",
    "pairs", "quantise", "ahead",
)  # fmt: skip


class Call(ctypes.Structure):
    """`Call` of `pieces.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("streams", StreamsCall),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("eps", ctypes.c_float),
    )


class Entry(NamedTuple):
    """Window entries behind ranks: norm weights float32 [C], tables float32 [N,P], rings uint8 [slots,cells,bytes], int32 slots
    and int64 cells [N].
    """

    norm_C: Tensor
    cos_NP: Tensor
    sin_NP: Tensor
    codes: Tensor
    scales: Tensor
    slot_N: Tensor
    cell_N: Tensor


Build = Callable[[torch.device], dict[str, Kernel]]


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernels for a card."""
    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, PIECES_SOURCE, Path(__file__).with_name("row.cu"))
    return kernels(sources, tuple((name, MOST_SHARED_BYTES) for name in MOST_INPUTS), device.index or 0)


def share_of(weight: PanelWeight, blocks: int, *, whole: bool) -> int:
    """Chunks a block takes: equal for all; whole panels where sums must be whole."""
    panels, chunks = weight.codes.shape[1:3]
    return -(-panels // blocks) * chunks if whole else -(-panels * chunks // blocks)


def require_fit(weight: PanelWeight, most: int) -> None:
    if weight.form != "fp8" or weight.paired or weight.experts != 1 or weight.outputs % 64 or weight.inputs % 64:
        raise ValueError(
            f"a {weight.form} weight {weight.outputs} x {weight.inputs} of {weight.experts}; one row takes one plain FP8 weight "
            "of multiples of 64"
        )
    if weight.inputs > most:
        raise ValueError(f"{weight.inputs} inputs; these rows take up to {most} here")


def _launch(
    kernel: str, weight: PanelWeight, whole: bool, extra: int, build: Build, blocks: int | None,
    pointers: dict[str, Tensor | None], numbers: dict[str, object], ahead: int = STAGES,
) -> Tensor | Parts:  # fmt: skip
    require_fit(weight, MOST_INPUTS[kernel])
    device = weight.codes.device
    panels, chunks = weight.codes.shape[1:3]
    blocks = blocks_of(device) if blocks is None else blocks
    share = share_of(weight, blocks, whole=whole)
    used = -(-panels * chunks // share)
    if whole:
        out = torch.empty(1, weight.outputs, dtype=torch.bfloat16, device=device)
    else:
        out = torch.empty(most_parts(chunks, share), weight.outputs, dtype=torch.float32, device=device)
    given = {"codes": weight.codes, "scales": weight.scales, "out" if whole else "out_parts": out} | pointers
    counts = {
        "count": 1, "inputs": weight.inputs, "panels": panels, "chunks": chunks, "share": share, "blocks": used, "groups": 1,
        "ahead": ahead,
    }  # fmt: skip
    call = Call(**{name: None if t is None else t.data_ptr() for name, t in given.items()}, **(counts | numbers))
    slots = slots_of(panels, chunks, share)
    room = min(WARPS * STAGES, share) * CODES + 2 * weight.inputs + weight.inputs // 8 + 1024 + slots * WARPS * 256 + 4 * share
    build(device)[kernel].launch(call, used + extra, THREADS, overlap=True, shared_bytes=-(-room // 16) * 16)
    return out if whole else Parts(out, chunks, share)


def product_row(
    x_NI: Tensor, weight: PanelWeight, *, groups: int = 1, quantised: bool = True, whole: bool = True, quantise: bool = False,
    near: bool = False, build: Build = built, blocks: int | None = None,
) -> Tensor | Parts:  # fmt: skip
    """Contiguous bfloat16 [1, G * I] -> bfloat16 [1,O], or its parts. Not `quantised`: the input is, in this launch; `quantise`:
    whole outputs are; `near`: the launch before is short, or leaves no room beside it.

    `groups` of the weight's outputs read parts of the row, as in `linear`; blocks must not span groups.
    """
    panels, chunks = weight.codes.shape[1:3]
    share = share_of(weight, blocks_of(x_NI.device) if blocks is None else blocks, whole=whole)
    if groups > 1 and (share % chunks or panels % groups or (panels // groups) % (share // chunks)):
        raise ValueError(
            f"{panels} panels in {groups} groups, {share} chunks a block: a block would span groups; leave sums whole"
        )
    kernel = "from_row" if quantised else "from_row_quantised"
    return _launch(kernel, weight, whole, 0, build, blocks, {"rows": x_NI}, {"groups": groups, "quantise": int(quantise)},
                   NEAR if near else STAGES)  # fmt: skip


def product_of_streams(
    head: Head, weight: PanelWeight, *, build: Build = built, blocks: int | None = None
) -> tuple[Parts, Tensor, Tensor]:
    """Norm and quantise a collapse, then the product: its parts, the normed row, and quantised."""
    h = head.passed.h_ND
    normed, quantised = torch.empty_like(h), torch.empty_like(h)
    streams = head.call(None, normed, quantised)
    parts = _launch("from_streams", weight, False, 1, build, blocks, {}, {"streams": streams})
    assert isinstance(parts, Parts)
    return parts, normed, quantised


def entry_pointers(parts: Parts, norm_I: Tensor, entry: Entry, inputs: int) -> dict[str, Tensor]:
    """What a kernel reads and writes to make inputs and window entries of parts. Raises ValueError for other widths."""
    width = parts.sums.shape[-1] - inputs
    if entry.norm_C.shape != (width,) or width % 32 or width > 2 * ROW_THREADS:
        raise ValueError(f"{width} sums behind {inputs} inputs; an entry takes a multiple of 32 up to {2 * ROW_THREADS}")
    return {
        "parts": parts.sums, "norm": norm_I, "entry_norm": entry.norm_C, "cosines": entry.cos_NP, "sines": entry.sin_NP,
        "entry_codes": entry.codes, "entry_scales": entry.scales, "slot": entry.slot_N, "cell": entry.cell_N,
    }  # fmt: skip


def entry_numbers(parts: Parts, eps: float, entry: Entry, inputs: int) -> dict[str, object]:
    """The numbers that go with `entry_pointers`."""
    return {
        "in_width": parts.sums.shape[-1], "in_chunks": parts.chunks, "in_share": parts.share,
        "entry_width": parts.sums.shape[-1] - inputs, "pairs": entry.cos_NP.shape[1], "eps": eps,
        "code_slot": entry.codes.stride(0), "code_cell": entry.codes.stride(1), "scale_slot": entry.scales.stride(0),
        "scale_cell": entry.scales.stride(1),
    }  # fmt: skip


def product_of_parts(
    parts: Parts, norm_I: Tensor, eps: float, weight: PanelWeight, entry: Entry, head: Head, *,
    build: Build = built, blocks: int | None = None,
) -> tuple[Tensor, Tensor, Mix]:  # fmt: skip
    """The first I sums of `parts`, rounded, normed and quantised, times the weight; what lies behind them becomes a window entry.

    Gives bfloat16 [1,O], the quantised inputs [1,I], and the coefficients of `head`, which are made beside the product.
    """
    mix = head.empty_mix()
    rank = torch.empty(1, weight.inputs, dtype=torch.bfloat16, device=norm_I.device)
    pointers: dict[str, Tensor | None] = {"rank": rank, **entry_pointers(parts, norm_I, entry, weight.inputs)}
    numbers = entry_numbers(parts, eps, entry, weight.inputs)
    numbers["streams"] = head.call(mix)
    out = _launch("from_parts", weight, True, 3, build, blocks, pointers, numbers, NEAR)
    assert isinstance(out, Tensor)
    return out, rank, mix
