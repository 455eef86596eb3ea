"""Hyper-connection coefficients, collapse and expand in plain torch, all in float32 (facts section 2).

Shapes: N rows, S streams (4), D model width, X = S*D, F = 2S + S*S coefficient logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.elementwise import sigmoid
from kvist.kernels.linear import linear


class Mix(NamedTuple):
    """One sublayer's coefficients, float32. `comb_NSS[n, i, j]` goes from SOURCE stream i to DESTINATION stream j."""

    pre_NS: Tensor
    post_NS: Tensor
    comb_NSS: Tensor


def sinkhorn_coefficients(mixes_NF: Tensor, scale_3: Tensor, base_F: Tensor, *, streams: int, iterations: int, eps: float) -> Mix:
    """Logits [N,F] -> coefficients. The first of `iterations` is the softmax over destinations plus a column division."""
    s = streams
    pre_NS = sigmoid(mixes_NF[:, :s] * scale_3[0] + base_F[:s]) + eps
    post_NS = 2 * sigmoid(mixes_NF[:, s : 2 * s] * scale_3[1] + base_F[s : 2 * s])
    logits_NSS = (mixes_NF[:, 2 * s :] * scale_3[2] + base_F[2 * s :]).unflatten(1, (s, s))
    comb_NSS = torch.softmax(logits_NSS, dim=2) + eps
    comb_NSS = comb_NSS / (comb_NSS.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb_NSS = comb_NSS / (comb_NSS.sum(2, keepdim=True) + eps)
        comb_NSS = comb_NSS / (comb_NSS.sum(1, keepdim=True) + eps)
    return Mix(pre_NS, post_NS, comb_NSS)


def collapse(x_NSD: Tensor, pre_NS: Tensor) -> Tensor:
    """Weighted sum of the streams, [N,D] in the streams' dtype."""
    return (pre_NS.unsqueeze(2) * x_NSD.float()).sum(1).to(x_NSD.dtype)


def enter_ref(
    x_NSD: Tensor,
    pre_NS: Tensor,
    fn_FX: Tensor,
    base_F: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    product_impl: str = "ref",
) -> tuple[Tensor, Mix]:
    """See `enter`. One RMS statistic runs over all streams together and divides after the projection."""
    flat_NX = x_NSD.flatten(1).float()
    rms_N1 = torch.rsqrt(flat_NX.square().mean(1, keepdim=True) + norm_eps)
    mixes_NF = linear(flat_NX, fn_FX, impl=product_impl) * rms_N1
    mix = sinkhorn_coefficients(mixes_NF, scale_3, base_F, streams=x_NSD.shape[1], iterations=iterations, eps=hc_eps)
    x_ND = collapse(x_NSD, pre_NS).float()
    x_ND = x_ND * torch.rsqrt(x_ND.square().mean(1, keepdim=True) + norm_eps)
    return (x_ND * norm_D).to(x_NSD.dtype), mix


def leave_ref(y_ND: Tensor, x_NSD: Tensor, mix: Mix) -> Tensor:
    """X'_j = post_j y + sum_i comb[i][j] X_i in float32, rounded once."""
    mixed_NSD = torch.zeros(x_NSD.shape, dtype=torch.float32, device=x_NSD.device)
    for source in range(x_NSD.shape[1]):
        mixed_NSD = mixed_NSD + mix.comb_NSS[:, source].unsqueeze(2) * x_NSD[:, source].float().unsqueeze(1)
    return (mix.post_NS.unsqueeze(2) * y_ND.float().unsqueeze(1) + mixed_NSD).to(x_NSD.dtype)
