"""What changes a row's logits before anything is chosen: penalties, then biases, then the mask of a grammar.

Owns that order and arithmetic, and the errors of rows from which nothing can be chosen. Must not know noise or filters.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.engine.errors import NonFiniteLogits
from kvist.engine.sampling.grammar_text import GrammarUnsatisfiable
from kvist.engine.sampling.history import Ahead, History
from kvist.engine.sampling.params import SamplingParams

Row: TypeAlias = NDArray[np.float32]
# Allowed ids as bits, id i at bit i % 8 of byte i // 8; bytes that are missing at the end allow nothing.
Mask: TypeAlias = NDArray[np.uint8]
RowError: TypeAlias = NonFiniteLogits | GrammarUnsatisfiable


def change(
    logits_V: Row, params: SamplingParams, history: History | Ahead | None, mask: Mask | None, position: int
) -> RowError | None:
    """Adjust finite logits in place and set what `mask` forbids to -inf. Returns the error of a row that has nothing left."""
    adjust(logits_V, params, history)
    if mask is not None:
        allowed = np.unpackbits(mask, count=min(len(logits_V), 8 * len(mask)), bitorder="little").view(np.bool_)
        if not allowed.any():
            return GrammarUnsatisfiable(f"the grammar allows no token at position {position}, a dead end; change the grammar")
        logits_V[: len(allowed)][~allowed] = -np.inf
        logits_V[len(allowed) :] = -np.inf
    if not np.isfinite(logits_V.max()):
        return NonFiniteLogits(f"logits for position {position} leave float32 under the penalties; use smaller ones")
    return None


def not_finite(position: int) -> NonFiniteLogits:
    """The error of a row in which the model left NaN or infinity."""
    return NonFiniteLogits(f"logits for position {position} are not finite")


def adjust(logits_V: Row, params: SamplingParams, history: History | Ahead | None) -> None:
    """Apply penalties, then biases, to float32 logits in place; each change is computed in float64 and rounded once."""
    with np.errstate(over="ignore"):  # `change` looks for infinity afterwards
        _adjust(logits_V, params, history)


def _adjust(logits_V: Row, params: SamplingParams, history: History | Ahead | None) -> None:
    if params.needs_history:
        assert history is not None, "penalties need the request's history"
        if isinstance(history, Ahead):
            for token in history.drafts:
                history.history.append(token)
            _penalise(logits_V, params, history.history)
            history.history.rollback(len(history.drafts))
        else:
            _penalise(logits_V, params, history)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        logits_V[ids] += np.fromiter(params.logit_bias.values(), np.float64, len(ids))


def _penalise(logits_V: Row, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1:
        seen = history.seen()
        held = logits_V[seen].astype(np.float64)
        logits_V[seen] = np.where(held > 0, held / params.repetition_penalty, held * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = history.replied()
        logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
