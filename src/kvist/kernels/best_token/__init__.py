"""The best id of each row of logits, the lower of equals; with a low-rank bias from the token before if asked (facts section 9).

Implementations: `ref` (torch), `gpu` (Triton).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.best_token.ref import best_token_ref
from kvist.kernels.device import require_gpu

__all__ = ["best_token"]


def best_token(logits_NV: Tensor, low_rank: tuple[Tensor, Tensor] | None = None, *, impl: str = "ref") -> Tensor:
    """float32 logits [N,V] -> int64 [N]. `low_rank` bfloat16 [N,M] and [V,M]: their product, rounded to bfloat16, is added.

    A NaN never wins; a row of nothing else gives 0. Raises ValueError for an unknown `impl`, GpuUnavailable where `gpu` cannot
    run.
    """
    if impl == "ref":
        return best_token_ref(logits_NV, low_rank)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.best_token.gpu import best_token_gpu

        return best_token_gpu(logits_NV, low_rank)
    raise ValueError(f"best_token has no impl {impl!r}; known: ref, gpu")
