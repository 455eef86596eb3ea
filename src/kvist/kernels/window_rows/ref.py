"""Meaning of `move_rows`: plain indexing, codes and scales alike.

Must not know rings, buffers or layers. Shapes: K entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def move_rows_ref(held: tuple[Tensor, Tensor], from_K: Tensor, into: tuple[Tensor, Tensor], to_K: Tensor) -> None:
    """See `move_rows`."""
    for source, target in zip(held, into, strict=True):
        target[to_K] = torch.where(from_K.unsqueeze(1) >= 0, source[from_K.clamp_min(0)], 0)
