"""The experts' half of a layer for one row in one launch on Hopper: norm, router, shared and chosen experts (`row.cu`).

Its blocks wait for each other: all must find room on the card, so two such launches may not run side by side (one stream).
Which banks it takes, how it is cut, and its launch. Must not know layers.

Shapes: D model width, F expert width, E experts, K chosen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import CODES, Parts, blocks_of, counters, most_parts, slots_of
from kvist.kernels.experts.gpu_bank import GpuBank
from kvist.kernels.hyper_connections.ref import Mix
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE, Head, StreamsCall
from kvist.kernels.routing.rows import CHOOSE_SOURCE

WARPS = 12
STAGES = 2
THREADS = 32 * (WARPS + 1)
ROW_WARPS = 8
MOST_EXPERTS = 384
MOST_CHOSEN = 16
MOST_GATES = 3
MOST_SLOTS = 32
MOST_SHARED_BYTES = 226 << 10
_OWN_BYTES = -(-(8 * 3 + 4 * (64 + 32 + MOST_SLOTS + 3 * 5 + 2 * MOST_CHOSEN + MOST_GATES * ROW_WARPS)) // 16) * 16
_POINTERS = (
    "gate", "bias_text", "bias_image", "text", "up_codes", "up_scales", "down_codes", "down_scales", "shared_up_codes",
    "shared_up_scales", "shared_down_codes", "shared_down_scales", "parts", "hidden", "out", "ids", "weights", "given", "whole",
    "scores", "counters",
)  # fmt: skip
_COUNTS = (
    "width", "hidden_width", "experts", "chosen", "blocks", "shared_share", "up_share", "down_share", "slots", "inputs",
    "normalise",
)  # fmt: skip
_FACTORS = ("limit", "temperature", "scale")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("streams", StreamsCall),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in _FACTORS),
    )


class Router(NamedTuple):
    """Gate bfloat16 [E,D], biases float32 [E], and the numbers of `routing.route`."""

    gate_ED: Tensor
    bias_text_E: Tensor
    bias_image_E: Tensor
    k: int
    temperature: float
    normalise: bool
    scale: float


class Chosen(NamedTuple):
    """The sublayer's output in parts, its coefficients, and what the router chose: ids int64 [1,K], weights float32 [1,K]."""

    parts: Parts
    mix: Mix
    ids_NK: Tensor
    weights_NK: Tensor


class Cut(NamedTuple):
    """Chunks a block takes of the shared gate+up, of the chosen ones, and of down; chunks of a panel of down; slots of sums."""

    shares: tuple[int, int, int]
    down_chunks: int
    slots: int

    @property
    def inputs(self) -> int:
        """Chunks of down that a warp takes."""
        return -(-self.shares[2] // WARPS)


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernel for a card."""
    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, CHOOSE_SOURCE, Path(__file__).with_name("row.cu"))
    return kernels(sources, (("experts_row", MOST_SHARED_BYTES),), device.index or 0)


def takes(routed: GpuBank, k: int, blocks: int, *, shared: bool = False) -> bool:
    """Whether the kernel multiplies by this bank: FP4, whole chunks, and what a block has room for."""
    d, f = routed.gate_up.inputs, routed.down.inputs
    return (
        routed.gate_up.form == routed.down.form == "fp4" and d % 128 == 0 == f % 128 and d <= 5120 and k <= MOST_CHOSEN
        and _refusal(cut_for(d, f, k, blocks, shared), d) is None
    )  # fmt: skip


def fits(routed: GpuBank, shared: GpuBank | None, experts: int, k: int, blocks: int) -> bool:
    """Whether the kernel takes these banks and their router: FP4 and FP8, experts that fit a block's rows of the router."""
    d, f = routed.gate_up.inputs, routed.down.inputs
    if shared is not None:
        up, down = shared.gate_up, shared.down
        if up.form != "fp8" or up.experts != 1 or (up.inputs, down.inputs) != (d, f):
            return False
    most = min(MOST_EXPERTS, MOST_GATES * blocks)
    return k <= experts == routed.gate_up.experts <= most and takes(routed, k, blocks, shared=shared is not None)


def cut_for(d: int, f: int, k: int, blocks: int, shared: bool) -> Cut:
    """Equal runs for all blocks."""
    panels = (f // 32 * shared, k * (f // 32), d // 64)
    chunks = (d // 64, d // 128, k * (f // 128) + f // 64 * shared)
    shares = tuple(-(-count * each // blocks) for count, each in zip(panels, chunks, strict=True))
    slots = sum(slots_of(*cut) for cut in zip(panels, chunks, shares, strict=True) if cut[0])
    return Cut((shares[0], shares[1], shares[2]), chunks[2], slots)


def _room(cut: Cut, d: int) -> int:
    """Bytes of shared memory of a block."""
    of_warp = STAGES * (CODES + 256) + (cut.slots + cut.inputs) * 256
    return WARPS * of_warp + _OWN_BYTES + 2 * d + 4 * (cut.shares[0] + cut.shares[2])


def _refusal(cut: Cut, d: int) -> str | None:
    """Why blocks have no room for their share, None if they have."""
    if cut.slots > MOST_SLOTS:
        return f"blocks of {cut.shares} chunks touch {cut.slots} panels, at most {MOST_SLOTS}; use more blocks"
    if max(cut.shares[0], cut.shares[2]) > THREADS:
        return f"blocks take {cut.shares} chunks, of the shared gate+up and of down at most {THREADS}; use more blocks"
    if _room(cut, d) > MOST_SHARED_BYTES:
        return f"blocks would need {_room(cut, d)} bytes of shared memory, at most {MOST_SHARED_BYTES}; use more blocks"
    return None


def _misfit(routed: GpuBank, k: int, blocks: int, *, shared: bool) -> str:
    """What is asked of a launch that does not do it."""
    d, f = routed.gate_up.inputs, routed.down.inputs
    why = _refusal(cut_for(d, f, k, blocks, shared), d)
    return f"{k} of {routed.gate_up.experts} experts of {f} on {d} channels do not fit one launch" + (f": {why}" if why else "")


def _launch(
    routed: GpuBank, shared: GpuBank | None, k: int, given: dict[str, Tensor | StreamsCall],
    numbers: tuple[int, float, float, float], blocks: int, build: Callable[[torch.device], dict[str, Kernel]],
) -> Parts:  # fmt: skip
    """The launch, with what is `given` beside the banks, and whether weights are normed, limit, temperature and scale."""
    device, d, f = routed.gate_up.codes.device, routed.gate_up.inputs, routed.down.inputs
    cut, experts = cut_for(d, f, k, blocks, shared is not None), routed.gate_up.experts
    out = torch.empty(most_parts(cut.down_chunks, cut.shares[2]), d, dtype=torch.float32, device=device)
    zeros = counters(routed.gate_up.codes, 2 * experts + 2 + 2 * blocks)
    banks = {
        "up_codes": routed.gate_up.codes, "up_scales": routed.gate_up.scales, "down_codes": routed.down.codes,
        "down_scales": routed.down.scales, "parts": torch.empty(128 * blocks, dtype=torch.float32, device=device),
        "hidden": torch.empty(k + 1, f, dtype=torch.bfloat16, device=device), "out": out, "scores": zeros,
        "counters": zeros[2 * experts :],
    }  # fmt: skip
    if shared is not None:
        banks |= {
            "shared_up_codes": shared.gate_up.codes, "shared_up_scales": shared.gate_up.scales,
            "shared_down_codes": shared.down.codes, "shared_down_scales": shared.down.scales,
        }  # fmt: skip
    pointers = {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in (banks | given).items()}
    sizes = (d, f, experts, k, blocks, *cut.shares, cut.slots, cut.inputs, *numbers)
    call = _Call(**pointers, **dict(zip((*_COUNTS, *_FACTORS), sizes, strict=True)))
    room = -(-_room(cut, d) // 16) * 16
    build(device)["experts_row"].launch(call, blocks, THREADS, overlap=True, shared_bytes=room)
    return Parts(out, cut.down_chunks, cut.shares[2])


def experts_row(
    head: Head, router: Router, text_N: Tensor, routed: GpuBank, shared: GpuBank | None, *, limit: float,
    build: Callable[[torch.device], dict[str, Kernel]] = built,
    blocks: int | None = None,
) -> Chosen:  # fmt: skip
    """One row through router, chosen experts and the shared one, if there is one. `text_N` bool [1].

    Hidden rows are FP8-quantised. Sums of all experts are float32, rounded once. Raises ValueError for banks that do not fit.
    """
    device = routed.gate_up.codes.device
    blocks, experts = blocks_of(device) if blocks is None else blocks, len(router.gate_ED)
    if not fits(routed, shared, experts, router.k, blocks):
        raise ValueError(_misfit(routed, router.k, blocks, shared=shared is not None) + "; use run_bank and run_shared")
    ids, mix = torch.empty(1, router.k, dtype=torch.int64, device=device), head.empty_mix()
    weights = torch.empty(1, router.k, dtype=torch.float32, device=device)
    given: dict[str, Tensor | StreamsCall] = {
        "gate": router.gate_ED, "bias_text": router.bias_text_E, "bias_image": router.bias_image_E, "text": text_N, "ids": ids,
        "weights": weights, "streams": head.call(mix),
    }  # fmt: skip
    numbers = (int(router.normalise), limit, router.temperature, router.scale)
    parts = _launch(routed, shared, router.k, given, numbers, blocks, build)
    return Chosen(parts, mix, ids, weights)


def given_experts_row(
    x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, routed: GpuBank, *, limit: float,
    build: Callable[[torch.device], dict[str, Kernel]] = built,
    blocks: int | None = None,
) -> Tensor:  # fmt: skip
    """One row through the experts chosen for it (id -1: none), float32 [1,D]. Contiguous tensors; `x_ND` FP8-quantised bfloat16.

    Hidden rows are FP8-quantised, sums float32. Raises ValueError for banks that do not fit.
    """
    (n, d), k = x_ND.shape, ids_NK.shape[1]
    blocks = blocks_of(x_ND.device) if blocks is None else blocks
    if n != 1 or not takes(routed, k, blocks):
        raise ValueError(f"{n} rows: " + _misfit(routed, k, blocks, shared=False) + "; use run_bank")
    whole = torch.empty(1, d, dtype=torch.float32, device=x_ND.device)
    given: dict[str, Tensor | StreamsCall] = {"given": x_ND, "ids": ids_NK, "weights": weights_NK, "whole": whole}
    _launch(routed, None, k, given, (0, limit, 1.0, 1.0), blocks, build)
    return whole
