"""Joint window + row attention in plain torch: by tiles of queries, and query by query with one fixed shape.

Shapes: N queries, H heads, C head width, T window entries, M rows, K selected rows, L keys of a tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TILE_QUERIES = 128


def joint_softmax_output(
    scores_NHL: Tensor, valid_N1L: Tensor, sink_H: Tensor, *, whole_peaks: bool = False
) -> tuple[Tensor, Tensor]:
    """Masked scores -> (unnormalised probabilities, denominators [N,H,1]) in the dtype of the scores.

    The maximum is over real keys only; the sink enters the denominator alone. No key: probabilities 0. `whole_peaks`: the
    maximum is raised to a whole power of two, so that how a probability is rounded to bfloat16 afterwards is the same for
    every order and every cut of the keys.
    """
    scores_NHL = scores_NHL.masked_fill(~valid_N1L, float("-inf"))
    peak_NH1 = scores_NHL.amax(-1, keepdim=True).clamp_min(-1e30)
    if whole_peaks:
        peak_NH1 = (peak_NH1 / math.log(2)).ceil() * math.log(2)
    weights_NHL = torch.exp(scores_NHL - peak_NH1)
    sink_1H1 = sink_H.to(scores_NHL.dtype).view(1, -1, 1)
    return weights_NHL, weights_NHL.sum(-1, keepdim=True) + torch.exp(sink_1H1 - peak_NH1)


def _finish(out_NHC: Tensor, total_NH1: Tensor, valid_N1L: Tensor, dtype: torch.dtype) -> Tensor:
    has_keys_N11 = valid_N1L.any(-1, keepdim=True)
    return torch.where(has_keys_N11, out_NHC / total_NH1, 0.0).to(dtype)


def sparse_attention_ref(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    wide: torch.dtype = torch.float32,
    whole_peaks: bool = False,
) -> Tensor:
    """Tiles of queries: a dense band of the window, then gathered rows; scores are joined, keys are not."""
    tiles = []
    for a in range(0, q_NHC.shape[0], TILE_QUERIES):
        tile = slice(a, a + TILE_QUERIES)
        topk = None if topk_NK is None else topk_NK[tile]
        tiles.append(_tile(q_NHC[tile], window_TC, span_N2[tile], rows_MC, topk, sink_H, wide, whole_peaks))
    return torch.cat(tiles) if tiles else torch.empty_like(q_NHC)


def _tile(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    wide: torch.dtype,
    whole_peaks: bool,
) -> Tensor:
    scale, rounds = q_NHC.shape[-1] ** -0.5, q_NHC.dtype is torch.bfloat16
    low, high = int(span_N2[:, 0].min()), int(span_N2[:, 1].max())
    band_TC = window_TC[low:high]
    at_T = torch.arange(low, high, device=q_NHC.device)
    valid_NT = (at_T >= span_N2[:, :1]) & (at_T < span_N2[:, 1:])
    scores_NHL = torch.einsum("nhc,tc->nht", q_NHC.to(wide), band_TC.to(wide)) * scale
    valid_NL = valid_NT
    if rows_MC is not None and topk_NK is not None:
        picked_NKC = rows_MC[topk_NK.clamp_min(0)] if rows_MC.shape[0] else rows_MC.new_zeros(*topk_NK.shape, rows_MC.shape[1])
        row_scores_NHK = torch.einsum("nhc,nkc->nhk", q_NHC.to(wide), picked_NKC.to(wide)) * scale
        scores_NHL = torch.cat([scores_NHL, row_scores_NHK], -1)
        valid_NL = torch.cat([valid_NT, topk_NK >= 0], -1)
    weights_NHL, total_NH1 = joint_softmax_output(scores_NHL, valid_NL.unsqueeze(1), sink_H, whole_peaks=whole_peaks and rounds)
    if rounds:  # the release rounds probabilities, not their denominator
        weights_NHL = weights_NHL.bfloat16().to(wide)
    t = band_TC.shape[0]
    out_NHC = torch.einsum("nht,tc->nhc", weights_NHL[..., :t], band_TC.to(wide))
    if rows_MC is not None and topk_NK is not None:
        out_NHC = out_NHC + torch.einsum("nhk,nkc->nhc", weights_NHL[..., t:], picked_NKC.to(wide))
    return _finish(out_NHC, total_NH1, valid_NL.unsqueeze(1), q_NHC.dtype)


def sparse_attention_rows(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
    whole_peaks: bool = False,
) -> Tensor:
    """Query by query on one fixed shape: `window` slots aligned so that the newest is last, then K row slots.

    Every product has the same sizes whatever the batch or chunk, so a query's bits depend on its own keys only.
    """
    outs = []
    for n in range(q_NHC.shape[0]):
        start, stop = span_N2[n].tolist()
        keys_LC = window_TC.new_zeros(window, window_TC.shape[1])
        keys_LC[window - (stop - start) :] = window_TC[start:stop]
        valid_L = torch.arange(window, device=q_NHC.device) >= window - (stop - start)
        if rows_MC is not None and topk_NK is not None:
            safe_K = topk_NK[n].clamp_min(0)
            picked_KC = rows_MC[safe_K] if rows_MC.shape[0] else rows_MC.new_zeros(len(safe_K), rows_MC.shape[1])
            keys_LC = torch.cat([keys_LC, picked_KC])
            valid_L = torch.cat([valid_L, topk_NK[n] >= 0])
        keys_LC = torch.where(valid_L.unsqueeze(1), keys_LC, 0.0).float()
        q_HC, valid_11L = q_NHC[n].float(), valid_L.view(1, 1, -1)
        scores_1HL = (q_HC @ keys_LC.T).unsqueeze(0) * q_NHC.shape[-1] ** -0.5
        weights_1HL, total_1H1 = joint_softmax_output(
            scores_1HL, valid_11L, sink_H, whole_peaks=whole_peaks and q_NHC.dtype is torch.bfloat16
        )
        out_1HC = (weights_1HL[0].to(q_NHC.dtype).float() @ keys_LC).unsqueeze(0)
        outs.append(_finish(out_1HC, total_1H1, valid_11L, q_NHC.dtype))
    return torch.cat(outs) if outs else torch.empty_like(q_NHC)
