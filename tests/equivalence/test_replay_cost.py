"""What bounded replay costs: 8 prefix hits at once against resuming as if their windows had been stored, in one forward."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest
import torch

from benchmarks.replay_cost import stored_windows
from kvist.config import replace
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.request import FinishedEvent, Request
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

REQUESTS, PREFIX, ROUNDS = 8, 2048, 5
ALLOWED = 1.5


@lru_cache
def model() -> Transformer:
    """The toy on native operators with room for long prompts."""
    return random_model(replace(preset("tiny"), max_seq_len=4096), Numerics(impl="cpu"), 0)


class Warm:
    """An engine that has read 8 prefixes; every run brings fresh suffixes of four windows."""

    def __init__(self) -> None:
        config = EngineConfig(
            pages=3 * REQUESTS * PREFIX // 64, page_tokens=64, max_running=REQUESTS, step_cost=1 << 20, mixed_cost=1 << 20,
            speculation="off",
        )  # fmt: skip
        self.engine = Engine(model(), config)
        draws = torch.Generator().manual_seed(0)
        self.prefixes = torch.randint(4, 256, (REQUESTS, PREFIX), generator=draws)
        self.draws, self.suffix = draws, 4 * model().plan.window
        self.run()

    def run(self) -> tuple[float, list[FinishedEvent]]:
        """Processor seconds until each of 8 requests has its first token."""
        tails = torch.randint(4, 256, (REQUESTS, self.suffix), generator=self.draws)
        for ids in torch.cat([self.prefixes, tails], 1).tolist():
            self.engine.add(Request(prompt=ids, max_tokens=1, ignore_end=True))
        ends, began = [], time.process_time()
        while not self.engine.idle:
            ends += [event for event in self.engine.step() if isinstance(event, FinishedEvent)]
        return time.process_time() - began, ends


def test_bounded_replay_costs_at_most_half_more_than_stored_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of interleaved rounds, in processor time: what else the machine does then matters little."""
    warm, window = Warm(), model().plan.window
    bounded, stored = [], []
    for _ in range(ROUNDS):
        steps, rows = warm.engine.metrics.steps, warm.engine.runner.rows
        taken, ends = warm.run()
        bounded.append(taken)
        assert warm.engine.metrics.steps - steps == 1, "one forward for all"
        assert warm.engine.runner.rows - rows == REQUESTS * (warm.suffix + window), "a window of replayed rows a request, no more"
        assert [end.usage.cached_tokens for end in ends] == [PREFIX] * REQUESTS
        assert [end.usage.replayed_tokens for end in ends] == [window] * REQUESTS
        rows = warm.engine.runner.rows
        with monkeypatch.context() as patched:
            patched.setattr("kvist.engine.scheduler.replay_span", stored_windows)
            stored.append(warm.run()[0])
        assert warm.engine.runner.rows - rows == REQUESTS * warm.suffix, "the comparison replays nothing"
    assert min(bounded) <= ALLOWED * min(stored), f"{1e3 * min(bounded):.1f} ms against {1e3 * min(stored):.1f} ms"
