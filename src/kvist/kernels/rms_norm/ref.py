"""RMSNorm in plain torch: what every faster norm must equal. Knows one row at a time and nothing of layers."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_D.float()).to(x.dtype)
