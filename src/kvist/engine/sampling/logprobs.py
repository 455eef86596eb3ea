"""Log-probabilities of the model itself: of chosen tokens, of the best ones beside them, of a prompt's tokens.

Owns `row_logprobs` and `prompt_logprobs`. They are those of the raw logits (before temperature, penalties, filters and
grammars), so that a score, a prompt's logprobs and a reply's logprobs mean the same. Must not know text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvist.engine.sampling.adjust import not_finite
from kvist.engine.sampling.params import MAX_LOGPROBS
from kvist.engine.session import ImageSpan, Session

Logits: TypeAlias = NDArray[np.float32]

_PART = 64


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, and the best tokens at its place with theirs, best first (ties: the lower id)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def row_logprobs(logits_V: Logits, token: int, top: int) -> TokenLogprobs:
    """Natural log-probabilities under softmax of finite logits [V], in float64."""
    shifted_V = logits_V.astype(np.float64)
    shifted_V -= shifted_V.max()
    log_total = np.log(np.exp(shifted_V).sum())
    best = best_ids(logits_V, top)
    return TokenLogprobs(
        token, float(shifted_V[token] - log_total), tuple((i, float(shifted_V[i] - log_total)) for i in best.tolist())
    )


def best_ids(logits_V: Logits, count: int) -> NDArray[np.int64]:
    """The `count` ids of the highest logits, best first, the lower id first among equal ones."""
    count = min(count, len(logits_V))
    if not count:
        return np.zeros(0, np.int64)
    # The count-th highest of disjoint parts' maxima is no higher than the count-th highest logit, and few reach it.
    parts = max(count, len(logits_V) // _PART)
    whole = len(logits_V) // parts * parts
    tops = logits_V[:whole].reshape(-1, parts).max(0)
    least = np.partition(tops, parts - count)[parts - count]
    ids = np.flatnonzero(logits_V >= least)
    return ids[np.argsort(-logits_V[ids], kind="stable")][:count]


def prompt_logprobs(
    session: Session, ids: Sequence[int], top: int = 0, *, images: tuple[ImageSpan, ...] = ()
) -> list[TokenLogprobs | None]:
    """Every prompt token's log-probability given those before it; None for the first, which nothing precedes.

    Runs all layers on all positions (`Session.score`). Raises ValueError for a bad `top`, NonFiniteLogits, and what
    `Session.check` raises.
    """
    if not 0 <= top <= MAX_LOGPROBS:
        raise ValueError(f"prompt logprobs must be in 0..{MAX_LOGPROBS}, got {top}; ask for fewer")
    logits_TV = session.score(torch.tensor(ids, dtype=torch.int64), images).float().cpu().numpy()
    found: list[TokenLogprobs | None] = [None]
    for position in range(1, len(ids)):
        row_V = logits_TV[position - 1]
        if not np.isfinite(row_V).all():
            raise not_finite(position)
        found.append(row_logprobs(row_V, ids[position], top))
    return found
