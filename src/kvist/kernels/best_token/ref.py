"""The best id of each row in plain torch. Knows no sampling. Shapes: N rows, V ids, M rank."""

from __future__ import annotations

import torch
from torch import Tensor


def best_token_ref(logits_NV: Tensor, low_rank: tuple[Tensor, Tensor] | None) -> Tensor:
    """See `best_token`."""
    if low_rank is not None:
        logits_NV = logits_NV + (low_rank[0].float() @ low_rank[1].float().t()).bfloat16().float()
    return torch.where(logits_NV.isnan(), -torch.inf, logits_NV).argmax(1)
