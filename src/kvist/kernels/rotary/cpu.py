"""Rotary embedding by the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.native import f32, native_or_none, refuse_gradients, threads
from kvist.kernels.rotary.ref import rotate_ref


def rotate_cpu(x: Tensor, table: tuple[Tensor, Tensor], *, back: bool) -> Tensor:
    """See `rotate`."""
    native = native_or_none()
    if native is None:
        return rotate_ref(x, table, back=back)
    refuse_gradients(x)
    source, cos, sin = f32(x), f32(table[0]), f32(table[1])
    out = torch.empty_like(source)
    rows, pairs = cos.shape
    width = source.shape[-1]
    heads = source.numel() // (rows * width) if rows else 0
    native.kvist_rotate(
        source.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), rows, heads, width, pairs, back, threads()
    )
    return out if x.dtype is torch.float32 else out.to(x.dtype)
