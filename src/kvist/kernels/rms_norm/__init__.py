"""RMSNorm over the last dimension. Implementations: `ref` (torch), `cpu` (native), `gpu` (Triton)."""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.rms_norm.cpu import rms_norm_cpu
from kvist.kernels.rms_norm.ref import rms_norm_ref


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, impl: str = "ref") -> Tensor:
    """x * rsqrt(mean x^2 + eps) * weight in float32, rounded once to the dtype of x; [..., D] -> [..., D].

    Raises ValueError for an unknown `impl`.
    """
    if impl == "ref":
        return rms_norm_ref(x, weight_D, eps)
    if impl == "cpu":
        return rms_norm_cpu(x, weight_D, eps)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.quantise.gpu import rows_gpu

        return rows_gpu(x, norm=(weight_D, eps))
    raise ValueError(f"rms_norm has no impl {impl!r}; known: ref, cpu, gpu")
