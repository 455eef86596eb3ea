"""Joint attention over a window and selected compressed rows with one softmax and a sink (report 2.3, facts section 3).

Implementations: `ref` (torch, tiles of queries), `rows` (torch, one query at a time: bits independent of the batch),
`wide` (float64 arithmetic), `cpu` (native), `gpu` (Triton).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.sparse_attention.cpu import sparse_attention_cpu
from kvist.kernels.sparse_attention.ref import sparse_attention_ref, sparse_attention_rows


def sparse_attention(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
    impl: str = "ref",
    whole_peaks: bool = False,
) -> Tensor:
    """Attend; one latent per key serves all heads as key and value.

    `q_NHC` rotated queries; `window_TC` window entries of one request, oldest first; `span_N2` int64 [start, stop) of each
    query in it (at most `window` long, stop = the query's own entry + 1); `rows_MC` compressed rows; `topk_NK` int64 row
    ids ascending, -1 last; `sink_H` float32 logits that only enter the denominator, unscaled. Scale is C^-0.5.
    A query without keys gives 0. `whole_peaks`: in bfloat16, probabilities are rounded relative to a whole power of two, as
    `gpu` always does, not to the maximum, as the release does. Returns [N,H,C] in the dtype of q. Raises ValueError for an
    unknown `impl`, GpuUnavailable where `gpu` cannot run.
    """
    if impl == "ref":
        return sparse_attention_ref(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H, whole_peaks=whole_peaks)
    if impl == "wide":
        wide = torch.float64
        return sparse_attention_ref(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H, wide=wide, whole_peaks=whole_peaks)
    if impl == "rows":
        peaks = whole_peaks
        return sparse_attention_rows(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H, window=window, whole_peaks=peaks)
    if impl == "cpu":
        return sparse_attention_cpu(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H, window=window)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.sparse_attention.gpu import sparse_attention_gpu

        return sparse_attention_gpu(q_NHC, window_TC, span_N2, rows_MC, topk_NK, sink_H, window=window)
    raise ValueError(f"sparse_attention has no impl {impl!r}; known: ref, rows, wide, cpu, gpu")
