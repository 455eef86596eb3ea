"""Gradient rule for training through quantisers: the straight-through estimator.

Must not know any particular format.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        return fn(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """fn(x) forwards, the identity backwards; fn must keep shape and dtype (ValueError otherwise).

    Used with the fake quantisers for quantisation-aware training: their own derivative is zero almost everywhere.
    """
    y: Tensor = _StraightThrough.apply(x, fn)
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(f"fn maps {x.dtype} {list(x.shape)} to {y.dtype} {list(y.shape)}; it must keep both")
    return y
