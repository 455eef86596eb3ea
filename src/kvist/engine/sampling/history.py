"""What a request has said so far, counted for penalties: distinct tokens of its prompt and reply, with the reply's counts.

Owns `History` and `Ahead` (a history with drafts on top that may still be rejected). Must not know logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
