"""Triton kernels of `sinkhorn.py`: one program balances a tile of 4x4 matrices in registers.

Imported only on CUDA. Must not know autograd.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64


@triton.jit
def _forward(logits, out, n, eps, ITERATIONS: tl.constexpr, TILE_N: tl.constexpr):
    at = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    place = at[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    inside = (at < n)[:, None, None]
    x = tl.load(logits + place, mask=inside, other=0.0)
    x = tl.exp(x - tl.max(x, 2)[:, :, None])
    x = x / tl.sum(x, 2)[:, :, None] + eps
    x = x / (tl.sum(x, 1)[:, None, :] + eps)
    for _ in range(ITERATIONS - 1):
        x = x / (tl.sum(x, 2)[:, :, None] + eps)
        x = x / (tl.sum(x, 1)[:, None, :] + eps)
    tl.store(out + place, x, mask=inside)


@triton.jit
def _backward(mixes, grad, out, n, ITERATIONS: tl.constexpr, TILE_N: tl.constexpr):
    at = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    place = at[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    inside = (at < n)[:, None, None]
    p = tl.load(mixes + place, mask=inside, other=0.0)
    product = p * tl.load(grad + place, mask=inside, other=0.0)
    rows = tl.sum(product, 2)[:, :, None]
    columns = tl.sum(product, 1)[:, None, :]
    a = rows
    b = columns - tl.sum(p * a, 1)[:, None, :]
    for _ in range(ITERATIONS - 1):
        a = rows - tl.sum(p * b, 2)[:, :, None]
        b = columns - tl.sum(p * a, 1)[:, None, :]
    tl.store(out + place, product - p * (a + b), mask=inside)


def launch_forward(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Float32 contiguous [N,4,4] -> balanced [N,4,4]."""
    out = torch.empty_like(logits)
    n = len(logits)
    _forward[(triton.cdiv(n, TILE),)](logits, out, n, eps, ITERATIONS=iterations, TILE_N=TILE)
    return out


def launch_backward(mixes: Tensor, grad: Tensor, iterations: int) -> Tensor:
    """Gradient of the logits, [N,4,4]."""
    out = torch.empty_like(mixes)
    n = len(mixes)
    _backward[(triton.cdiv(n, TILE),)](mixes, grad, out, n, ITERATIONS=iterations, TILE_N=TILE)
    return out
