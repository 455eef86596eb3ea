"""Engram's lookups by the native library: n-gram rows and FP8 table rows, integers and exact values, hence one result.

The meaning stands in `model/engram.py` and `quant`. None where the library does not serve: the caller runs that. Knows no layer.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.kernels.native import native_or_none

Ints = NDArray[np.int64]


def ngram_rows(
    ids_T: Tensor,
    text_T: Tensor,
    start: int,
    classes_V: Tensor,
    vocabulary: int,
    classes: int,
    pad: int,
    multipliers: Ints,
    primes: Ints,
    offsets: Ints,
) -> Tensor | None:
    """Table rows int64 [layers, T - start, columns] of tokens (see `hash_rows`); None also for an id without a class.

    `classes_V` class of each id below `vocabulary`; `multipliers` [layers, n], `primes` and `offsets` [layers, n - 1, heads].
    """
    native = native_or_none()
    plain = ids_T.dtype is torch.int64 and text_T.dtype is torch.bool and classes_V.dtype is torch.int64
    if native is None or not plain or any(x.device.type != "cpu" or not x.is_contiguous() for x in (ids_T, text_T, classes_V)):
        return None
    if ids_T.dim() != 1 or ids_T.shape != text_T.shape or vocabulary > len(classes_V):
        return None
    layers, reach = multipliers.shape
    heads = primes.shape[2]
    out = torch.empty(layers, max(0, len(ids_T) - start), (reach - 1) * heads, dtype=torch.int64)
    arrays = (multipliers.ctypes.data, primes.ctypes.data, offsets.ctypes.data)
    sizes = (len(ids_T), start, classes_V.data_ptr(), vocabulary, classes, pad)
    bad = native.kvist_ngram_rows(ids_T.data_ptr(), text_T.data_ptr(), *sizes, *arrays, layers, reach, heads, out.data_ptr())
    return None if bad else out


def table_rows(codes_RX: Tensor, scales_RX: Tensor, ids: Tensor) -> Tensor | None:
    """Rows of a table of FP8 codes [R,X] and scales [R,X/32] as float32 [..., X]; None also for an id that it does not have."""
    native = native_or_none()
    if native is None or ids.dtype is not torch.int64 or ids.device.type != "cpu" or codes_RX.device.type != "cpu":
        return None
    rows, width = codes_RX.shape
    if not (codes_RX.is_contiguous() and scales_RX.is_contiguous() and width == 32 * scales_RX.shape[1]):
        return None
    at = ids.contiguous()
    out = torch.empty(*ids.shape, width, dtype=torch.float32)
    planes = (codes_RX.data_ptr(), scales_RX.data_ptr())
    bad = native.kvist_table_rows(*planes, rows, width, at.data_ptr(), at.numel(), out.data_ptr())
    return None if bad else out
