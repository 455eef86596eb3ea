"""Linear map y = x W^T over rows, with the input's quantiser and the groups of a block-diagonal weight as options.

`impl`: `ref` (one product), `rows16` (bits of a row independent of its batch), `wide` (sums in float64), `cpu` (native), `gpu`
(Triton; stored weights as panels).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight, require_gpu
from kvist.kernels.linear.cpu import linear_cpu
from kvist.kernels.linear.ref import linear_ref, linear_rows16, linear_wide
from kvist.kernels.quantise import quantise

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ref": linear_ref, "rows16": linear_rows16, "wide": linear_wide}


def linear(
    x_NI: Tensor,
    w_OI: Tensor | PanelWeight,
    *,
    form: str | None = None,
    quantised: bool = False,
    groups: int = 1,
    impl: str = "ref",
) -> Tensor:
    """Multiply rows [..., I] by a weight [O, I]; result [..., O] in the dtype of `x_NI`.

    `form` names a quantiser the input passes first. `quantised`: the input has passed the FP8 quantiser already (a
    promise that lets `cpu` use bfloat16 products, which are exact then). `groups` G > 1: x is [..., G * I] and part g of it
    meets rows g * O/G to (g + 1) * O/G of the weight. `rows16` runs fixed tiles of 16 rows padded with zeros, so that a
    row's bits never depend on what shares its batch or chunk (design 3). `wide` is for judging other implementations: its
    own rounding cannot be what differs. `gpu` takes bfloat16 rows; a `PanelWeight` (stored FP8 or FP4) runs nowhere else.
    Raises ValueError for another `impl` or what it does not support, GpuUnavailable where `gpu` cannot run.
    """
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.linear.gpu import linear_gpu

        return linear_gpu(x_NI, w_OI, form, groups)
    if isinstance(w_OI, PanelWeight):
        raise ValueError(f"panel weights are read by impl 'gpu', not {impl!r}; unpack them for other implementations")
    if impl == "cpu":
        return linear_cpu(x_NI, w_OI, form, quantised, groups)
    product = _PRODUCTS.get(impl)
    if product is None:
        raise ValueError(f"linear has no impl {impl!r}; known: {', '.join(_PRODUCTS)}, cpu, gpu")
    if form is not None:
        x_NI = quantise(x_NI, form)
    if groups == 1:
        return product(x_NI, w_OI)
    x_NGI, w_GOI = x_NI.unflatten(-1, (groups, -1)), w_OI.unflatten(0, (groups, -1))
    return torch.cat([product(x_NGI[..., g, :], w_GOI[g]) for g in range(groups)], -1)
