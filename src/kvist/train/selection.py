"""The indexer in training: who is selected (no gradient), and how its scores are taught (gradient to the indexer only).

Owns scores, selection masks, candidate pools and the distillation loss. Must not know attention itself: targets come in as
masses. Facts sections 5 and 5.1; the loss is Kvist's choice, the report gives none.

Shapes: B sequences, T tokens, n sampled queries, J index heads, I index width, M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.kernels.index_select.ref import top_rows
from kvist.train.pieces import fused

NEGATIVE = float("-inf")


def scores(q_nJI: Tensor, weight_nJ: Tensor, keys_MI: Tensor) -> Tensor:
    """I[n,m] = sum_j w relu(q.k), products in the dtype of q, the sum in float32. Returns [n,M]."""
    products = torch.einsum("nji,mi->njm", q_nJI, keys_MI).relu()
    return (products.float() * weight_nJ.float().unsqueeze(2)).sum(1)


def best(scores_nM: Tensor, allowed_nM: Tensor, k: int) -> Tensor:
    """The k best allowed entries of each row as a bool mask [n,M] (all, if there are fewer)."""
    if scores_nM.shape[1] <= k:
        return allowed_nM
    chosen = torch.zeros_like(allowed_nM)
    if scores_nM.is_cuda:
        ids = scores_nM.masked_fill(~allowed_nM, NEGATIVE).topk(k, 1, sorted=False).indices
        return chosen.scatter_(1, ids, True) & allowed_nM
    ids = top_rows(scores_nM, allowed_nM, k)
    return torch.nn.functional.pad(chosen, (0, 1)).scatter_(1, torch.where(ids < 0, chosen.shape[1], ids), True)[:, :-1]


def pool(scores_nM: Tensor, visible_nM: Tensor, config: ModelConfig) -> Tensor:
    """Rows of the candidate blocks as a bool mask [n,M]; the block of the newest visible row is always kept."""
    size, m = config.candidate_block_size, scores_nM.shape[1]
    seen = torch.nn.functional.pad(scores_nM.masked_fill(~visible_nM, NEGATIVE), (0, -m % size), value=NEGATIVE)
    blocks = seen.unflatten(1, (-1, size)).amax(2)
    count = visible_nM.sum(1, keepdim=True)
    newest = ((count - 1) // size).clamp_min(0)
    blocks = torch.where(count > 0, blocks.scatter(1, newest, float("inf")), blocks)
    kept = best(blocks, blocks > NEGATIVE, config.candidate_topk_blocks)
    return kept.repeat_interleave(size, 1)[:, :m]


@torch.no_grad()
def select(
    config: ModelConfig,
    q_BTJI: Tensor,
    weight_BTJ: Tensor,
    keys_BMI: Tensor,
    visible_TM: Tensor,
    pool_BTM: Tensor | None,
    publish: bool,
) -> tuple[Tensor, Tensor | None]:
    """Selected rows [B,T,M] and, if published, the candidate pool [B,T,M]. Sequence by sequence to bound memory."""
    chosen, pools = [], []
    one = fused(_select_one, q_BTJI.device.type)
    for b in range(len(q_BTJI)):
        allowed = visible_TM if pool_BTM is None else visible_TM & pool_BTM[b]
        rows, blocks = one(config, q_BTJI[b], weight_BTJ[b], keys_BMI[b], allowed, publish)
        chosen.append(rows)
        if publish:
            pools.append(blocks)
    return torch.stack(chosen), torch.stack(pools) if publish else None


def _select_one(
    config: ModelConfig, q_TJI: Tensor, weight_TJ: Tensor, keys_MI: Tensor, allowed_TM: Tensor, publish: bool
) -> tuple[Tensor, Tensor | None]:
    values = scores(q_TJI, weight_TJ, keys_MI)
    return best(values, allowed_TM, config.index_topk), pool(values, allowed_TM, config) if publish else None


def distillation(scores_BnM: Tensor, mass_BnM: Tensor, visible_nM: Tensor) -> Tensor:
    """Mean KL(attention mass || softmax of scores) over sampled queries that see at least two rows; float32 scalar."""
    counted = (visible_nM.sum(1) > 1).float()
    wanted = mass_BnM / mass_BnM.sum(2, keepdim=True).clamp_min(1e-20)
    logp = torch.log_softmax(scores_BnM.masked_fill(~visible_nM, -1e30), 2)
    entropy = torch.xlogy(wanted, wanted).sum(2)
    kl = entropy - (wanted * logp.masked_fill(~visible_nM, 0.0)).sum(2)
    return (kl * counted).sum() / (counted.sum() * len(kl)).clamp_min(1.0)


@torch.no_grad()
def recall(chosen_BnM: Tensor, mass_BnM: Tensor) -> Tensor:
    """Share of the visible rows' attention mass that selections hold, per query [B,n]."""
    return (mass_BnM * chosen_BnM).sum(2) / mass_BnM.sum(2).clamp_min(1e-20)
