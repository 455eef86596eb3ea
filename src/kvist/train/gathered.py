"""Joint attention over a window and selected rows by ids: each query reads its own keys and nothing else.

Owns the differentiable function on CUDA (kernels in `gathered_triton.py`); `attention.py` holds the definition it is tested
against. Must not know how rows were selected. The total (logarithm of the denominator) carries no gradient.

Shapes: B sequences, T tokens, H heads, C head width, M rows, K selected rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend_gathered(
    q_BTHC: Tensor, window_BTC: Tensor, rows_BMC: Tensor, ids_BTK: Tensor, sink_H: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,C] in the dtype of q and float32 totals [B,H,T]. `ids` int32 rows of the same sequence, -1 for none."""
    out: Tensor
    total_BTH: Tensor
    out, total_BTH = _Gathered.apply(q_BTHC, window_BTC, rows_BMC, ids_BTK, sink_H, window)
    return out, total_BTH.transpose(1, 2)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, window: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, reach: int
    ) -> tuple[Tensor, Tensor]:
        from kvist.train.gathered_triton import launch_forward

        q, window, rows, ids = (x.contiguous() for x in (q, window, rows, ids))
        out, total = launch_forward(q, window, rows, ids, sink.float(), reach)
        ctx.save_for_backward(q, window, rows, ids, sink, out, total)
        ctx.reach = reach
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from kvist.train.gathered_triton import launch_backward

        q, window, rows, ids, sink, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        delta_BTH = (grad.float() * out.float()).sum(3)
        d_q, d_window, d_rows = launch_backward(q, window, rows, ids, grad, total, delta_BTH, ctx.reach)
        d_sink = -(torch.exp(sink.float() - total) * delta_BTH).sum((0, 1)).to(sink.dtype)
        return d_q, d_window.to(window.dtype), d_rows.to(rows.dtype), None, d_sink, None
