"""Counters by which programs of one launch find out who comes last: zero before a launch and zero again after it.

Must not know operators. Launches that share a counter must be ordered (one stream), as an engine's step is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[torch.device, int], Tensor] = {}


def arrivals(size: int, device: torch.device) -> Tensor:
    """int32 zeros of at least `size`, the same tensor for every call of like size, so that captured graphs keep theirs."""
    key = (device, 1 << (size - 1).bit_length())
    if key not in _counters:
        _counters[key] = torch.zeros(key[1], dtype=torch.int32, device=device)
    return _counters[key]
