"""The linear map in plain torch: one product, and the fixed-tile product of the deterministic mode.

Shapes: N rows, I input channels, O output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_ROWS = 16


def linear_ref(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """One product over all rows."""
    return F.linear(x_NI, w_OI)


def linear_wide(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """The product summed in float64, rounded once to the dtype of `x_NI`."""
    return F.linear(x_NI.double(), w_OI.double()).to(x_NI.dtype)


def linear_rows16(x_NI: Tensor, w_OI: Tensor) -> Tensor:
    """The same product on tiles of 16 rows, each padded with zero rows to exactly 16.

    A BLAS picks its blocking from the matrix sizes; equal sizes for every tile make the order of each row's sum a
    property of the row alone (measured on CPU: 1-row and small products differ from large ones, 16-row tiles do not).
    """
    flat_NI = x_NI.reshape(-1, x_NI.shape[-1])
    n = flat_NI.shape[0]
    pad = -n % TILE_ROWS
    if pad:
        flat_NI = torch.cat([flat_NI, flat_NI.new_zeros(pad, flat_NI.shape[1])])
    tiles = [F.linear(tile, w_OI) for tile in flat_NI.contiguous().split(TILE_ROWS)]
    out_NO = torch.cat(tiles)[:n] if tiles else flat_NI.new_zeros(0, w_OI.shape[0])
    return out_NO.reshape(*x_NI.shape[:-1], w_OI.shape[0])
