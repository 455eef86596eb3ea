"""Hyper-connection enter and leave by the native library, each one pass over the streams.

Must not know layers. Shapes as in `ref.py`; the projection is packed as float32 because its weight is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.hyper_connections.ref import Mix, enter_ref, leave_ref
from kvist.kernels.native import empty, f32, native_or_none, packed, reference_runs, refuse_gradients, threads

MOST_STREAMS = 8


def enter_cpu(
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
) -> tuple[Tensor, Mix]:
    """See `enter`. Raises ValueError for more than 8 streams."""
    native = native_or_none()
    if native is None or x_NSD.dtype is not torch.float32:  # bfloat16 rounds between collapse and norm; torch does that
        if native is not None:
            reference_runs("hyper_connections.enter", str(x_NSD.dtype))
        return enter_ref(x_NSD, pre_NS, fn_FX, base_F, scale_3, norm_D, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)
    refuse_gradients(x_NSD, fn_FX)
    n, s, d = x_NSD.shape
    if s > MOST_STREAMS:
        raise ValueError(f"{s} streams; impl 'cpu' takes at most {MOST_STREAMS}, use impl 'ref'")
    x, pre, base, scale, norm = f32(x_NSD), f32(pre_NS), f32(base_F), f32(scale_3), f32(norm_D)
    fn = packed(fn_FX, wide=True)
    h_ND, mix = empty(n, d), Mix(empty(n, s), empty(n, s), empty(n, s, s))
    native.kvist_enter(
        x.data_ptr(),
        pre.data_ptr(),
        fn.pointer,
        fn.kind,
        base.data_ptr(),
        scale.data_ptr(),
        norm.data_ptr(),
        h_ND.data_ptr(),
        mix.pre_NS.data_ptr(),
        mix.post_NS.data_ptr(),
        mix.comb_NSS.data_ptr(),
        n,
        s,
        d,
        iterations,
        hc_eps,
        norm_eps,
        threads(),
    )
    return h_ND, mix


def leave_cpu(y_ND: Tensor, x_NSD: Tensor, mix: Mix) -> Tensor:
    """See `leave`."""
    native = native_or_none()
    if native is None:
        return leave_ref(y_ND, x_NSD, mix)
    refuse_gradients(y_ND, x_NSD)
    y, x, post, comb = f32(y_ND), f32(x_NSD), f32(mix.post_NS), f32(mix.comb_NSS)
    out = torch.empty_like(x)
    n, s, d = x.shape
    native.kvist_leave(y.data_ptr(), x.data_ptr(), post.data_ptr(), comb.data_ptr(), out.data_ptr(), n, s, d, threads())
    return out if x_NSD.dtype is torch.float32 else out.to(x_NSD.dtype)
