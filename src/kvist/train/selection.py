"""The indexer in training: who is selected (no gradient), and how its scores are taught (gradient to the indexer only).

Owns scores, selected ids, candidate pools and the distillation loss. Must not know attention itself: targets come in as
masses. Facts sections 5 and 5.1; the loss is Kvist's choice, the report gives none.

Shapes: B sequences, T tokens, n sampled queries, J index heads, I index width, M rows, K selected, Y candidate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.kernels.index_select.ref import candidate_blocks, top_rows
from kvist.train.pieces import fused

MOST_SCORES = 1 << 29
"""Scores that exist at once on CUDA: sequences are taken in groups below it."""


def scores(q_BTJI: Tensor, weight_BTJ: Tensor, keys_BMI: Tensor) -> Tensor:
    """I[b,t,m] = sum_j w relu(q.k), products in the dtype of q, the sum in float32. Returns [B,T,M]."""
    products = torch.einsum("btji,bmi->btjm", q_BTJI, keys_BMI).relu()
    return (products.float() * weight_BTJ.float().unsqueeze(3)).sum(2)


@torch.no_grad()
def select(
    config: ModelConfig,
    q_BTJI: Tensor,
    weight_BTJ: Tensor,
    keys_BMI: Tensor,
    ratio: int,
    kept_BTY: Tensor | None,
    publish: bool,
) -> tuple[Tensor, Tensor | None]:
    """Selected rows int32 [B,T,K] ascending, -1 last, and, if published, the candidate pool int8 [B,T,Y]."""
    run = _select_cuda if q_BTJI.is_cuda else _select_plain
    step = max(1, MOST_SCORES // (q_BTJI.shape[1] * max(1, keys_BMI.shape[1])))
    parts = []
    for first in range(0, len(q_BTJI), step):
        some = slice(first, first + step)
        kept = None if kept_BTY is None else kept_BTY[some]
        parts.append(run(config, q_BTJI[some], weight_BTJ[some], keys_BMI[some], ratio, kept, publish))
    pools = [pool for _, pool in parts if pool is not None]
    return torch.cat([ids for ids, _ in parts]), torch.cat(pools) if pools else None


def _select_cuda(
    config: ModelConfig, q: Tensor, weight: Tensor, keys: Tensor, ratio: int, kept: Tensor | None, publish: bool
) -> tuple[Tensor, Tensor | None]:
    from kvist.train.topk_triton import keep_blocks, select_rows

    values = fused(scores, "cuda")(q, weight, keys)
    size = config.candidate_block_size
    ids = select_rows(values, kept, ratio, config.index_topk, size)
    return ids, keep_blocks(values, ratio, config.candidate_topk_blocks, size) if publish else None


def _select_plain(
    config: ModelConfig, q: Tensor, weight: Tensor, keys: Tensor, ratio: int, kept: Tensor | None, publish: bool
) -> tuple[Tensor, Tensor | None]:
    size, t, m = config.candidate_block_size, q.shape[1], keys.shape[1]
    visible_T = (torch.arange(t, device=q.device) + 1) // ratio
    ids, pools = [], []
    for b, values in enumerate(scores(q, weight, keys)):
        allowed = torch.arange(m, device=q.device) < visible_T.unsqueeze(1)
        if kept is not None:
            allowed = allowed & kept[b].bool().repeat_interleave(size, 1)[:, :m]
        ids.append(top_rows(values, allowed, config.index_topk).int())
        if publish:
            blocks = candidate_blocks(values, visible_T, blocks=config.candidate_topk_blocks, block_size=size)
            pools.append(chosen_mask(blocks, -(-m // size)).to(torch.int8))
    return torch.stack(ids), torch.stack(pools) if publish else None


def chosen_mask(ids: Tensor, m: int) -> Tensor:
    """Ids [..., K] with -1 for none -> bool mask [..., m]."""
    mask = torch.zeros(*ids.shape[:-1], m + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter_(-1, torch.where(ids < 0, m, ids).long(), True)[..., :m]


def distillation(scores_BnM: Tensor, mass_BnM: Tensor, visible_nM: Tensor) -> Tensor:
    """Mean KL(attention mass || softmax of scores) over sampled queries that see at least two rows; float32 scalar."""
    counted = (visible_nM.sum(1) > 1).float()
    wanted = mass_BnM / mass_BnM.sum(2, keepdim=True).clamp_min(1e-20)
    logp = torch.log_softmax(scores_BnM.masked_fill(~visible_nM, -1e30), 2)
    entropy = torch.xlogy(wanted, wanted).sum(2)
    kl = entropy - (wanted * logp.masked_fill(~visible_nM, 0.0)).sum(2)
    return (kl * counted).sum() / (counted.sum() * len(kl)).clamp_min(1.0)


@torch.no_grad()
def recall(ids_BnK: Tensor, mass_BnM: Tensor) -> Tensor:
    """Share of the visible rows' attention mass that selections hold, per query [B,n]."""
    held = mass_BnM.gather(2, ids_BnK.clamp_min(0).long()) * (ids_BnK >= 0)
    return held.sum(2) / mass_BnM.sum(2).clamp_min(1e-20)
