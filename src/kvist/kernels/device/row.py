"""Rows' sums that the blocks of a launch left in parts, for the launch that reads them next; and where those kernels run.

Must not know operators. Shapes: R outputs, in panels of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.device.arrivals import refuse_capture
from kvist.kernels.device.pages import multiprocessors
from kvist.kernels.device.panels import PANEL
from kvist.kernels.device.require import interpreted

CODES = 4096
"""Bytes of a chunk of a panel's codes, FP4 or FP8."""


class Parts(NamedTuple):
    """float32 [most,R] of one row or [most,N,R] of several: panel p's sums are parts 0 to (p * chunks + chunks - 1) // share - p
    * chunks // share, what lies behind them is not set. A block of the launch took `share` chunks, in the order of panels.
    """

    sums: Tensor
    chunks: int
    share: int

    def whole(self) -> Tensor:
        """bfloat16 [N,R], the parts added in their order."""
        most, outputs = self.sums.shape[0], self.sums.shape[-1]
        begin = torch.arange(outputs, device=self.sums.device) // PANEL * self.chunks
        last = (begin + self.chunks - 1) // self.share - begin // self.share
        there = torch.arange(most, device=self.sums.device).view(most, 1, 1) <= last
        return torch.where(there, self.sums.view(most, -1, outputs), 0.0).sum(0).bfloat16()


def most_parts(chunks: int, share: int) -> int:
    """Parts that a panel of so many chunks can be left in."""
    return -(-chunks // share) + 1


def slots_of(panels: int, chunks: int, share: int) -> int:
    """Panels that a block touches, at most."""
    total = panels * chunks
    return max((min(first + share, total) - 1) // chunks - first // chunks + 1 for first in range(0, total, share))


def on_hopper(tensor: Tensor) -> bool:
    """Whether kernels for compute capability 9.0 run where the tensor lies."""
    return not interpreted() and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) == (9, 0)


def blocks_of(device: torch.device) -> int:
    """Blocks of a launch whose blocks are all on the card at once, one a multiprocessor."""
    return multiprocessors(device)


_zeros: dict[tuple[torch.device, int], Tensor] = {}


def counters(owner: Tensor, size: int) -> Tensor:
    """uint32 zeros for launches on the weight `owner`, the same for every call. Raises RuntimeError if made during a capture."""
    key = (owner.device, owner.data_ptr())
    if key not in _zeros or len(_zeros[key]) < size:
        refuse_capture(owner.device)
        _zeros[key] = torch.zeros(size, dtype=torch.int32, device=owner.device)
    return _zeros[key]
