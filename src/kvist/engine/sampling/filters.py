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

from kvist.engine.sampling.noise import gumbel
from kvist.engine.sampling.params import SamplingParams
from kvist.kernels.keyed_uniform import Floats, Ids, uniform_at, uniform_stream

Logits: TypeAlias = NDArray[np.float32]

# First try: only ids within this factor of the best one, if they are few, are sorted: peaked rows, all at once.
_HEAD, _HEAD_IDS = 2.0**-10, 1024
# Second try, for flat rows: ids are counted and weighed in buckets by the leading bits of e, 32 to the octave, and only the
# buckets in which a filter ends are sorted. The last bucket holds all below 2^-60.
_BUCKET_SHIFT, _LAST_BUCKET = 47, 60 * 32
_TOP_BUCKET = int(np.float64(1).view(np.int64)) >> _BUCKET_SHIFT
_LEAST = -700.0
# Computing single entries of a noise stream pays below one entry in this many.
_SPARSE = 6
# Relative slack of the bound that prunes a draw, far above what rounding the noise to float32 can move (37 * 2^-24).
_SLACK = 1 + 1e-4


class Survivors(NamedTuple):
    """What the filters leave of one row: ids ascending, their scaled logits s, and e = exp(s - max s)."""

    ids: Ids
    scaled: Floats
    weights: Floats


def scale(logits_RV: Logits, params: Sequence[SamplingParams]) -> tuple[Floats, Floats]:
    """s and e = exp(s - max s) of every row, float64 [R,V]; e below exp(-700) is 0. Logits are finite or -inf, at least one a
    row is finite."""
    scaled_RV = logits_RV.astype(np.float64)
    scaled_RV /= np.array([p.temperature for p in params])[:, None]
    weights_RV = scaled_RV - scaled_RV.max(1, keepdims=True)
    if weights_RV.min() < _LEAST:
        # exp is several times slower where it underflows, as it does for all that a grammar forbids
        inside = weights_RV >= _LEAST
        np.maximum(weights_RV, _LEAST, out=weights_RV)
        np.exp(weights_RV, out=weights_RV)
        weights_RV *= inside
    else:
        np.exp(weights_RV, out=weights_RV)
    return scaled_RV, weights_RV


def survivors(scaled_RV: Floats, weights_RV: Floats, params: Sequence[SamplingParams]) -> list[Survivors | None]:
    """What the filters leave of every row; None for a row that has no filter (all its ids stay)."""
    found: list[Survivors | None] = [None] * len(params)
    heads = []
    for row, wish in enumerate(params):
        if wish.top_k or wish.top_p < 1:
            heads.append(row)
        elif wish.min_p:
            found[row] = _take(scaled_RV[row], weights_RV[row], np.flatnonzero(weights_RV[row] >= wish.min_p))
    if heads:
        _settle_heads(scaled_RV, weights_RV, [params[row] for row in heads], np.array(heads), found)
    for row in heads:
        if found[row] is None:
            kept_V = _settle_flat(scaled_RV[row], weights_RV[row], params[row])
            found[row] = _take(scaled_RV[row], weights_RV[row], np.flatnonzero(kept_V))
    return found


def _take(scaled_V: Floats, weights_V: Floats, ids: Ids) -> Survivors:
    return Survivors(ids, scaled_V[ids], weights_V[ids])


def _settle_heads(
    scaled_RV: Floats, weights_RV: Floats, params: list[SamplingParams], rows: Ids, found: list[Survivors | None]
) -> None:
    """Filter `rows` on their ids within `_HEAD` of the best; fills `found` for the rows for which that is enough."""
    inside_RV = weights_RV >= _HEAD
    few = np.count_nonzero(inside_RV, axis=1)[rows] <= _HEAD_IDS
    rows, params = rows[few], [p for p, fits in zip(params, few.tolist(), strict=True) if fits]
    if not len(rows):
        return
    k_P = np.array([p.top_k for p in params])
    top_p_P, min_p_P = (np.array([getattr(p, name) for p in params]) for name in ("top_p", "min_p"))
    total_P = weights_RV.sum(1)[rows]
    line, ids = np.nonzero(inside_RV if len(rows) == len(inside_RV) else inside_RV[rows])
    counts = np.bincount(line, minlength=len(rows))
    column = np.concatenate([np.arange(count) for count in counts])
    # a little more mass than needed, so that no id outside could stay whatever the order of the sum
    mass_P = np.bincount(line, weights_RV[rows[line], ids], len(rows))
    enough_P = np.where(k_P > 0, counts >= k_P, mass_P > top_p_P * total_P * (1 + 1e-9))
    ids_PH = np.zeros((len(rows), int(counts.max())), np.int64)
    scaled_PH, weights_PH = np.full(ids_PH.shape, -np.inf), np.zeros(ids_PH.shape)
    ids_PH[line, column] = ids
    scaled_PH[line, column] = scaled_RV[rows[line], ids]
    weights_PH[line, column] = weights_RV[rows[line], ids]
    order_PH = np.argsort(-scaled_PH, axis=1, kind="stable")
    keep_PH = _keep(np.take_along_axis(weights_PH, order_PH, 1), counts, k_P, total_P, top_p_P, min_p_P)
    kept_PH = np.zeros(ids_PH.shape, np.bool_)
    np.put_along_axis(kept_PH, order_PH, keep_PH, 1)
    for at in np.flatnonzero(enough_P).tolist():
        kept = kept_PH[at]
        found[int(rows[at])] = Survivors(ids_PH[at, kept], scaled_PH[at, kept], weights_PH[at, kept])


def _keep(sorted_PH: Floats, counts_P: Ids, k_P: Ids, total_P: Floats, top_p_P: Floats, min_p_P: Floats) -> NDArray[np.bool_]:
    """Which entries of descending weights stay."""
    running_PH = sorted_PH.cumsum(1)  # sequential, so padding behind does not touch it
    last_P = np.where(k_P > 0, np.minimum(k_P, counts_P), counts_P) - 1
    mass_P = np.where(k_P > 0, running_PH[np.arange(len(last_P)), last_P], total_P)
    before_PH = np.zeros_like(running_PH)
    before_PH[:, 1:] = running_PH[:, :-1]
    nucleus_PH = (before_PH < (top_p_P * mass_P)[:, None]) | (top_p_P == 1)[:, None]
    keep_PH = nucleus_PH & (np.arange(sorted_PH.shape[1]) <= last_P[:, None]) & (sorted_PH >= min_p_P[:, None])
    keep_PH[:, 0] = True
    return keep_PH


def _settle_flat(scaled_V: Floats, weights_V: Floats, params: SamplingParams) -> NDArray[np.bool_]:
    """Which ids of one row stay, without sorting it."""
    bucket_V = np.minimum(_TOP_BUCKET - (weights_V.view(np.int64) >> _BUCKET_SHIFT), _LAST_BUCKET)
    mass_B = np.bincount(bucket_V, weights_V, _LAST_BUCKET + 1).cumsum()
    total, last, kept = weights_V.sum(), _LAST_BUCKET + 1, np.zeros(0, np.int64)
    if params.top_k:
        count_B = np.bincount(bucket_V, minlength=_LAST_BUCKET + 1).cumsum()
        last = int(count_B.searchsorted(params.top_k))  # the bucket in which the k-th id lies
        if last <= _LAST_BUCKET:
            kept = _sorted(scaled_V, bucket_V == last)[: params.top_k - (count_B[last - 1] if last else 0)]
            total = (mass_B[last - 1] if last else 0.0) + weights_V[kept].sum()
    if params.top_p < 1:
        end = int(mass_B.searchsorted(params.top_p * total))  # the first bucket at whose end the mass is reached
        if end < last:
            last, kept = end, _sorted(scaled_V, bucket_V == end)
        base = mass_B[last - 1] if last else 0.0
        before = base + np.concatenate([[0.0], weights_V[kept[:-1]].cumsum()])
        kept = kept[before < params.top_p * total] if len(kept) else kept
    kept_V = bucket_V < last
    kept_V[kept] = True
    return kept_V & (weights_V > 0) & (weights_V >= params.min_p)


def _sorted(scaled_V: Floats, inside_V: NDArray[np.bool_]) -> Ids:
    ids = np.flatnonzero(inside_V)
    return ids[np.argsort(-scaled_V[ids], kind="stable")]


def draw(
    scaled_RV: Floats, weights_RV: Floats, left: Sequence[Survivors | None], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """argmax of s + Gumbel noise over what is left of every row, the noise keyed by (seed, position); ties: the lower id."""
    tokens = [-1] * len(left)
    few: list[tuple[int, Survivors]] = []
    for row, rest in enumerate(left):
        if rest is None:
            uniform = uniform_stream(seeds[row], positions[row], scaled_RV.shape[1])
            tokens[row] = _best(scaled_RV[row], weights_RV[row], uniform)
        elif len(rest.ids) == 1:
            tokens[row] = int(rest.ids[0])
        elif len(rest.ids) * _SPARSE > rest.ids[-1]:
            uniform = uniform_stream(seeds[row], positions[row], int(rest.ids[-1]) + 1)[rest.ids]
            tokens[row] = int(rest.ids[_best(rest.scaled, rest.weights, uniform)])
        else:
            few.append((row, rest))
    if few:
        _draw_few(few, seeds, positions, tokens)
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


def _best(scaled_C: Floats, weights_C: Floats, uniform_C: Floats) -> int:
    """Where s + Gumbel noise is highest. That place minimises -log(u) / e, and 1 - u <= -log(u): only places whose (1 - u) / e
    lies below some place's -log(u) / e can win, which spares the logarithms of all others."""
    with np.errstate(divide="ignore"):
        bound_C = 1 - uniform_C
        bound_C /= weights_C
    first = int(bound_C.argmin())
    limit = -np.log(max(uniform_C[first], 1e-300)) / weights_C[first] * _SLACK
    places = np.flatnonzero(bound_C <= limit)
    return int(places[(scaled_C[places] + gumbel(uniform_C[places])).argmax()])


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
