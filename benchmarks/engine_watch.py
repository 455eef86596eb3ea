"""An engine whose logits are kept: what every token was chosen from, request by request.

Owns the watching alone; runs wherever the engine does and knows neither bounds nor ways to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvist.engine.engine import Engine
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.runner import StepResult
from kvist.engine.scheduler import Piece


@dataclass
class Outcome:
    """What came back for one request: tokens, the logits each was chosen from, how it ended."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    end: FinishedEvent | None = None


class Watched:
    """An engine that notes the logits behind every token, by request and position (a later row overwrites a rejected one)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}
        self._run = engine.runner.run
        engine.runner.run = self._watch  # type: ignore[method-assign]

    def _watch(self, pieces: Sequence[Piece]) -> StepResult:
        result = self._run(pieces)
        at = 0
        for piece, count in zip(pieces, result.counts, strict=True):
            for row in range(count):
                self.outcomes[piece.job.id].logits[piece.wanted + row + 1] = result.logits_WV[at + row]
            at += count
        return result

    def add(self, request: Request) -> int:
        """Hand a request over; its number among `outcomes`."""
        number = self.engine.add(request)
        self.outcomes[number] = Outcome(request)
        return number

    def step(self) -> None:
        """One step of the engine, its events noted."""
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                self.outcomes[event.id].tokens += event.tokens
            else:
                assert self.outcomes[event.id].end is None, "a request ended twice"
                self.outcomes[event.id].end = event

    def finish(self, limit: int = 5000) -> None:
        """Steps until the engine is idle, `limit` at most."""
        for _ in range(limit):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")
