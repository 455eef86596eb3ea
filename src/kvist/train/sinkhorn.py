"""Sinkhorn balancing of the stream mixes for training: the released iterations forwards, the exact limit's gradient backwards.

Owns the differentiable balance of [N,S,S] logits on any device; on CUDA both directions are one Triton launch each, because
forty tiny launches a sublayer would cost more than the sublayer. Must not know what is mixed. Facts section 2.

Backwards: at the fixed point P = diag(u) exp(L) diag(v), rows and columns summing to 1, dL = P * (G - a 1' - 1 b') where a
and b make dL's row and column sums vanish: a = rowsum(P*G) - P b, b = colsum(P*G) - P' a, iterated as often as the balance.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def balance(logits_NSS: Tensor, iterations: int, eps: float) -> Tensor:
    """Logits [N,S,S] float32 -> mixes whose rows and columns sum to 1 (columns exactly, as the release ends on them)."""
    out: Tensor = _Balance.apply(logits_NSS, iterations, eps)
    return out


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NSS: Tensor, iterations: int, eps: float) -> Tensor:
        mixes = _on_cuda_forward(logits_NSS, iterations, eps) if _fast(logits_NSS) else _forward(logits_NSS, iterations, eps)
        ctx.save_for_backward(mixes)
        ctx.iterations = iterations
        return mixes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mixes,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        run = _on_cuda_backward if _fast(grad) else _backward
        return run(mixes, grad, ctx.iterations), None, None


def _fast(x: Tensor) -> bool:
    return HAS_TRITON and x.is_cuda and x.shape[1:] == (4, 4)


def _forward(logits: Tensor, iterations: int, eps: float) -> Tensor:
    mixes = torch.softmax(logits, 2) + eps
    mixes = mixes / (mixes.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixes = mixes / (mixes.sum(2, keepdim=True) + eps)
        mixes = mixes / (mixes.sum(1, keepdim=True) + eps)
    return mixes


def _backward(mixes: Tensor, grad: Tensor, iterations: int) -> Tensor:
    product = mixes * grad
    rows, columns = product.sum(2, keepdim=True), product.sum(1, keepdim=True)
    b = torch.zeros_like(columns)
    a = rows
    for _ in range(iterations):
        a = rows - (mixes * b).sum(2, keepdim=True)
        b = columns - (mixes * a).sum(1, keepdim=True)
    return product - mixes * (a + b)


def _on_cuda_forward(logits: Tensor, iterations: int, eps: float) -> Tensor:
    from kvist.train.sinkhorn_triton import launch_forward

    return launch_forward(logits.contiguous(), iterations, eps)


def _on_cuda_backward(mixes: Tensor, grad: Tensor, iterations: int) -> Tensor:
    from kvist.train.sinkhorn_triton import launch_backward

    return launch_backward(mixes, grad, iterations)
