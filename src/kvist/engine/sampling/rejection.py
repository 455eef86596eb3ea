"""Speculative sampling with a residual distribution: an acceptance rule for drafts that were drawn from a distribution.

Owns `propose` and `verify`. Must not know drafters or schedules. Leviathan, Kalman, Matias, "Fast inference from transformers
via speculative decoding", ICML 2023, algorithm 1. A draft x from q is accepted with probability min(1, p(x) / q(x)); at the
first rejection the token is drawn from max(p - q, 0), normalised; behind the last accepted draft from p. Every token then
follows p exactly, but, unlike with the default rule (accept what the keyed noise chooses anyway), another draft may lead to
another token of the same seed. Each use of a position has a noise stream of its own, so all draws are independent.
How many drafts are verified must not depend on the value of the last one or of later ones: leaving a draft out because of
what it is would favour the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvist.engine.sampling.adjust import Mask, RowError, change, not_finite
from kvist.engine.sampling.filters import distribution
from kvist.engine.sampling.history import History
from kvist.engine.sampling.noise import ACCEPT, CHOICE, DRAFT, RESIDUAL, gumbel
from kvist.engine.sampling.params import SamplingParams
from kvist.kernels.keyed_uniform import Floats, uniform_stream


class Verdict(NamedTuple):
    """How many drafts were accepted and the token behind them, or the error that ends the request."""

    accepted: int
    token: int
    error: RowError | None = None


def propose(logits_V: Tensor | NDArray[np.float32], params: SamplingParams, position: int) -> tuple[int, Floats]:
    """A draft for `position` drawn from a draft model's finite logits [V] under `params`' temperature and filters, and the
    probabilities q [V] it was drawn from, which `verify` needs."""
    probs_V = distribution(_numpy(logits_V), params)
    return draw_from(probs_V, params.seed, position, DRAFT), probs_V


def verify(
    logits_KV: Tensor | NDArray[np.float32],
    drafts: Sequence[int],
    draft_probs: Sequence[Floats] | None,
    params: SamplingParams,
    position: int,
    *,
    history: History | None = None,
    masks: NDArray[np.uint8] | Sequence[Mask] | None = None,
) -> Verdict:
    """Accept or reject `drafts` for `position`, `position + 1`, ... one by one.

    `logits_KV` float32 [k + 1, V]: the model's logits for each draft's place and for the place behind the last; `masks` the
    same rows (`Constraint.masks`). `draft_probs[i]` is the q [V] that draft i was drawn from; None: drafts are the drafter's
    best tokens, not drawn, so q is 1 at the draft. The history is not changed. Temperature 0 accepts the best token only.
    """
    rows_KV = _numpy(logits_KV)
    assert len(rows_KV) == len(drafts) + 1, (len(rows_KV), len(drafts))
    for at in range(len(rows_KV)):
        row_V = rows_KV[at].copy()
        if not np.isfinite(row_V).all():
            return Verdict(at, -1, not_finite(position + at))
        ahead = None if history is None else history.ahead(drafts[:at])
        error = change(row_V, params, ahead, None if masks is None else masks[at], position + at)
        if error is not None:
            return Verdict(at, -1, error)
        probs_V = distribution(row_V, params)
        if at == len(drafts):
            return Verdict(at, draw_from(probs_V, params.seed, position + at, CHOICE))
        draft = drafts[at]
        chance = 1.0 if draft_probs is None else float(draft_probs[at][draft])
        if uniform_stream(params.seed, position + at, 1, use=ACCEPT)[0] * chance >= probs_V[draft]:
            rest_V = residual(probs_V, draft, None if draft_probs is None else draft_probs[at])
            return Verdict(at, draw_from(rest_V, params.seed, position + at, RESIDUAL))
    raise AssertionError("the row behind the last draft always decides")


def residual(probs_V: Floats, draft: int, draft_probs_V: Floats | None) -> Floats:
    """max(p - q, 0) normalised [V]; q None is 1 at `draft`."""
    rest_V = probs_V.copy()
    if draft_probs_V is None:
        rest_V[draft] = 0
    else:
        rest_V = np.maximum(rest_V - draft_probs_V, 0)
    total = rest_V.sum()
    # p and q differ by rounding only: whichever is drawn is right
    return rest_V / total if total > 0 else probs_V


def draw_from(probs_V: Floats, seed: int, position: int, use: int) -> int:
    """A token by its probability: argmax of log p + Gumbel noise keyed by (seed, position, use)."""
    ids = np.flatnonzero(probs_V)
    noise = gumbel(uniform_stream(seed, position, int(ids[-1]) + 1, use=use)[ids])
    return int(ids[(np.log(probs_V[ids]) + noise).argmax()])


def _numpy(logits: Tensor | NDArray[np.float32]) -> NDArray[np.float32]:
    return logits.detach().float().cpu().numpy() if isinstance(logits, Tensor) else logits
