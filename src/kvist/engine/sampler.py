"""From logits to tokens, a batch of rows at once: penalties, biases, grammar masks, then greedy or keyed Gumbel noise.

Owns `choose` and `sample`. Must not know requests or text. A row's token depends on its logits, parameters, history and mask
and on the noise of (seed, position), never on what shares the batch: same row, same token, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvist.engine.sampling.adjust import Mask, RowError, change, not_finite
from kvist.engine.sampling.filters import draw, filter_logits, scale, survivors
from kvist.engine.sampling.history import Ahead, History
from kvist.engine.sampling.logprobs import TokenLogprobs, row_logprobs
from kvist.engine.sampling.noise import gumbel_noise
from kvist.engine.sampling.params import SamplingParams

__all__ = ["Choice", "Mask", "SamplingParams", "choose", "filter_logits", "gumbel_noise", "sample"]

# Rows are worked on in blocks of about this many logits, so that a block's float64 arrays stay in a core's cache.
_BLOCK = 1 << 16


class Choice(NamedTuple):
    """One row's outcome: a token, with log-probabilities if they were asked for, or else the error that ends its request."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: RowError | None = None


def choose(
    logits_RV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[History | Ahead | None] | None = None,
    masks: Sequence[Mask | None] | None = None,
) -> list[Choice]:
    """The token of every row for its position. float32 logits [R,V] on any device; they are not changed.

    `histories` are needed where penalties are on; a row behind drafts takes `history.ahead(drafts)`. `masks`: the tokens a
    grammar allows. A row with NaN or infinite logits, or whose mask allows nothing, gets `Choice.error` and token -1; other
    rows are not touched by it. Equal values: the lower id wins.
    """
    rows_RV = np.ascontiguousarray(logits_RV.detach().float().cpu().numpy())
    histories = histories or [None] * len(params)
    masks = masks or [None] * len(params)
    assert len(rows_RV) == len(params) == len(positions) == len(histories) == len(masks), "one entry of each a row"
    choices: list[Choice] = []
    step = max(1, _BLOCK // max(1, rows_RV.shape[1]))
    for start in range(0, len(params), step):
        part = slice(start, start + step)
        choices += _choose_block(rows_RV[part], params[part], positions[part], histories[part], masks[part])
    return choices


def _choose_block(
    raw_RV: NDArray[np.float32],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[History | Ahead | None],
    masks: Sequence[Mask | None],
) -> list[Choice]:
    errors: list[RowError | None] = [None] * len(params)
    for row in np.flatnonzero(~(np.isfinite(raw_RV.max(1)) & np.isfinite(raw_RV.min(1)))).tolist():
        errors[row] = not_finite(positions[row])
    rows_RV = raw_RV
    if any(mask is not None for mask in masks) or any(p.changes_logits for p in params):
        rows_RV = raw_RV.copy()
        for row, (wish, history, mask) in enumerate(zip(params, histories, masks, strict=True)):
            if errors[row] is None:
                errors[row] = change(rows_RV[row], wish, history, mask, positions[row])
    tokens = _tokens(rows_RV, params, positions, [row for row, error in enumerate(errors) if error is None])
    choices = []
    for row, (wish, token) in enumerate(zip(params, tokens, strict=True)):
        wanted = wish.logprobs is not None and errors[row] is None
        details = row_logprobs(raw_RV[row], token, wish.logprobs or 0) if wanted else None
        choices.append(Choice(token, details, errors[row]))
    return choices


def _tokens(
    rows_RV: NDArray[np.float32], params: Sequence[SamplingParams], positions: Sequence[int], sound: list[int]
) -> list[int]:
    tokens = [-1] * len(params)
    greedy = [row for row in sound if params[row].temperature == 0]
    drawn = [row for row in sound if params[row].temperature > 0]
    if greedy:
        for row, token in zip(greedy, rows_RV[greedy].argmax(1).tolist(), strict=True):
            tokens[row] = token
    if drawn:
        wishes = [params[row] for row in drawn]
        scaled_RV, weights_RV = scale(rows_RV[drawn], wishes)
        left = survivors(scaled_RV, weights_RV, wishes)
        found = draw(scaled_RV, weights_RV, left, [p.seed for p in wishes], [positions[row] for row in drawn])
        for row, token in zip(drawn, found, strict=True):
            tokens[row] = token
    return tokens


def sample(logits_V: Tensor, params: SamplingParams, position: int) -> int:
    """The token for `position` from float32 logits [V]: `choose` for one row without history. Raises NonFiniteLogits."""
    choice = choose(logits_V[None], [params], [position])[0]
    if choice.error is not None:
        raise choice.error
    return choice.token
