"""Routing in plain torch.

Shapes: N rows, D model width, E experts, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.elementwise import softplus
from kvist.kernels.index_select import top_rows
from kvist.kernels.linear import linear


def scores_ref(x_ND: Tensor, gate_ED: Tensor, *, temperature: float, impl: str) -> Tensor:
    """Unbiased scores [N,E], float32."""
    return softplus(linear(x_ND.float(), gate_ED.float(), impl=impl) / temperature).sqrt()


def route_ref(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_text_E: Tensor,
    bias_image_E: Tensor,
    text_N: Tensor,
    *,
    k: int,
    temperature: float,
    normalise: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """See `route`."""
    scores_NE = scores_ref(x_ND, gate_ED, temperature=temperature, impl=impl)
    biased_NE = scores_NE.detach() + torch.where(text_N.unsqueeze(1), bias_text_E, bias_image_E)
    ids_NK = top_rows(biased_NE, torch.ones_like(biased_NE, dtype=torch.bool), k)
    # A row that is not finite chooses nothing (-1, weight 0): it must not take its neighbours' pass down with it.
    weights_NK = scores_NE.gather(1, ids_NK.clamp_min(0)).masked_fill(ids_NK < 0, 0.0)
    if normalise:
        weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + 1e-20)
    return ids_NK, weights_NK * scale
