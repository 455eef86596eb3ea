"""Rotary embedding of the last channels in adjacent pairs (report 2.3, facts section 3). Implementations: `ref`, `cpu`."""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.rotary.cpu import rotate_cpu
from kvist.kernels.rotary.ref import rotate_ref


def rotate(x: Tensor, table: tuple[Tensor, Tensor], *, back: bool = False, impl: str = "ref") -> Tensor:
    """Rotate the last 2P channels of [N, ..., C] by (cos, sin), each float32 [N,P]; `back` uses the conjugate.

    Float32 arithmetic, rounded once to the dtype of x. Raises ValueError for an unknown `impl`.
    """
    if impl == "ref":
        return rotate_ref(x, table, back=back)
    if impl == "cpu":
        return rotate_cpu(x, table, back=back)
    raise ValueError(f"rotate has no impl {impl!r}; known: ref, cpu")
