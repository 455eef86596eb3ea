"""Group compression by the native library. Torch's softmax over an inner axis wakes all threads even for one group."""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.group_pool.ref import group_pool_ref
from kvist.kernels.native import empty, f32, native_or_none, refuse_gradients


def group_pool_cpu(kv_GRC: Tensor, gate_GRC: Tensor) -> Tensor:
    """See `group_pool`."""
    native = native_or_none()
    if native is None:
        return group_pool_ref(kv_GRC, gate_GRC)
    refuse_gradients(kv_GRC, gate_GRC)
    kv, gate = f32(kv_GRC), f32(gate_GRC)
    groups, ratio, width = kv.shape
    out_GC = empty(groups, width)
    native.kvist_group_pool(kv.data_ptr(), gate.data_ptr(), out_GC.data_ptr(), groups, ratio, width)
    return out_GC.to(kv_GRC.dtype)
