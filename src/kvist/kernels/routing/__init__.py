"""Expert routing: sqrt(softplus) scores, a bias that only selects, normalised weights (facts section 7).

Implementations: `ref`, `rows16`, `wide` (torch, by the product's name) `cpu` (native, fused) and `gpu` (Triton,
one launch).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.routing.cpu import route_cpu
from kvist.kernels.routing.ref import route_ref, scores_ref

__all__ = ["route", "scores_ref"]


def route(
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
    impl: str = "ref",
) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [N,k] ascending and their weights float32 [N,k]. Equal biased scores: the lower expert wins.

    `text_N` bool chooses between the two biases. `k` may not exceed E. Raises ValueError for that or an unknown `impl`.
    """
    if k > gate_ED.shape[0]:
        raise ValueError(f"cannot choose {k} of {gate_ED.shape[0]} experts")
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.routing.gpu import route_gpu

        return route_gpu(
            x_ND,
            gate_ED,
            bias_text_E,
            bias_image_E,
            text_N,
            k=k,
            temperature=temperature,
            normalise=normalise,
            scale=scale,
        )
    run = route_cpu if impl == "cpu" else route_ref
    return run(
        x_ND,
        gate_ED,
        bias_text_E,
        bias_image_E,
        text_N,
        k=k,
        temperature=temperature,
        normalise=normalise,
        scale=scale,
        impl=impl,
    )
