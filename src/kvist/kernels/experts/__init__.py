"""Routed experts: each row runs its chosen SwiGLU experts, weighted before the down projection (facts section 7).

Implementations: `ref` (torch, expert by expert), `rows16` (the same on fixed row tiles: bits independent of the batch), `wide` (float64 sums).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvist.kernels.experts.ref import ExpertBank, experts_ref, swiglu
from kvist.kernels.linear import linear

__all__ = ["ExpertBank", "experts", "swiglu"]


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    bank: ExpertBank,
    *,
    limit: float,
    quantise: Callable[[Tensor], Tensor],
    impl: str = "ref",
) -> Tensor:
    """Sum over each row's experts, float32 [N,D], added in ascending expert id.

    `x_ND` is already activation-quantised; `quantise` is applied to the weighted hidden activation before w2.
    `ids_NK` int64, -1 for none; `weights_NK` float32. Raises ValueError for an unknown `impl`.
    """
    if impl not in ("ref", "rows16", "wide"):
        raise ValueError(f"experts have no impl {impl!r}; known: ref, rows16, wide")
    return experts_ref(
        x_ND, ids_NK, weights_NK, bank, limit=limit, quantise=quantise, product=lambda x, w: linear(x, w, impl=impl)
    )
