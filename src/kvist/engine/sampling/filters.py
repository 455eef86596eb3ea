"""Temperature, top-k, top-p and min-p over a block of rows: which ids survive and with what weight, then the draw.

Owns the filters' meaning. Must not know penalties, grammars or requests. Every operation works on rows one by one or on
elements, in float64, so a row's bits never depend on its neighbours. Shapes: R rows, V vocabulary, H heads' padded length.

Meaning of one row: s = logits / temperature, e = exp(s - max s). Ids in descending order of s, the lower id first among equal
ones. Top-k keeps the first k and renormalises; top-p then keeps an id if the mass before it is below p (the first one always);
min-p then keeps an id if its probability is at least min_p times the best one's, e >= min_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvist.engine.sampling.noise import Floats, Ids, gumbel, uniform_at, uniform_stream
from kvist.engine.sampling.params import SamplingParams

Logits: TypeAlias = NDArray[np.float32]

# Sorting is for the head of a row only: ids within these factors of the best one, tried in turn until the filter is settled.
_HEADS = (2.0**-7, 2.0**-14, 2.0**-28, 0.0)
# Computing single entries of a noise stream pays below one entry in this many.
_SPARSE = 16
# Relative slack of the bound that prunes a draw, far above what rounding the noise to float32 can move (37 * 2^-24).
_SLACK = 1 + 1e-4


class Survivors(NamedTuple):
    """What the filters leave of one row: ids ascending, their scaled logits s, and e = exp(s - max s)."""

    ids: Ids
    scaled: Floats
    weights: Floats


def scale(logits_RV: Logits, params: Sequence[SamplingParams]) -> tuple[Floats, Floats]:
    """s and e = exp(s - max s) of every row, float64 [R,V]. Logits are finite or -inf, at least one a row is finite."""
    scaled_RV = logits_RV.astype(np.float64)
    scaled_RV /= np.array([p.temperature for p in params])[:, None]
    return scaled_RV, np.exp(scaled_RV - scaled_RV.max(1, keepdims=True))


def survivors(scaled_RV: Floats, weights_RV: Floats, params: Sequence[SamplingParams]) -> list[Survivors | None]:
    """What the filters leave of every row; None for a row that has no filter (all its ids stay)."""
    found: list[Survivors | None] = [None] * len(params)
    heads = []
    for row, wish in enumerate(params):
        if wish.top_k or wish.top_p < 1:
            heads.append(row)
        elif wish.min_p:
            ids = np.flatnonzero(weights_RV[row] >= wish.min_p)
            found[row] = Survivors(ids, scaled_RV[row, ids], weights_RV[row, ids])
    pending = np.array(heads, dtype=np.int64)
    for factor in _HEADS:
        if not len(pending):
            break
        settled = _try_heads(scaled_RV, weights_RV, [params[row] for row in pending], pending, factor, found)
        pending = pending[~settled]
    return found


def _try_heads(
    scaled_RV: Floats,
    weights_RV: Floats,
    params: list[SamplingParams],
    rows: Ids,
    factor: float,
    found: list[Survivors | None],
) -> NDArray[np.bool_]:
    """Filter `rows` on their ids within `factor` of the best; fills `found` and tells which rows that was enough for."""
    every = weights_RV if len(rows) == len(weights_RV) else weights_RV[rows]
    inside = every >= factor if factor else every > 0
    where, ids = np.nonzero(inside)
    counts = np.bincount(where, minlength=len(rows))
    column = np.arange(len(ids)) - np.repeat(counts.cumsum() - counts, counts)
    shape = len(rows), int(counts.max())
    ids_PH, scaled_PH, weights_PH = np.zeros(shape, np.int64), np.full(shape, -np.inf), np.zeros(shape)
    ids_PH[where, column], scaled_PH[where, column] = ids, scaled_RV[rows[where], ids]
    weights_PH[where, column] = every[where, ids]
    order_PH = np.argsort(-scaled_PH, axis=1, kind="stable")
    k_P = np.array([p.top_k or scaled_RV.shape[1] for p in params])
    keep_PH, enough_P = _keep(np.take_along_axis(weights_PH, order_PH, 1), counts, k_P, every.sum(1), params)
    kept_PH = np.zeros(shape, np.bool_)
    np.put_along_axis(kept_PH, order_PH, keep_PH, 1)
    settled = enough_P if factor else np.ones(len(rows), np.bool_)
    for at in np.flatnonzero(settled).tolist():
        kept = kept_PH[at]
        found[int(rows[at])] = Survivors(ids_PH[at, kept], scaled_PH[at, kept], weights_PH[at, kept])
    return settled


def _keep(
    sorted_PH: Floats, counts_P: Ids, k_P: Ids, total_P: Floats, params: list[SamplingParams]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which entries of descending weights stay, and for which rows no id outside could have stayed or counted."""
    rank_H = np.arange(sorted_PH.shape[1])
    running_PH = sorted_PH.cumsum(1)  # sequential, so padding behind does not touch it
    last_P = np.minimum(k_P, counts_P) - 1
    top_k_P = np.array([p.top_k > 0 for p in params])
    mass_P = np.where(top_k_P, running_PH[np.arange(len(params)), last_P], total_P)
    top_p_P, min_p_P = (np.array([getattr(p, name) for p in params]) for name in ("top_p", "min_p"))
    before_PH = running_PH - sorted_PH
    before_PH[:, 1:] = running_PH[:, :-1]
    nucleus_PH = (before_PH < (top_p_P * mass_P)[:, None]) | (top_p_P == 1)[:, None]
    keep_PH = nucleus_PH & (rank_H <= last_P[:, None]) & (sorted_PH >= min_p_P[:, None])
    keep_PH[:, 0] = True
    enough_P = np.where(top_k_P, counts_P >= k_P, running_PH[:, -1] >= top_p_P * mass_P)
    return keep_PH, enough_P


def draw(
    scaled_RV: Floats, weights_RV: Floats, left: Sequence[Survivors | None], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """argmax of s + Gumbel noise over what is left of every row, the noise keyed by (seed, position); ties: the lower id."""
    tokens = [-1] * len(left)
    few: list[int] = []
    for row, rest in enumerate(left):
        if rest is None:
            tokens[row] = _draw_open(scaled_RV[row], weights_RV[row], seeds[row], positions[row])
        elif len(rest.ids) == 1:
            tokens[row] = int(rest.ids[0])
        elif len(rest.ids) * _SPARSE > scaled_RV.shape[1]:
            noise = gumbel(uniform_stream(seeds[row], positions[row], int(rest.ids[-1]) + 1)[rest.ids])
            tokens[row] = int(rest.ids[(rest.scaled + noise).argmax()])
        else:
            few.append(row)
    if few:
        _draw_few([(row, rest) for row in few if (rest := left[row]) is not None], seeds, positions, tokens)
    return tokens


def _draw_few(rows: list[tuple[int, Survivors]], seeds: Sequence[int], positions: Sequence[int], tokens: list[int]) -> None:
    counts = np.array([len(rest.ids) for _, rest in rows])
    ids = np.concatenate([rest.ids for _, rest in rows])
    seeds_C, positions_C = (np.repeat(np.array([of[row] for row, _ in rows], np.uint64), counts) for of in (seeds, positions))
    noisy = np.concatenate([rest.scaled for _, rest in rows]) + gumbel(uniform_at(seeds_C, positions_C, ids))
    start = 0
    for (row, rest), count in zip(rows, counts.tolist(), strict=True):
        tokens[row] = int(rest.ids[noisy[start : start + count].argmax()])
        start += count


def _draw_open(scaled_V: Floats, weights_V: Floats, seed: int, position: int) -> int:
    """The draw over a whole row. The winner minimises -log(u) / e, and 1 - u <= -log(u): only ids whose 1 - u over e lies
    below some id's -log(u) / e can win, which spares the logarithms of all others."""
    uniform_V = uniform_stream(seed, position, len(scaled_V))
    with np.errstate(divide="ignore"):
        bound_V = (1 - uniform_V) / weights_V
    best = int(bound_V.argmin())
    limit = -np.log(max(uniform_V[best], 1e-300)) / weights_V[best] * _SLACK
    ids = np.flatnonzero(bound_V <= limit)
    return int(ids[(scaled_V[ids] + gumbel(uniform_V[ids])).argmax()])


def distribution(logits_V: Logits, params: SamplingParams) -> Floats:
    """float64 [V]: the probabilities from which a row is drawn; temperature 0 is the best id alone."""
    probs_V = np.zeros(len(logits_V))
    if params.temperature == 0:
        probs_V[logits_V.argmax()] = 1
        return probs_V
    scaled_RV, weights_RV = scale(logits_V[None], [params])
    rest = survivors(scaled_RV, weights_RV, [params])[0]
    ids, weights = (np.arange(len(logits_V)), weights_RV[0]) if rest is None else (rest.ids, rest.weights)
    probs_V[ids] = weights / weights.sum()
    return probs_V


def filter_logits(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """float64 logits divided by the temperature, -inf for what the filters leave out; one entry always stays."""
    scaled_RV, weights_RV = scale(logits_V.float().numpy()[None], [params])
    rest = survivors(scaled_RV, weights_RV, [params])[0]
    if rest is None:
        return torch.from_numpy(scaled_RV[0])
    kept_V = np.full(len(logits_V), -np.inf)
    kept_V[rest.ids] = rest.scaled
    return torch.from_numpy(kept_V)
