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

WARPS = 12
STAGES = 2
THREADS = 32 * (WARPS + 1)
ROW_WARPS = 8
MOST_EXPERTS = 384
MOST_CHOSEN = 16
MOST_GATES = 3
MOST_SLOTS = 16
MOST_SHARED_BYTES = 226 << 10
_OWN_BYTES = 4 * (32 + 3 * MOST_CHOSEN + MOST_GATES * ROW_WARPS + 2 * MOST_EXPERTS + 64) + 32
_POINTERS = (
    "gate", "bias_text", "bias_image", "text", "up_codes", "up_scales", "down_codes", "down_scales", "shared_up_codes",
    "shared_up_scales", "shared_down_codes", "shared_down_scales", "logits", "shared_parts", "routed_parts", "hidden", "out",
    "ids", "weights", "counters",
)  # fmt: skip
_COUNTS = (
    "width", "hidden_width", "experts", "chosen", "blocks", "shared_share", "routed_share", "down_share", "slots", "normalise"
)  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("streams", StreamsCall),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in ("limit", "temperature", "scale")),
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
    """Chunks a block takes of the shared gate+up, of the chosen ones, and of down; chunks of a panel of each; slots of sums."""

    shares: tuple[int, int, int]
    chunks: tuple[int, int, int]
    slots: int


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernel for a card."""
    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, Path(__file__).with_name("row.cu"))
    return kernels(sources, (("experts_row", MOST_SHARED_BYTES),), device.index or 0)


def fits(routed: GpuBank, shared: GpuBank | None, experts: int, k: int, blocks: int) -> bool:
    """Whether the kernel takes these banks: FP4 and FP8, whole chunks, experts that fit a block's rows of the router."""
    d, f = routed.gate_up.inputs, routed.down.inputs
    if shared is not None:
        up, down = shared.gate_up, shared.down
        if up.form != "fp8" or up.experts != 1 or (up.inputs, down.inputs) != (d, f):
            return False
    return (
        routed.gate_up.form == "fp4" and d % 128 == 0 and f % 128 == 0 and d <= 5120 and k <= min(MOST_CHOSEN, experts)
        and experts <= min(MOST_EXPERTS, MOST_GATES * blocks) and experts == routed.gate_up.experts
    )  # fmt: skip


def cut_for(d: int, f: int, k: int, blocks: int, shared: bool) -> Cut:
    """Equal runs for all blocks."""
    ups, downs = f // 32, d // 64
    chunks = (d // 64, d // 128, k * (f // 128) + (f // 64 if shared else 0))
    panels = (ups if shared else 0, k * ups, downs)
    shares = tuple(-(-count * each // blocks) for count, each in zip(panels, chunks, strict=True))
    first, second, third = (slots_of(*cut) if cut[0] else 0 for cut in zip(panels, chunks, shares, strict=True))
    return Cut((shares[0], shares[1], shares[2]), chunks, max(first + second, third))


def experts_row(
    head: Head, router: Router, text_N: Tensor, routed: GpuBank, shared: GpuBank | None, *, limit: float,
    build: Callable[[torch.device], dict[str, Kernel]] = built,
    blocks: int | None = None,
) -> Chosen:  # fmt: skip
    """One row through router, chosen experts and the shared one, if there is one. `text_N` bool [1].

    Hidden rows are FP8-quantised. Sums of all experts are float32, rounded once. Raises ValueError for banks that do not fit.
    """
    device, d, f = routed.gate_up.codes.device, routed.gate_up.inputs, routed.down.inputs
    blocks, experts = blocks_of(device) if blocks is None else blocks, len(router.gate_ED)
    if not fits(routed, shared, experts, router.k, blocks):
        raise ValueError(
            f"{router.k} of {experts} experts of {f} on {d} channels do not fit one launch; use run_bank and run_shared"
        )
    cut = cut_for(d, f, router.k, blocks, shared is not None)
    if cut.slots > MOST_SLOTS:
        raise ValueError(f"blocks of {cut.shares} chunks touch {cut.slots} panels, at most {MOST_SLOTS}; use more blocks")
    floats = torch.empty(experts + 128 * blocks + router.k, dtype=torch.float32, device=device)
    shared_parts, routed_parts, logits, weights = floats.split((64 * blocks, 64 * blocks, experts, router.k))
    hidden = torch.empty(router.k + 1, f, dtype=torch.bfloat16, device=device)
    out = torch.empty(most_parts(cut.chunks[2], cut.shares[2]), d, dtype=torch.float32, device=device)
    ids, mix = torch.empty(1, router.k, dtype=torch.int64, device=device), head.empty_mix()
    of_shared: tuple[Tensor | None, ...] = (None,) * 4
    if shared is not None:
        of_shared = (shared.gate_up.codes, shared.gate_up.scales, shared.down.codes, shared.down.scales)
    pointers = (
        router.gate_ED, router.bias_text_E, router.bias_image_E, text_N, routed.gate_up.codes, routed.gate_up.scales,
        routed.down.codes, routed.down.scales, *of_shared, logits, shared_parts, routed_parts, hidden, out, ids, weights,
        counters(routed.gate_up.codes, 3 + 2 * blocks),
    )  # fmt: skip
    call = _Call(
        *(None if t is None else t.data_ptr() for t in pointers), head.call(mix), d, f,
        experts, router.k, blocks, *cut.shares, cut.slots, int(router.normalise), limit, router.temperature, router.scale,
    )  # fmt: skip
    inputs = max(2 * d, -(-cut.shares[2] // WARPS) * WARPS * 256)
    room = WARPS * STAGES * (CODES + 256) + _OWN_BYTES + inputs + cut.slots * WARPS * 256 + 4 * (cut.shares[0] + cut.shares[2])
    if room > MOST_SHARED_BYTES:
        raise ValueError(
            f"blocks would need {room} bytes of shared memory, at most {MOST_SHARED_BYTES}; use run_bank and run_shared"
        )
    build(device)["experts_row"].launch(call, blocks, THREADS, overlap=True, shared_bytes=-(-room // 16) * 16)
    return Chosen(Parts(out, cut.chunks[2], cut.shares[2]), mix, ids, weights.view(1, router.k))
