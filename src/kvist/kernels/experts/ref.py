"""Experts in plain torch, one expert at a time over the rows that chose it.

Shapes: N rows, D model width, F expert width, K experts a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvist.kernels.elementwise import silu


class ExpertBank(Protocol):
    """Where an expert's weights come from: memory, a file, another device (design 5)."""

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(w1 [F,D] gate, w2 [D,F] down, w3 [F,D] up) of one expert."""
        ...


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
    quantise: Callable[[Tensor], Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """See `experts`. The routing weight multiplies the hidden activation, so it is inside w2's quantisation."""
    out_ND = torch.zeros(x_ND.shape, dtype=torch.float32, device=x_ND.device)
    for index in torch.unique(ids_NK[ids_NK >= 0]).tolist():
        row, slot = (ids_NK == index).nonzero(as_tuple=True)
        w1_FD, w2_DF, w3_FD = bank.expert(index)
        x_nD = x_ND[row]
        hidden_nF = swiglu(product(x_nD, w1_FD), product(x_nD, w3_FD), limit) * weights_NK[row, slot].unsqueeze(1)
        y_nD = product(quantise(hidden_nF.to(x_ND.dtype)), w2_DF)
        out_ND = out_ND.index_add(0, row, y_nD.float())
    return out_ND
