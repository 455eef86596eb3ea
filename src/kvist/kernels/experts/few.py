"""A few rows through chosen FP4 experts and a shared one in one launch on Hopper (`few.cu`): what it takes, and its launch.

Its blocks wait for each other: all must find room on the card, so two such launches may not run side by side (one stream).
Must not know layers. Shapes: N rows, K choices a row, D model width, F expert width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvist.kernels.device.cuda_source import Kernel, kernels
from kvist.kernels.device.row import CODES, blocks_of, counters
from kvist.kernels.experts.gpu_bank import GpuBank

WARPS = 12
TEAM = 4
STAGES = 2
THREADS = 32 * (WARPS + WARPS // TEAM + 1)
MOST_ROWS = 8
MOST_CHOICES = 144
MOST_EXPERTS = 1024
MOST_CHOSEN = 16
CLAIMED = 32
SLOTS = 4
"""Units of one or two rows whose sums a team has room for, beside one of any rows."""
_TEAM_WORDS = 2 * (SLOTS + 1) + 2 + CLAIMED
_OWN_WORDS = WARPS // TEAM * _TEAM_WORDS + 32 + 3 * MOST_CHOICES + 2 + MOST_ROWS + MOST_CHOICES * MOST_ROWS // 2
SHARED_BYTES = WARPS * STAGES * (CODES + 256) + -(-_OWN_WORDS // 4) * 16 + (2 * SLOTS + MOST_ROWS) * WARPS * 256
_SOURCES = (Path(__file__).parents[1] / "device" / "stream.cuh", Path(__file__).with_name("few.cu"))
_POINTERS = (
    "rows", "ids", "weights", "up_codes", "up_scales", "down_codes", "down_scales", "shared_up_codes", "shared_up_scales",
    "shared_down_codes", "shared_down_scales", "hidden", "each", "out", "counters",
)  # fmt: skip
_COUNTS = ("width", "hidden_width", "count", "chosen")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("limit", ctypes.c_float),
    )


def built(device: torch.device) -> dict[str, Kernel]:
    """The kernel for a card."""
    return kernels(_SOURCES, (("experts_few", SHARED_BYTES),), device.index or 0)


def takes(bank: GpuBank, rows: int, k: int, shared: GpuBank | None = None) -> bool:
    """Whether the kernel multiplies so many rows by these banks: FP4, whole chunks; one shared expert of FP8."""
    d, f = bank.gate_up.inputs, bank.down.inputs
    if shared is not None:
        up, down = shared.gate_up, shared.down
        if not up.form == down.form == "fp8" or up.experts != 1 or (up.inputs, down.inputs) != (d, f):
            return False
    return (
        bank.gate_up.form == bank.down.form == "fp4" and d % 128 == 0 == f % 128 and bank.gate_up.experts <= MOST_EXPERTS
        and 1 <= rows <= MOST_ROWS and k <= MOST_CHOSEN
    )  # fmt: skip


def few_experts(
    x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, bank: GpuBank, shared: GpuBank | None = None, *, limit: float,
    build: Callable[[torch.device], dict[str, Kernel]] = built,
    blocks: int | None = None,
) -> Tensor:  # fmt: skip
    """Rows through the experts chosen for them (id -1: none; a row's ids differ), float32 [N,D]; with a `shared` one added and
    rounded once, bfloat16 [N,D]. Contiguous tensors; `x_ND` FP8-quantised bfloat16.

    Hidden rows are FP8-quantised, each expert's output is rounded, their sum is float32. A row's bits depend on no other row.
    Raises ValueError for rows and banks that it does not take.
    """
    (n, d), k, f = x_ND.shape, ids_NK.shape[1], bank.down.inputs
    if not takes(bank, n, k, shared):
        raise ValueError(
            f"{n} rows of {k} choices, {bank.gate_up.form} experts of {f} on {d} channels: one launch takes up to {MOST_ROWS} "
            f"rows of {MOST_CHOSEN} choices, FP4 experts of whole 128 channels, and one shared expert of FP8; use run_bank"
        )
    device, each = x_ND.device, n * (k + (shared is not None))
    out = torch.empty(n, d, dtype=torch.float32 if shared is None else torch.bfloat16, device=device)
    tensors = {
        "rows": x_ND, "ids": ids_NK, "weights": weights_NK, "up_codes": bank.gate_up.codes, "up_scales": bank.gate_up.scales,
        "down_codes": bank.down.codes, "down_scales": bank.down.scales, "out": out,
        "hidden": torch.empty(each, f, dtype=torch.bfloat16, device=device),
        "each": torch.empty(each, d, dtype=torch.bfloat16, device=device),
        "counters": counters(bank.down.codes, 2 + MOST_CHOICES + MOST_ROWS * (d // 64)),
    }  # fmt: skip
    if shared is not None:
        tensors |= {
            "shared_up_codes": shared.gate_up.codes, "shared_up_scales": shared.gate_up.scales,
            "shared_down_codes": shared.down.codes, "shared_down_scales": shared.down.scales,
        }  # fmt: skip
    call = _Call(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()}, width=d, hidden_width=f, count=n, chosen=k,
        limit=limit,
    )  # fmt: skip
    blocks = blocks_of(device) if blocks is None else blocks
    build(device)["experts_few"].launch(call, blocks, THREADS, overlap=True, shared_bytes=SHARED_BYTES)
    return out
