"""Fake quantisation by the native library: the same bits as `kvist.quant`, one pass over memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvist.kernels.native import f32, format_code, native_or_none, refuse_gradients, threads

GROUP = {"fp8": 32, "mxfp4": 32, "main_fp4": 16}


def check_groups(form: str | None, width: int) -> None:
    """ValueError if rows of `width` values do not divide into the format's groups; native code would read past them."""
    if form is not None and width % GROUP[form]:
        raise ValueError(f"rows of {width} values, not a multiple of the {GROUP[form]} of a group of {form}; pad them with zeros")


def quantise_cpu(x: Tensor, form: str, reference: Callable[[Tensor], Tensor]) -> Tensor:
    """See `quantise`."""
    native = native_or_none()
    width = x.shape[-1] if x.dim() else 0
    if native is None or not width or width % GROUP[form] or x.dtype not in (torch.float32, torch.bfloat16):
        return reference(x)  # which also names what is wrong with the input
    refuse_gradients(x)
    source = f32(x)
    out = torch.empty_like(source)
    native.kvist_quantise(source.data_ptr(), out.data_ptr(), source.numel() // width, width, format_code(form), threads())
    return out if x.dtype is torch.float32 else out.to(x.dtype)
