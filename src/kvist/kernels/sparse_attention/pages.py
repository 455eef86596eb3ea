"""Attention of a ragged batch over window rings and packed rows in pages: one native call for all requests.

The bits are those of `sparse_attention(impl="cpu")` on unpacked rows and copied windows. Shapes as in `ref.py`; S segments.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvist.kernels.native import f32, i64, native_or_none, refuse_gradients, threads
from kvist.kernels.native.pages import PageSource, WindowRing


def attend_pages(
    source: PageSource | None,
    ring: WindowRing,
    segments_S5: Tensor,
    q_NHC: Tensor,
    window_NC: Tensor,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    block: bool = False,
) -> Tensor:
    """Attend and, unless `block`, keep the new entries in the ring. `block`: every query sees its whole segment.

    `source` None or `topk_NK` None: window only. Returns float32 [N,H,C]. AssertionError names a segment whose
    ring has lost entries that it needs.
    """
    native = native_or_none()
    assert native is not None and q_NHC.dtype is torch.float32, "callers use the generic path otherwise"
    refuse_gradients(q_NHC, window_NC)
    q, window, sink = f32(q_NHC), f32(window_NC), f32(sink_H)
    topk = None if source is None or topk_NK is None else i64(topk_NK)
    out = torch.empty_like(q)
    failed = native.kvist_pages_attend(
        0 if source is None or topk is None else ctypes.addressof(source),
        ctypes.addressof(ring),
        segments_S5.data_ptr(),
        len(segments_S5),
        q.data_ptr(),
        window.data_ptr(),
        0 if topk is None else topk.data_ptr(),
        0 if topk is None else topk.shape[1],
        sink.data_ptr(),
        out.data_ptr(),
        q.shape[1],
        block,
        threads(),
    )
    if failed:
        raise lost_window(segments_S5, failed)
    return out


def lost_window(segments_S5: Tensor, failed: int) -> AssertionError:
    """What native code means by the number 1 + segment."""
    slot, _, _, position, _ = segments_S5[failed - 1].tolist()
    return AssertionError(
        f"slot {slot}, position {position}: the ring has lost window entries it needs; a pass took back too many rows"
    )


def keep_window(ring: WindowRing, segments_S5: Tensor, window_NC: Tensor) -> None:
    """Write new window entries [N,C] without attending."""
    native = native_or_none()
    assert native is not None, "callers use the generic path where there is no library"
    window = f32(window_NC)
    native.kvist_rings_write(ctypes.addressof(ring), segments_S5.data_ptr(), len(segments_S5), window.data_ptr())
