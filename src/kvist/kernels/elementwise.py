"""Sigmoid, SiLU and softplus whose bits at an element depend on that element alone.

Torch's own run vector code on whole vectors and scalar code, which rounds differently, on the rest of a tensor, so the
same number gives different bits at another place (measured: torch 2.13, CPU). `exp` and `log1p` do not. Used wherever the
`deterministic` mode must hold (design 3). Must not know anything but tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = -80.0  # exp(80) is finite in float32, so gradients stay finite too
SOFTPLUS_LINEAR = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32 or float64."""
    return torch.reciprocal(1 + torch.exp(-x.clamp_min(LOWEST)))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); x itself above 20, where the difference is below float32's resolution."""
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x.clamp_max(SOFTPLUS_LINEAR))))
