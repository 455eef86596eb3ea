"""RMSNorm by the native library, the same bits a row whatever the batch. Must not know layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.native import f32, native_or_none, refuse_gradients, threads
from kvist.kernels.rms_norm.ref import rms_norm_ref


def rms_norm_cpu(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    native = native_or_none()
    if native is None:
        return rms_norm_ref(x, weight_D, eps)
    refuse_gradients(x, weight_D)
    source, weight = f32(x), f32(weight_D)
    out = torch.empty_like(source)
    width = len(weight)
    native.kvist_rms_norm(source.data_ptr(), weight.data_ptr(), out.data_ptr(), source.numel() // width, width, eps, threads())
    return out if x.dtype is torch.float32 else out.to(x.dtype)
