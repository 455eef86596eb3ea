"""Triton kernels of `gathered.py`: one program a query, all heads, keys read where they lie in chunks.

Gradients of keys are added up in float32 by atomics: their last bits vary from run to run, as training tolerates.
Imported only where Triton runs. Must not know autograd.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64


@triton.jit
def _key_chunk(window, rows, ids, query, t, b, at, M, T, C, K: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr,
               CP: tl.constexpr, OF_WINDOW: tl.constexpr):  # fmt: skip
    """Row numbers, validity and values [KEYS,CP] of the keys at..at+KEYS of one kind."""
    place = at + tl.arange(0, KEYS)
    channel = tl.arange(0, CP)
    if OF_WINDOW:
        number = t - W + 1 + place
        valid = (place < W) & (number >= 0)
        number = b * T + number
        base = window
    else:
        number = tl.load(ids + query * K + place, mask=place < K, other=-1)
        valid = number >= 0
        number = b * M + number
        base = rows
    key = tl.load(base + number[:, None] * C + channel[None, :], mask=valid[:, None] & (channel < C)[None, :], other=0.0)
    return number, valid, key


@triton.jit
def _take(qs, key, valid, scale, peak, denominator, acc):
    """The running softmax after one more chunk of keys."""
    s = tl.where(valid[None, :], tl.dot(qs, tl.trans(key)) * scale, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp(s - higher[:, None])
    shrink = tl.exp(peak - higher)
    return higher, denominator * shrink + tl.sum(p, 1), acc * shrink[:, None] + tl.dot(p.to(key.dtype), key)


@triton.jit
def _forward(q, window, rows, ids, sink, out, total, T, M, H, C, scale, K: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
             CP: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    b, t = query // T, query % T
    head, channel = tl.arange(0, HP), tl.arange(0, CP)
    inside = (head < H)[:, None] & (channel < C)[None, :]
    place = query * H * C + head[:, None] * C + channel[None, :]
    qs = tl.load(q + place, mask=inside, other=0.0)
    peak = tl.load(sink + head, mask=head < H, other=0.0)
    denominator = tl.full([HP], 1.0, tl.float32)
    acc = tl.zeros([HP, CP], tl.float32)
    for at in range(0, W, KEYS):
        _, valid, key = _key_chunk(window, rows, ids, query, t, b, at, M, T, C, K, W, KEYS, CP, True)
        peak, denominator, acc = _take(qs, key, valid, scale, peak, denominator, acc)
    for at in range(0, K, KEYS):
        _, valid, key = _key_chunk(window, rows, ids, query, t, b, at, M, T, C, K, W, KEYS, CP, False)
        peak, denominator, acc = _take(qs, key, valid, scale, peak, denominator, acc)
    tl.store(out + place, (acc / denominator[:, None]).to(qs.dtype), mask=inside)
    tl.store(total + query * H + head, peak + tl.log(denominator), mask=head < H)


@triton.jit
def _key_gradient(qs, grads, key, valid, totals, deltas, scale):
    """(gradient of scores [HP,KEYS], gradient of keys [KEYS,CP]) of one chunk."""
    s = tl.dot(qs, tl.trans(key)) * scale
    p = tl.where(valid[None, :], tl.exp(s - totals[:, None]), 0.0)
    d_s = p * (tl.dot(grads, tl.trans(key)) - deltas[:, None]) * scale
    d_key = tl.dot(tl.trans(d_s.to(key.dtype)), qs) + tl.dot(tl.trans(p.to(key.dtype)), grads)
    return d_s.to(key.dtype), d_key


@triton.jit
def _backward(q, window, rows, ids, grad, total, delta, d_q, d_window, d_rows, T, M, H, C, scale, K: tl.constexpr,
              W: tl.constexpr, HP: tl.constexpr, CP: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    b, t = query // T, query % T
    head, channel = tl.arange(0, HP), tl.arange(0, CP)
    inside = (head < H)[:, None] & (channel < C)[None, :]
    place = query * H * C + head[:, None] * C + channel[None, :]
    qs = tl.load(q + place, mask=inside, other=0.0)
    grads = tl.load(grad + place, mask=inside, other=0.0)
    # Padded heads: an infinite total makes their probabilities 0.
    totals = tl.load(total + query * H + head, mask=head < H, other=float("inf"))
    deltas = tl.load(delta + query * H + head, mask=head < H, other=0.0)
    acc = tl.zeros([HP, CP], tl.float32)
    for at in range(0, W, KEYS):
        number, valid, key = _key_chunk(window, rows, ids, query, t, b, at, M, T, C, K, W, KEYS, CP, True)
        d_s, d_key = _key_gradient(qs, grads, key, valid, totals, deltas, scale)
        acc += tl.dot(d_s, key)
        to = d_window + number[:, None] * C + channel[None, :]
        tl.atomic_add(to, d_key, mask=valid[:, None] & (channel < C)[None, :], sem="relaxed")
    for at in range(0, K, KEYS):
        number, valid, key = _key_chunk(window, rows, ids, query, t, b, at, M, T, C, K, W, KEYS, CP, False)
        d_s, d_key = _key_gradient(qs, grads, key, valid, totals, deltas, scale)
        acc += tl.dot(d_s, key)
        to = d_rows + number[:, None] * C + channel[None, :]
        tl.atomic_add(to, d_key, mask=valid[:, None] & (channel < C)[None, :], sem="relaxed")
    tl.store(d_q + place, acc.to(qs.dtype), mask=inside)


def _sizes(q: Tensor, ids: Tensor, window: int) -> dict[str, int]:
    heads, width = q.shape[2:]
    return {
        "K": ids.shape[2],
        "W": window,
        "HP": max(16, triton.next_power_of_2(heads)),
        "CP": max(16, triton.next_power_of_2(width)),
        "KEYS": CHUNK,
    }


def launch_forward(q: Tensor, window: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Contiguous inputs -> outputs [B,T,H,C] and totals [B,T,H] float32."""
    b, t, h, c = q.shape
    out, total = torch.empty_like(q), torch.empty(b, t, h, device=q.device)
    _forward[(b * t,)](
        q, window, rows, ids, sink, out, total, t, rows.shape[1], h, c, c**-0.5, **_sizes(q, ids, reach), num_warps=4
    )
    return out, total


def launch_backward(
    q: Tensor, window: Tensor, rows: Tensor, ids: Tensor, grad: Tensor, total: Tensor, delta: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (its dtype), window and rows (float32)."""
    b, t, h, c = q.shape
    d_q = torch.empty_like(q)
    d_window, d_rows = (torch.zeros(x.shape, device=q.device) for x in (window, rows))
    _backward[(b * t,)](
        q, window, rows, ids, grad, total, delta, d_q, d_window, d_rows, t, rows.shape[1], h, c, c**-0.5,
        **_sizes(q, ids, reach), num_warps=4,
    )  # fmt: skip
    return d_q, d_window, d_rows
