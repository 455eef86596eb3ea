"""Compression of complete groups in plain torch: gates, softmax over a group, sum. Knows no requests or memory."""

from __future__ import annotations

from torch import Tensor


def group_pool_ref(kv_GRC: Tensor, gate_GRC: Tensor) -> Tensor:
    """See `group_pool`."""
    return (kv_GRC * gate_GRC.softmax(1)).sum(1)
