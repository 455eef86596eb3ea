"""The row-wise parts of a block as functions of plain tensors, so that each compiles once and serves every layer.

Owns the arithmetic between the products; equals `kvist.model` module by module (tested). Must not know sequences, layers'
schedule or losses. Facts sections 2, 3, 7, 8.

Shapes: N rows, S streams, D model width, H heads, C head width, Q query rank, J index heads, I index width, E experts, F expert
width, X Engram values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvist.kernels.rotary.ref import rotate_ref as rotate
from kvist.train.quantisers import fp8, mxfp4

Table = tuple[Tensor, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in float32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def act(x: Tensor, quantise: bool) -> Tensor:
    """The FP8 quantiser of linear inputs and window entries, if on."""
    return fp8(x) if quantise else x


def enter(
    x_NSD: Tensor, pre_NS: Tensor, fn_FX: Tensor, base_F: Tensor, scale_3: Tensor, norm_D: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Streams -> normed input [N,D], pre [N,S], post [N,S] and the logits [N,S,S] still to be balanced."""
    s = x_NSD.shape[1]
    flat = x_NSD.flatten(1).float()
    mixes = (flat @ fn_FX.T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)
    pre = torch.sigmoid(mixes[:, :s] * scale_3[0] + base_F[:s]) + hc_eps
    post = 2 * torch.sigmoid(mixes[:, s : 2 * s] * scale_3[1] + base_F[s : 2 * s])
    logits = (mixes[:, 2 * s :] * scale_3[2] + base_F[2 * s :]).unflatten(1, (s, s))
    h = (pre_NS.unsqueeze(2) * x_NSD.float()).sum(1).to(x_NSD.dtype)
    return norm(h, norm_D, eps), pre, post, logits


def leave(y_ND: Tensor, x_NSD: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i comb[i][j] X_i."""
    x = x_NSD.float()
    mixed = sum(comb_NSS[:, i].unsqueeze(2) * x[:, i].unsqueeze(1) for i in range(x.shape[1]))
    return (post_NS.unsqueeze(2) * y_ND.float().unsqueeze(1) + mixed).to(x_NSD.dtype)


def project(
    h_ND: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    table: Table,
    eps: float,
    quantise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N,H,C], window entries [N,C] and the query latent [N,Q]."""
    x = act(h_ND, quantise)
    rank = norm(F.linear(x, wq_a), q_norm, eps)
    width = kv_norm.shape[0]
    q = rotate(F.linear(act(rank, quantise), wq_b).unflatten(1, (-1, width)), table)
    kv = act(rotate(norm(F.linear(x, wkv), kv_norm, eps), table), quantise)
    return q, kv, rank


def project_out(out_NHC: Tensor, wo_a: Tensor, wo_b: Tensor, table: Table, groups: int, quantise: bool) -> Tensor:
    """Attention outputs [N,H,C] turned back -> [N,D]."""
    grouped = rotate(out_NHC, table, back=True).flatten(1).unflatten(1, (groups, -1))
    z = torch.einsum("ngx,gox->ngo", grouped, wo_a.unflatten(0, (groups, -1))).flatten(1)
    return F.linear(act(z, quantise), wo_b)


def index_queries(
    rank_NQ: Tensor, h_ND: Tensor, wq_b: Tensor, weights: Tensor, table: Table, heads: int, quantise: bool
) -> tuple[Tensor, Tensor]:
    """Index queries [N,J,I] and head weights [N,J]."""
    q = rotate(F.linear(act(rank_NQ, quantise), wq_b).unflatten(1, (heads, -1)), table)
    weight = F.linear(h_ND, weights) * (q.shape[2] ** -0.5 * heads**-0.5)
    return mxfp4(q) if quantise else q, weight


def route(h_ND: Tensor, gate_ED: Tensor, bias_NE: Tensor, active: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Dense routing weights [N,E] (0 where not chosen), the choice as a bool mask, and the raw scores, float32."""
    scores = F.softplus(h_ND.float() @ gate_ED.T).sqrt()
    ids = (scores.detach() + bias_NE).topk(active, 1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
    kept = torch.where(chosen, scores, 0.0)
    return kept / (kept.sum(1, keepdim=True) + 1e-20) * scale, chosen, scores


def moe(
    h_ND: Tensor,
    gate_ED: Tensor,
    bias_NE: Tensor,
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor],
    active: int,
    scale: float,
    limit: float,
    quantise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All experts on all rows, weighted by the router, plus the shared one. Returns y [N,D], choices and scores [N,E].

    At this width two wide products beat any gather. Routed: w1, w3 [E,F,D], w2 [E,D,F], in the order w1, w2, w3.
    """
    weights, chosen, scores = route(h_ND, gate_ED, bias_NE, active, scale)
    x = act(h_ND, quantise)
    w1, w2, w3 = routed
    gate = F.linear(x, torch.cat([w1.flatten(0, 1), shared[0]])).float().clamp(max=limit)
    up = F.linear(x, torch.cat([w3.flatten(0, 1), shared[2]])).float().clamp(-limit, limit)
    hidden = (F.silu(gate) * up).unflatten(1, (-1, w1.shape[1]))
    every = torch.cat([weights, torch.ones_like(weights[:, :1])], 1)
    hidden = act((hidden * every.unsqueeze(2)).flatten(1).to(h_ND.dtype), quantise)
    down = torch.cat([w2.transpose(0, 1).flatten(1), shared[1]], 1)
    return F.linear(hidden, down), chosen, scores


def engram(
    x_NSD: Tensor,
    found_NX: Tensor,
    wkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    text_N: Tensor | None,
    eps: float,
    quantise: bool,
) -> Tensor:
    """Streams with the memory added where the gates open."""
    s, d = q_weight.shape
    kv = F.linear(act(found_NX, quantise), wkv).unflatten(1, (s + 1, d)).float()
    key, value, x = kv[:, :s], kv[:, s:], x_NSD.float()
    dot = (x * (q_weight.float() * k_weight.float()) * key).sum(2)
    dot = dot * torch.rsqrt(x.square().mean(2) + eps) * torch.rsqrt(key.square().mean(2) + eps) * d**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    gate = gate if text_N is None else gate * text_N.unsqueeze(1)
    return (x + gate.unsqueeze(2) * value).to(x_NSD.dtype)


def token_losses(x_NSD: Tensor, pre_NS: Tensor, norm_D: Tensor, head_VD: Tensor, targets_N: Tensor, eps: float) -> Tensor:
    """Cross-entropy of every row, nats, float32 [N]: final collapse, norm, head."""
    h = (pre_NS.unsqueeze(2) * x_NSD.float()).sum(1).to(x_NSD.dtype)
    logits = norm(h, norm_D, eps).float() @ head_VD.T
    return torch.logsumexp(logits, 1) - logits.gather(1, targets_N.unsqueeze(1)).squeeze(1)


@lru_cache(maxsize=64)
def fused(fn: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The function, compiled for fixed shapes on CUDA and left alone elsewhere."""
    if device_type != "cuda":
        return fn
    allow_variants()
    return torch.compile(fn, dynamic=False)


def allow_variants() -> None:
    """A piece is compiled once for each stage's shapes; past the default limit it would silently run unfused."""
    torch._dynamo.config.recompile_limit = 64
