"""Counters by which programs of one launch find out who comes last: zero before a launch and zero again after it.

Each weight has its own, so launches of different weights may overlap; launches of one weight must be ordered. Must not know
operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.device.pages import multiprocessors

MOST_PARTS = 20
_counters: dict[tuple[torch.device, int, int], Tensor] = {}


PART_COST = 3.0
EACH_COST = 0.25
"""What cutting inputs in parts, and each part, cost in steps of a program (measured on an H200)."""


def parts_for(programs: int, steps: int, most: int, device: torch.device) -> int:
    """Into how many equal parts to cut the `steps` of each of `programs`, `most` programs at most, so that the fullest
    multiprocessor is done soonest. One program alone on a multiprocessor waits for memory.
    """
    count, best = multiprocessors(device), (float("inf"), 1)
    for part in range(1, min(steps, MOST_PARTS) + 1):
        each, launched = steps // part, programs * part
        if steps % part or (part > 1 and launched > most):
            continue
        cost = -(-launched // count) * each * (1.3 if launched <= count else 1.0)
        best = min(best, (cost + (PART_COST + EACH_COST * part if part > 1 else 0.0), part))
    return best[1]


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a graph is captured: what is made once and kept must exist before."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("an operator was captured in a CUDA graph before it ran once with this shape; run it once first")


def arrivals(owner: Tensor, size: int) -> Tensor:
    """int32 zeros of at least `size` for launches on the weight `owner`: the same tensor for every call of like size.

    Raises RuntimeError if the first call of a size happens during graph capture: zeros made there would be zero only after
    a replay, so every shape must run once before it is captured.
    """
    key = (owner.device, owner.data_ptr(), 1 << (size - 1).bit_length())
    if key not in _counters:
        refuse_capture(owner.device)
        _counters[key] = torch.zeros(key[2], dtype=torch.int32, device=owner.device)
    return _counters[key]
