"""Two to eight rows times an FP8 weight on Hopper, by launches whose sums are those of one row: its bits are what they are alone.

Which weights `rows.cu` takes, how a launch is cut, and its launches; cuts and parts are those of `row.py`. Must not know layers.
Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight
from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import CODES, Parts, blocks_of, most_parts, slots_of
from kvist.kernels.hyper_connections.ref import Mix
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE, Head
from kvist.kernels.linear.row import (
    MOST_SHARED_BYTES,
    NEAR,
    PIECES_SOURCE,
    STAGES,
    THREADS,
    WARPS,
    Build,
    Call,
    Entry,
    entry_numbers,
    entry_pointers,
    require_fit,
    share_of,
)

MOST_ROWS = 8
MOST_INPUTS = 8192
MOST_RANK, MOST_WIDTH = 2048, 5120
FORMS = ((4, 5), (8, 4), (8, 3))
"""Rows, and chunks that a warp has on their way, of the kernels: the first that rows and a block's inputs leave room for."""
KERNELS = (*(f"{kind}_{rows}_{stages}" for kind in ("rows", "streams") for rows, stages in FORMS), "finish_rows")


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernels for a card."""
    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, PIECES_SOURCE, Path(__file__).with_name("rows.cu"))
    return kernels(sources, tuple((name, MOST_SHARED_BYTES) for name in KERNELS), device.index or 0)


def room_of(rows: int, stages: int, weight: PanelWeight, share: int) -> int:
    """Bytes of shared memory of a block: rings, its inputs and their scales, sums of warps, its scales."""
    panels, chunks = weight.codes.shape[1:3]
    sums = slots_of(panels, chunks, share) * WARPS * rows * 256
    room = min(WARPS * stages, share) * CODES + rows * min(share, chunks) * 136 + 32 + sums + 4 * share
    return -(-room // 16) * 16


def form_of(rows: int, weight: PanelWeight, share: int) -> tuple[int, int] | None:
    """The kernel's form for so many rows and blocks of so many chunks, None if there is none."""
    fitting = (form for form in FORMS if rows <= form[0] and room_of(rows, form[1], weight, share) <= MOST_SHARED_BYTES)
    return next(fitting, None) if rows > 1 else None


def fits(rows: int, weight: PanelWeight, blocks: int, *, whole: bool) -> bool:
    """Whether so many rows and this weight are one launch."""
    plain = weight.form == "fp8" and not weight.paired and weight.experts == 1
    return (
        plain and not weight.outputs % 64 and not weight.inputs % 64 and weight.inputs <= MOST_INPUTS
        and form_of(rows, weight, share_of(weight, blocks, whole=whole)) is not None
    )  # fmt: skip


def _launch(
    kind: str, rows: int, weight: PanelWeight, whole: bool, build: Build, blocks: int | None,
    pointers: dict[str, Tensor], numbers: dict[str, object], ahead: int,
) -> Tensor | Parts:  # fmt: skip
    require_fit(weight, MOST_INPUTS)
    device = weight.codes.device
    panels, chunks = weight.codes.shape[1:3]
    blocks = blocks_of(device) if blocks is None else blocks
    share = share_of(weight, blocks, whole=whole)
    form = form_of(rows, weight, share)
    if form is None:
        raise ValueError(
            f"{rows} rows for a weight {weight.outputs} x {weight.inputs} in {blocks} blocks: one launch takes 2 to {MOST_ROWS} "
            f"rows and {MOST_SHARED_BYTES} bytes a block, these need {room_of(rows, FORMS[-1][1], weight, share)}; use linear_gpu"
        )
    shape = (rows, weight.outputs) if whole else (most_parts(chunks, share), rows, weight.outputs)
    out = torch.empty(shape, dtype=torch.bfloat16 if whole else torch.float32, device=device)
    used = -(-panels * chunks // share)
    given = {"codes": weight.codes, "scales": weight.scales, "out" if whole else "out_parts": out} | pointers
    counts = {
        "count": rows, "inputs": weight.inputs, "panels": panels, "chunks": chunks, "share": share, "blocks": used, "groups": 1,
        "ahead": min(ahead, form[1]),
    }  # fmt: skip
    call = Call(**{name: tensor.data_ptr() for name, tensor in given.items()}, **(counts | numbers))
    kernel = build(device)[f"{kind}_{form[0]}_{form[1]}"]
    kernel.launch(call, used, THREADS, overlap=True, shared_bytes=room_of(rows, form[1], weight, share))
    return out if whole else Parts(out, chunks, share)


def product_rows(
    x_NI: Tensor, weight: PanelWeight, *, groups: int = 1, whole: bool = True, quantise: bool = False, near: bool = False,
    build: Build = built, blocks: int | None = None,
) -> Tensor | Parts:  # fmt: skip
    """Contiguous bfloat16 [N, G * I] -> bfloat16 [N,O], or its parts [parts,N,O]. See `product_row`."""
    panels, chunks = weight.codes.shape[1:3]
    share = share_of(weight, blocks_of(x_NI.device) if blocks is None else blocks, whole=whole)
    if groups > 1 and (share % chunks or panels % groups or (panels // groups) % (share // chunks)):
        raise ValueError(
            f"{panels} panels in {groups} groups, {share} chunks a block: a block would span groups; leave sums whole"
        )
    numbers: dict[str, object] = {"groups": groups, "quantise": int(quantise)}
    ahead = NEAR if near else STAGES
    return _launch("rows", len(x_NI), weight, whole, build, blocks, {"rows": x_NI}, numbers, ahead)


def product_of_streams_rows(
    head: Head, weight: PanelWeight, *, build: Build = built, blocks: int | None = None
) -> tuple[Parts, Tensor, Tensor]:
    """Norm and quantise collapses, then the product: its parts [parts,N,O], the normed rows, and quantised."""
    h = head.passed.h_ND
    if h.shape[1] != weight.inputs:
        raise ValueError(f"rows of {h.shape[1]} channels for a weight of {weight.inputs} inputs")
    normed, quantised = torch.empty_like(h), torch.empty_like(h)
    streams = head.call(None, normed, quantised)
    parts = _launch("streams", len(h), weight, False, build, blocks, {}, {"streams": streams}, STAGES)
    assert isinstance(parts, Parts)
    return parts, normed, quantised


def finish_rows(
    parts: Parts, norm_I: Tensor, eps: float, entry: Entry, head: Head, *, build: Build = built
) -> tuple[Tensor, Mix]:  # fmt: skip
    """The first I sums of each row's `parts`, rounded, normed and quantised, bfloat16 [N,I]; what lies behind them becomes window
    entries. And the coefficients of `head`."""
    rows, inputs = parts.sums.shape[1], len(norm_I)
    if inputs > MOST_RANK or inputs % 64:
        raise ValueError(f"{inputs} inputs; they are a multiple of 64 up to {MOST_RANK}")
    mix = head.empty_mix()
    rank = torch.empty(rows, inputs, dtype=torch.bfloat16, device=norm_I.device)
    pointers = {"rank": rank} | entry_pointers(parts, norm_I, entry, inputs)
    numbers = {"count": rows, "inputs": inputs, "streams": head.call(mix), **entry_numbers(parts, eps, entry, inputs)}
    call = Call(**{name: tensor.data_ptr() for name, tensor in pointers.items()}, **numbers)
    room = 1024 + inputs // 8 + 2 * inputs
    build(norm_I.device)["finish_rows"].launch(call, 3 * rows, THREADS, overlap=True, shared_bytes=-(-room // 16) * 16)
    return rank, mix
