"""The linear map by the native library: the input quantised on the way, weights packed once, float32 sums.

Each output is one sum over inputs in ascending order, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.linear.ref import linear_ref
from kvist.kernels.native import f32, format_code, native_or_none, packed, refuse_gradients, threads
from kvist.kernels.quantise import quantise
from kvist.kernels.quantise.cpu import check_groups


def linear_cpu(x_NI: Tensor, w_OI: Tensor, form: str | None, quantised: bool, groups: int) -> Tensor:
    """See `linear`."""
    native = native_or_none()
    if native is None:
        return _without_library(x_NI, w_OI, form, groups)
    refuse_gradients(x_NI, w_OI)
    if form is not None and x_NI.dtype is not torch.float32:
        x_NI, form = quantise(x_NI, form, impl="cpu"), None
        quantised = True
    source = f32(x_NI)
    weight = packed(w_OI, groups)
    outputs, inputs = w_OI.shape
    if source.shape[-1] != inputs * groups:
        raise ValueError(f"rows of {source.shape[-1]} channels for a weight of {groups} x {inputs} inputs")
    check_groups(form, inputs * groups)
    shape = (*source.shape[:-1], outputs)
    out = torch.empty(shape, dtype=torch.float32)
    code = -1 if form is None else format_code(form)
    native.kvist_linear(
        source.data_ptr(),
        out.numel() // outputs,
        groups,
        inputs,
        weight.pointer,
        weight.kind,
        outputs,
        out.data_ptr(),
        code,
        quantised or form is not None,
        threads(),
    )
    return out if x_NI.dtype is torch.float32 else out.to(x_NI.dtype)


def _without_library(x_NI: Tensor, w_OI: Tensor, form: str | None, groups: int) -> Tensor:
    x_NI = x_NI if form is None else quantise(x_NI, form)
    x_NGI, w_GOI = x_NI.unflatten(-1, (groups, -1)), w_OI.unflatten(0, (groups, -1))
    return torch.cat([linear_ref(x_NGI[..., g, :], w_GOI[g]) for g in range(groups)], -1)
