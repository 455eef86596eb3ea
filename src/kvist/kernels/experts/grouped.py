"""Many rows through FP4 experts on Hopper (`grouped.cu`): rows laid side by side by expert, products, and each choice's output.

Which banks it takes, how rows are laid, and its launches. Must not know layers. Shapes: N rows, S choices a row, D model width,
F expert width, E experts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.panels import PanelWeight
from kvist.kernels.device.row import CODES, blocks_of, on_hopper
from kvist.kernels.experts.gpu_bank import GpuBank

PANELS = 4
OCTET = 8
UNIT = 16
MOST_EXPERTS = 1024
COUNT_BYTES = 4 * (MOST_EXPERTS + 33)
WIDTHS = {64: (32, 48, 64), 112: (80, 96, 112)}
"""Most rows of a tile in a build of the kernels, and the numbers of rows that it has products for."""
EXPANSION_ROWS = 40
"""Rows whose products cost about as much as expanding the codes for them."""
_SOURCES = (Path(__file__).parents[1] / "device" / "stream.cuh", Path(__file__).with_name("grouped.cu"))
_POINTERS = (
    "rows", "laid", "codes", "scales", "ids", "begin", "tiles", "expert", "octet", "count", "choice", "weights", "hidden", "each",
)  # fmt: skip
_COUNTS = ("inputs", "panels", "octets", "choices_of_row", "choices", "experts")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("limit", ctypes.c_float),
    )


class Laid(NamedTuple):
    """Where rows lie: int32 number of tiles [1], each one's expert, first octet and rows, and the choice (row * S + slot, -1 for
    none) of each place. An expert's rows begin at a multiple of eight.
    """

    tiles: Tensor
    expert: Tensor
    octet: Tensor
    filled: Tensor
    choice: Tensor

    @property
    def octets(self) -> int:
        """Eights of places."""
        return len(self.choice) // OCTET


Build = Callable[[torch.device, int], dict[str, Kernel]]


def _groups(width: int) -> int:
    """Multiplying warpgroups of a block."""
    return 2 if width > 64 else 4


def threads_of(width: int) -> int:
    """Threads of a block of `gate_up` and `down`: one warpgroup brings what the others multiply."""
    return 128 * (_groups(width) + 1)


def shared_bytes(width: int) -> int:
    """Dynamic shared memory of a block: stages, barriers, and what warpgroups keep of a tile on its way out."""
    stages = 4 if width > 64 else 5
    return stages * (width * 256 + PANELS * (CODES + 256)) + 1024 + width * (_groups(width) * 128 + 2 * (16 + 16 + 4))


def built(device: torch.device, width: int) -> dict[str, Kernel]:
    """The kernels for a card and a width of tiles."""
    size = shared_bytes(width)
    names = (("count", COUNT_BYTES), ("place", COUNT_BYTES), ("gather", 0), ("gate_up", size), ("down", size))
    return kernels(_SOURCES, names, device.index or 0, (("WIDTH", width),))


def takes(bank: GpuBank) -> bool:
    """Whether a bank's widths are whole blocks."""
    up, down = bank.gate_up, bank.down
    return (
        up.form == down.form == "fp4" and up.outputs % (64 * PANELS) == 0 == down.outputs % (64 * PANELS)
        and up.inputs % 128 == 0 == down.inputs % 128 and up.experts <= MOST_EXPERTS
    )  # fmt: skip


def fits(bank: GpuBank) -> bool:
    """Whether the kernels run for this bank: Hopper, FP4, whole blocks."""
    return takes(bank) and on_hopper(bank.gate_up.codes)


def _rows_multiplied(rows: float, width: int) -> int:
    """Rows that an expert of `rows` costs in tiles of up to `width`, expansions counted as rows."""
    units = max(1, math.ceil(rows / UNIT))
    tiles = -(-units * UNIT // width)
    each = [UNIT * (units // tiles + (tile < units % tiles)) for tile in range(tiles)]
    return sum(min(n for n in WIDTHS[width] if n >= part) + EXPANSION_ROWS for part in each)


def width_for(choices: int, experts: int) -> int:
    """The build that costs least where experts have about as many choices each."""
    mean = choices / experts
    near = [(mean + z / 4 * math.sqrt(mean), math.exp(-z * z / 32)) for z in range(-8, 9)]
    return min(WIDTHS, key=lambda width: sum(weight * _rows_multiplied(rows, width) for rows, weight in near))


def lay(ids_NS: Tensor, experts: int, width: int, *, build: Build = built) -> Laid:
    """Give each choice a place beside its expert's others. Never waits for the device."""
    device, total = ids_NS.device, ids_NS.numel()
    # Behind the last expert's rows lies what the last tile may read too much.
    octets, most = -(-total // OCTET) + experts + width // OCTET, experts + total // width
    sizes = (experts + 1, 1, most, most, most, octets * OCTET)
    begin, *parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    laid, ids = Laid(*parts), ids_NS.contiguous()
    given = {
        "ids": ids, "begin": begin, "tiles": laid.tiles, "expert": laid.expert, "octet": laid.octet, "count": laid.filled,
        "choice": laid.choice,
    }  # fmt: skip
    call = _Call(
        **{name: tensor.data_ptr() for name, tensor in given.items()}, octets=octets, choices=total, experts=experts
    )  # fmt: skip
    found = build(device, width)
    found["count"].launch(call, 1, 1024)
    found["place"].launch(call, experts, 1024)
    return laid


def _call(places: Laid, rows: Tensor, weight: PanelWeight, weights_NS: Tensor, limit: float, **given: Tensor) -> _Call:
    tensors = given | {
        "rows": rows, "codes": weight.codes, "scales": weight.scales, "tiles": places.tiles, "expert": places.expert,
        "octet": places.octet, "count": places.filled, "choice": places.choice, "weights": weights_NS,
    }  # fmt: skip
    return _Call(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()}, inputs=weight.inputs, panels=weight.outputs // 64,
        octets=places.octets, choices_of_row=weights_NS.shape[1], limit=limit,
    )  # fmt: skip


def run_grouped(
    x_ND: Tensor, ids_NS: Tensor, weights_NS: Tensor, bank: GpuBank, limit: float, *, width: int | None = None,
    build: Build = built, blocks: int | None = None,
) -> Tensor:  # fmt: skip
    """Each choice's output, bfloat16 [N * S, D]; those of none are not set. Hidden rows are FP8-quantised. Only where `fits`."""
    if not takes(bank):
        raise ValueError(f"experts of {bank.down.inputs} on {bank.down.outputs} channels are not whole blocks; use other kernels")
    (n, s), device, up, down = ids_NS.shape, x_ND.device, bank.gate_up, bank.down
    width = width_for(n * s, up.experts) if width is None else width
    places = lay(ids_NS, up.experts, width, build=build)
    found, blocks, threads = build(device, width), blocks_of(device) if blocks is None else blocks, threads_of(width)
    rows = torch.empty(up.inputs // 64, places.octets, 1024, dtype=torch.uint8, device=device)
    hidden = torch.empty(down.inputs // 64, places.octets, 1024, dtype=torch.uint8, device=device)
    each = torch.empty(n * s, down.outputs, dtype=x_ND.dtype, device=device)
    first = _call(places, x_ND.contiguous(), up, weights_NS.contiguous(), limit, laid=rows, hidden=hidden)
    found["gather"].launch(first, places.octets, 256)
    found["gate_up"].launch(first, blocks, threads, shared_bytes=shared_bytes(width))
    second = _call(places, x_ND, down, weights_NS, limit, laid=hidden, each=each)
    found["down"].launch(second, blocks, threads, shared_bytes=shared_bytes(width))
    return each
