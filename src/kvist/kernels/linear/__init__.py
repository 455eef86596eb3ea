"""Linear map y = x W^T over rows.

`impl`: `ref` (one product), `rows16` (bits of a row independent of its batch), `wide` (sums in float64).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.linear.ref import linear_ref, linear_rows16, linear_wide


def linear(x_NI: Tensor, w_OI: Tensor, *, impl: str = "ref") -> Tensor:
    """Multiply rows [..., I] by a weight [O, I]; result [..., O] in the dtype of `x_NI`.

    `rows16` runs fixed tiles of 16 rows padded with zeros, so that a row's bits never depend on what shares its
    batch or chunk (design 3). `wide` is for judging other implementations: its own rounding cannot be what differs. Raises ValueError for another `impl`.
    """
    if impl == "ref":
        return linear_ref(x_NI, w_OI)
    if impl == "rows16":
        return linear_rows16(x_NI, w_OI)
    if impl == "wide":
        return linear_wide(x_NI, w_OI)
    raise ValueError(f"linear has no impl {impl!r}; known: ref, rows16, wide")
