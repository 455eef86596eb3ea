"""Index scores, exact top-k with a tie rule, and candidate blocks in plain torch.

Shapes: N queries, J index heads, I index width, M rows, K picked rows, B blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_SCORES = (1 << 22) // 3
"""With the copies that scoring makes, float32 scores of a tile take 16 MiB: what an engine plans for them."""
KEY_CHUNK = 256


class Selection(NamedTuple):
    """`topk_NK` int64 row ids; `candidates_NB` int64 block ids if published. Both ascending, -1 last."""

    topk_NK: Tensor
    candidates_NB: Tensor | None


def index_scores(q_NJI: Tensor, weight_NJ: Tensor, keys_MI: Tensor) -> Tensor:
    """I[n,m] = sum_j w[n,j] relu(q[n,j] . k[m]), every step in the dtype of q, as the release does. Returns [N,M]."""
    products_NJM = torch.einsum("nji,mi->njm", q_NJI, keys_MI)
    return (products_NJM.relu() * weight_NJ.unsqueeze(-1)).sum(1)


def top_rows(scores_NM: Tensor, allowed_NM: Tensor, k: int) -> Tensor:
    """Ids of the k best allowed entries a row, ascending, -1 padded, [N,k]. Equal scores: the lower id wins."""
    n, m = scores_NM.shape
    out_Nk = torch.full((n, k), -1, dtype=torch.int64, device=scores_NM.device)
    if m == 0 or n == 0:
        return out_Nk
    scores_NM = scores_NM.masked_fill(~allowed_NM, float("-inf"))
    if m <= k:
        take_NM = allowed_NM
    else:
        cut_N1 = scores_NM.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
        above_NM = (scores_NM > cut_N1) & allowed_NM
        tied_NM = (scores_NM == cut_N1) & allowed_NM
        room_N1 = k - above_NM.sum(1, keepdim=True)
        take_NM = above_NM | (tied_NM & (tied_NM.cumsum(1) <= room_N1))
    row, col = take_NM.nonzero(as_tuple=True)
    place = take_NM.cumsum(1)[row, col] - 1
    out_Nk[row, place] = col
    return out_Nk


def candidate_blocks(scores_NM: Tensor, visible_N: Tensor, *, blocks: int, block_size: int) -> Tensor:
    """Ids of the best `blocks` blocks by their best visible score; the block of the newest visible row is always kept."""
    m = scores_NM.shape[1]
    seen_NM = torch.arange(m, device=scores_NM.device) < visible_N.unsqueeze(1)
    masked_NM = scores_NM.masked_fill(~seen_NM, float("-inf"))
    best_NB = F.pad(masked_NM, (0, -m % block_size), value=float("-inf")).unflatten(1, (-1, block_size)).amax(2)
    newest_N1 = ((visible_N - 1) // block_size).clamp_min(0).unsqueeze(1)
    has_row_N1 = (visible_N > 0).unsqueeze(1)
    forced_NB = best_NB.scatter(1, newest_N1, float("inf")) if best_NB.shape[1] else best_NB
    best_NB = torch.where(has_row_N1, forced_NB, best_NB)
    return top_rows(best_NB, best_NB > float("-inf"), blocks)


def pool_mask(pool_NB: Tensor, m: int, block_size: int) -> Tensor:
    """Row mask [N,M] of candidate block ids."""
    blocks = -(-m // block_size)
    hit_NB = torch.zeros(pool_NB.shape[0], blocks + 1, dtype=torch.bool, device=pool_NB.device)
    hit_NB.scatter_(1, torch.where(pool_NB >= 0, pool_NB, blocks), True)
    return hit_NB[:, :blocks].repeat_interleave(block_size, dim=1)[:, :m]


def _choose(
    scores_NM: Tensor, visible_N: Tensor, k: int, block_size: int, pool_NB: Tensor | None, publish_blocks: int
) -> Selection:
    m = scores_NM.shape[1]
    allowed_NM = torch.arange(m, device=scores_NM.device) < visible_N.unsqueeze(1)
    if pool_NB is not None:
        allowed_NM = allowed_NM & pool_mask(pool_NB, m, block_size)
    candidates = None
    if publish_blocks:
        candidates = candidate_blocks(scores_NM, visible_N, blocks=publish_blocks, block_size=block_size)
    return Selection(top_rows(scores_NM, allowed_NM, k), candidates)


def _join(parts: list[Selection], k: int, publish_blocks: int, like: Tensor) -> Selection:
    if not parts:
        blank = like.new_empty(0, k, dtype=torch.int64)
        return Selection(blank, like.new_empty(0, publish_blocks, dtype=torch.int64) if publish_blocks else None)
    blocks = [part.candidates_NB for part in parts if part.candidates_NB is not None]
    return Selection(torch.cat([part.topk_NK for part in parts]), torch.cat(blocks) if blocks else None)


def select_ref(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
) -> Selection:
    """See `select`. Queries run in tiles so that the score matrix stays below `TILE_SCORES` entries a head set."""
    step = max(1, TILE_SCORES // max(1, keys_MI.shape[0] * q_NJI.shape[1]))
    parts = []
    for a in range(0, q_NJI.shape[0], step):
        tile = slice(a, a + step)
        keys = keys_MI[: int(visible_N[tile].max())]
        scores = index_scores(q_NJI[tile], weight_NJ[tile], keys)
        pool = None if pool_NB is None else pool_NB[tile]
        parts.append(_choose(scores, visible_N[tile], k, block_size, pool, publish_blocks))
    return _join(parts, k, publish_blocks, q_NJI)


def select_wide(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
) -> Selection:
    """`select_ref` with products summed in float64 (float32 models; bfloat16 keeps the release's roundings)."""
    if q_NJI.dtype is torch.float32:
        q_NJI, weight_NJ, keys_MI = q_NJI.double(), weight_NJ.double(), keys_MI.double()
    return select_ref(
        q_NJI,
        weight_NJ,
        keys_MI,
        visible_N,
        k=k,
        block_size=block_size,
        pool_NB=pool_NB,
        publish_blocks=publish_blocks,
    )


def select_rows(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
) -> Selection:
    """Query by query against key chunks of one fixed size padded with zeros: a score's bits depend on its pair only."""
    m = keys_MI.shape[0]
    padded_MI = F.pad(keys_MI, (0, 0, 0, -m % KEY_CHUNK))
    parts = []
    for n in range(q_NJI.shape[0]):
        row = slice(n, n + 1)
        scores = [index_scores(q_NJI[row], weight_NJ[row], chunk) for chunk in padded_MI.split(KEY_CHUNK)] if m else []
        scores_1M = torch.cat(scores, 1)[:, :m] if scores else q_NJI.new_zeros(1, 0)
        pool = None if pool_NB is None else pool_NB[row]
        parts.append(_choose(scores_1M, visible_N[row], k, block_size, pool, publish_blocks))
    return _join(parts, k, publish_blocks, q_NJI)
