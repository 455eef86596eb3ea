"""Single-pass manifold hyper-connections (report 2.4.1): what happens to the four streams around a sublayer.

`enter` turns the streams into the sublayer's normed input and this sublayer's coefficients; `leave` folds the sublayer's
output back. Implementations: `ref` (torch), `rows16` and `wide` (the projection on fixed row tiles, or summed in float64), `cpu`
(native, fused), `gpu` (Triton; `step` is one pass over the streams). Facts section 2.
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.hyper_connections.cpu import enter_cpu, leave_cpu
from kvist.kernels.hyper_connections.ref import Mix, enter_ref, leave_ref, sinkhorn_coefficients

__all__ = ["Mix", "enter", "leave", "sinkhorn_coefficients", "step"]


def enter(
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
    impl: str = "ref",
) -> tuple[Tensor, Mix]:
    """Streams [N,S,D] and the previous sublayer's `pre` [N,S] -> normed input [N,D] and this sublayer's `Mix`.

    The input is collapsed with the *previous* sublayer's `pre` (that is the single pass); the coefficients come from the
    same streams in float32. Raises ValueError for an unknown `impl`.
    """
    if impl == "cpu":
        return enter_cpu(x_NSD, pre_NS, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.hyper_connections.gpu import enter_gpu

        return enter_gpu(x_NSD, pre_NS, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)
    if impl not in ("ref", "rows16", "wide"):
        raise ValueError(f"hyper-connections have no impl {impl!r}; known: ref, rows16, wide, cpu, gpu")
    return enter_ref(
        x_NSD,
        pre_NS,
        fn_FX,
        base_F,
        scale_3,
        norm_D,
        iterations=iterations,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        product_impl=impl,
    )


def leave(y_ND: Tensor, x_NSD: Tensor, mix: Mix, *, impl: str = "ref") -> Tensor:
    """Sublayer output [N,D] and its input streams [N,S,D] -> next streams [N,S,D] in the streams' dtype."""
    if impl == "cpu":
        return leave_cpu(y_ND, x_NSD, mix)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.hyper_connections.gpu import leave_gpu

        return leave_gpu(y_ND, x_NSD, mix)
    if impl not in ("ref", "rows16", "wide"):
        raise ValueError(f"hyper-connections have no impl {impl!r}; known: ref, rows16, wide, cpu, gpu")
    return leave_ref(y_ND, x_NSD, mix)


def step(
    y_ND: Tensor,
    x_NSD: Tensor,
    mix: Mix,
    fn_FX: Tensor,
    base_F: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    impl: str = "ref",
) -> tuple[Tensor, Tensor, Mix]:
    """Leave a sublayer and enter the next: next streams, its normed input, its `Mix`. `gpu` reads the streams once."""
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.hyper_connections.gpu import pass_gpu

        entered = pass_gpu(
            y_ND, x_NSD, mix, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps
        )
        return entered.x_NSD, entered.h_ND, entered.mix
    x_NSD = leave(y_ND, x_NSD, mix, impl=impl)
    h_ND, after = enter(
        x_NSD, mix.pre_NS, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps, impl=impl
    )
    return x_NSD, h_ND, after
