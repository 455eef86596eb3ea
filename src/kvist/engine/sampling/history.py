"""What a request has said so far, counted for penalties; and the change that penalties and biases make to logits.

Owns `History`, `Ahead` (a history with drafts on top that may still be rejected) and `adjust`. Must not know noise or filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvist.engine.sampling.params import SamplingParams

Row: TypeAlias = NDArray[np.float32]


class History:
    """Distinct tokens of a prompt and of the reply so far with the reply's counts. One per request; O(1) a token.

    `ids` holds the prompt's distinct ids, then others in the order in which the reply brought them.
    """

    def __init__(self, prompt_ids: Sequence[int] | NDArray[np.int64]) -> None:
        prompt = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._ids, self._used = prompt, len(prompt)
        self._counts = np.zeros(len(prompt), np.int64)
        self._prompt = len(prompt)
        self._place = {token: at for at, token in enumerate(prompt.tolist())}
        self._reply: list[int] = []

    def __len__(self) -> int:
        """Tokens of the reply."""
        return len(self._reply)

    def append(self, token: int) -> None:
        """Count one more token of the reply."""
        place = self._place.setdefault(token, self._used)
        if place == self._used:
            if place == len(self._ids):
                more = max(64, place)
                self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
            self._ids[place], self._counts[place] = token, 0
            self._used += 1
        self._counts[place] += 1
        self._reply.append(token)

    def rollback(self, count: int) -> None:
        """Forget the reply's last `count` tokens. Raises ValueError if it has fewer."""
        if not 0 <= count <= len(self._reply):
            raise ValueError(f"cannot take back {count} of {len(self._reply)} tokens; take back at most all of them")
        for _ in range(count):
            self._counts[self._place[self._reply.pop()]] -= 1

    def ahead(self, drafts: Sequence[int]) -> Ahead:
        """This history with `drafts` after it, for the verify row behind them; nothing is counted for good."""
        return Ahead(self, tuple(drafts))

    def seen(self) -> NDArray[np.int64]:
        """Distinct ids of prompt and reply."""
        return self._ids[: self._used][(np.arange(self._used) < self._prompt) | (self._counts[: self._used] > 0)]

    def replied(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct ids of the reply and how often each occurs."""
        where = np.flatnonzero(self._counts[: self._used])
        return self._ids[where], self._counts[where]


@dataclass(frozen=True)
class Ahead:
    """A history and the drafts before one verify row."""

    history: History
    drafts: tuple[int, ...]


def adjust(logits_V: Row, params: SamplingParams, history: History | Ahead | None) -> None:
    """Apply penalties, then biases, to float32 logits in place; each change is computed in float64 and rounded once."""
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
