"""Routed experts: each row runs its chosen SwiGLU experts, weighted before the down projection (facts section 7).

Implementations: `ref` (torch, expert by expert), `rows16` (the same on fixed row tiles: bits independent of the batch),
`wide` (float64 sums), `cpu` (native, a thread's rows through all their experts in one call), `gpu` (Triton, a `GpuBank`).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.experts.bank import ExpertBank, PackedBank, Portion, ResidentBank, Triple
from kvist.kernels.experts.cpu import experts_cpu
from kvist.kernels.experts.ref import experts_ref, swiglu

__all__ = ["ExpertBank", "PackedBank", "Portion", "ResidentBank", "Triple", "experts", "swiglu"]


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    bank: ExpertBank,
    *,
    limit: float,
    form: str | None,
    shared: tuple[Tensor, Tensor, Tensor] | ResidentBank | None = None,
    impl: str = "ref",
) -> Tensor:
    """Sum over each row's experts, float32 [N,D], added in ascending expert id; `shared` (w1, w2, w3) runs every row, added last.

    `x_ND` is already activation-quantised; `form` names the quantiser of the weighted hidden activation before w2 (None:
    none, and x is not quantised either). `ids_NK` int64, distinct in a row, -1 for none; `weights_NK` float32. `gpu` takes
    bfloat16 rows, a `GpuBank`, and the shared expert as a bank of one. Raises ValueError for an unknown `impl` or what it
    does not support, GpuUnavailable where `gpu` cannot run.
    """
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.experts.gpu import experts_gpu

        return experts_gpu(x_ND, ids_NK, weights_NK, bank, limit=limit, form=form, shared=shared)
    if isinstance(shared, ResidentBank):
        raise ValueError(f"impl {impl!r} takes the shared expert as three weights; a bank of one is for impl 'gpu'")
    if impl == "cpu":
        return experts_cpu(x_ND, ids_NK, weights_NK, bank, limit=limit, form=form, shared=shared)
    if impl not in ("ref", "rows16", "wide"):
        raise ValueError(f"experts have no impl {impl!r}; known: ref, rows16, wide, cpu, gpu")
    return experts_ref(x_ND, ids_NK, weights_NK, bank, limit=limit, form=form, shared=shared, impl=impl)
