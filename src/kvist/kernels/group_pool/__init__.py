"""Compression of token groups: a per-channel softmax over a group's gates weighs its tokens (report 2.3, facts section 4).

Implementations: `ref` (torch), `cpu` (native).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.group_pool.cpu import group_pool_cpu
from kvist.kernels.group_pool.groups import Groups
from kvist.kernels.group_pool.ref import group_pool_ref

__all__ = ["Groups", "group_pool"]


def group_pool(kv_GRC: Tensor, gate_GRC: Tensor, *, impl: str = "ref") -> Tensor:
    """Channels and gate logits of G groups of R tokens, [G,R,C] float32 -> [G,C]. Raises ValueError for an unknown `impl`."""
    if impl == "ref":
        return group_pool_ref(kv_GRC, gate_GRC)
    if impl == "cpu":
        return group_pool_cpu(kv_GRC, gate_GRC)
    raise ValueError(f"group_pool has no impl {impl!r}; known: ref, cpu")
