"""Whether GPU operators can run here: resolved once a process, refused by name, never replaced by something slower.

Must not know operators.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

OLDEST = (9, 0)


class GpuUnavailable(ValueError):
    """`impl="gpu"` was asked for where it cannot run; the message says what is missing and what runs instead.

    `missing` is the first half alone, for callers that nothing replaces.
    """

    def __init__(self, missing: str, instead: str | None = None) -> None:
        super().__init__(missing if instead is None else f"{missing}; {instead}")
        self.missing = missing


def interpreted() -> bool:
    """Whether Triton runs its interpreter (TRITON_INTERPRET=1): tensors of any device, for tests only."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def require_gpu() -> None:
    """Raise `GpuUnavailable` unless Triton and a card of compute capability 9.0 or newer are here (or the interpreter is)."""
    if importlib.util.find_spec("triton") is None:
        raise GpuUnavailable("impl 'gpu' needs Triton (kvist's extra gpu, or pip install triton)", "impl 'ref' runs without it")
    if interpreted():
        return
    if not torch.cuda.is_available():
        raise GpuUnavailable("impl 'gpu' needs a CUDA device and torch sees none", "impl 'ref' or 'cpu' runs here")
    found = torch.cuda.get_device_capability()
    if found < OLDEST:
        name = torch.cuda.get_device_name()
        raise GpuUnavailable(
            f"impl 'gpu' is written for compute capability {OLDEST[0]}.{OLDEST[1]} (Hopper) or newer; {name} has "
            f"{found[0]}.{found[1]}",
            "impl 'ref' runs there",
        )


def require_device(name: torch.device | str) -> torch.device:
    """The device of this name. Raises GpuUnavailable for a card that is not here, ValueError for a name that means none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown; give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is none that models run on; give cpu, cuda or cuda:N")
    seen = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= seen:
        raise GpuUnavailable(f"device {str(device)!r} is not here: torch sees {seen} CUDA devices; device cpu runs everything")
    return device


def require_bfloat16(operator: str, *tensors: Tensor) -> None:
    """Raise ValueError unless all are bfloat16 on the GPU (on any device under the interpreter), and need no gradient."""
    for tensor in tensors:
        if tensor.dtype is not torch.bfloat16:
            raise ValueError(f"{operator}: impl 'gpu' takes bfloat16 activations, got {tensor.dtype}; use impl 'ref'")
        if not interpreted() and tensor.device.type != "cuda":
            raise ValueError(f"{operator}: impl 'gpu' takes tensors of a CUDA device, got {tensor.device}; move them first")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{operator}: impl 'gpu' has no gradients; use impl 'ref' or torch.no_grad()")
