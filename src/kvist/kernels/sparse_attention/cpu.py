"""Joint attention by the native library: keys are read where they lie, nothing is gathered or concatenated.

Shapes as in `ref.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.native import f32, i64, native_or_none, refuse_gradients, threads
from kvist.kernels.sparse_attention.ref import sparse_attention_ref


def sparse_attention_cpu(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
) -> Tensor:
    """See `sparse_attention`. bfloat16 queries: float32 arithmetic with rounded probabilities, as the reference."""
    native = native_or_none()
    if native is None:
        return sparse_attention_ref(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H)
    refuse_gradients(q_NHC, window_TC)
    q, keys, span, sink = f32(q_NHC), f32(window_TC), i64(span_N2), f32(sink_H)
    rows = None if rows_MC is None or topk_NK is None else f32(rows_MC)
    topk = None if rows is None or topk_NK is None else i64(topk_NK)
    out = torch.empty_like(q)
    n, heads, width = q.shape
    native.kvist_attend(
        q.data_ptr(),
        keys.data_ptr(),
        span.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        0 if topk is None else topk.data_ptr(),
        sink.data_ptr(),
        out.data_ptr(),
        n,
        heads,
        width,
        0 if topk is None else topk.shape[1],
        min(window, keys.shape[0]),
        q_NHC.dtype is torch.bfloat16,
        threads(),
    )
    return out if q_NHC.dtype is torch.float32 else out.to(q_NHC.dtype)
