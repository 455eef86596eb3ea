"""Experts in plain torch, one expert at a time over the rows that chose it.

Shapes: N rows, D model width, F expert width, K experts a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.elementwise import silu
from kvist.kernels.experts.bank import ExpertBank
from kvist.kernels.linear import linear


def swiglu(gate_NF: Tensor, up_NF: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) in float32."""
    gate_NF = gate_NF.float().clamp(max=limit)
    return silu(gate_NF) * up_NF.float().clamp(-limit, limit)


def experts_ref(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    bank: ExpertBank,
    *,
    limit: float,
    form: str | None,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    impl: str,
) -> Tensor:
    """See `experts`. The routing weight multiplies the hidden activation, so it is inside w2's quantisation."""
    out_ND = torch.zeros(x_ND.shape, dtype=torch.float32, device=x_ND.device)
    for portion in bank.portions(torch.unique(ids_NK[ids_NK >= 0]).tolist()):
        with portion as held:
            for index, (w1_FD, w2_DF, w3_FD) in held:
                assert isinstance(w1_FD, Tensor) and isinstance(w2_DF, Tensor) and isinstance(w3_FD, Tensor), "packed weights"
                row, slot = (ids_NK == index).nonzero(as_tuple=True)
                x_nD = x_ND[row]
                hidden_nF = swiglu(linear(x_nD, w1_FD, impl=impl), linear(x_nD, w3_FD, impl=impl), limit)
                hidden_nF = hidden_nF * weights_NK[row, slot].unsqueeze(1)
                y_nD = linear(hidden_nF.to(x_ND.dtype), w2_DF, form=form, impl=impl)
                out_ND = out_ND.index_add(0, row, y_nD.float())
    if shared is None:
        return out_ND
    w1_FD, w2_DF, w3_FD = shared
    hidden_NF = swiglu(linear(x_ND, w1_FD, impl=impl), linear(x_ND, w3_FD, impl=impl), limit)
    return out_ND + linear(hidden_NF.to(x_ND.dtype), w2_DF, form=form, impl=impl).float()
