"""Rotary embedding in plain torch.

Shapes: N rows, C channels, P rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_ref(x: Tensor, table: tuple[Tensor, Tensor], *, back: bool = False) -> Tensor:
    """See `rotate`."""
    cos, sin = (t.view(t.shape[0], *(1,) * (x.dim() - 2), t.shape[1]) for t in table)
    if back:
        sin = -sin
    width = 2 * cos.shape[-1]
    still, turning = x[..., :-width], x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = turning.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], -1)
