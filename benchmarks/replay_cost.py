"""`replay-cost`: time to the first token of 8 requests that hit 2,048 tokens, by suffix: bounded replay, exact replay,
and resuming as if windows had been stored (replay left out: right cost, wrong numbers).

The check: all 8 run in one forward, and bounded replay runs exactly a window of rows more a request.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from unittest.mock import patch

from benchmarks.cases import Benchmark, Case, Options, TimedCase, WrongResult
from benchmarks.engine_speed import text_prompts
from benchmarks.nano_model import nano, weights_label
from kvist.config import LayerPlan
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.replay import Replay, ReplaySpan, replay_span
from kvist.engine.request import FinishedEvent, Request

REQUESTS, PREFIX = 8, 2048
SUFFIXES = (16, 64, 256, 1024)


def stored_windows(plan: LayerPlan, total: int, hit: int, replay: Replay, *, all_layers: bool = False) -> ReplaySpan:
    """A span that begins at the hit, as if the windows before it were there."""
    span = replay_span(plan, total, hit, replay, all_layers=all_layers)
    return dataclasses.replace(span, start=span.hit, decode_from=max(span.decode_from, span.hit)) if span.hit else span


class Warm:
    """An engine that has read 8 prefixes; every run brings new suffixes."""

    def __init__(self, prefixes: list[list[int]], replay: Replay) -> None:
        pages = REQUESTS * (PREFIX // 128 + 9) * 3
        config = EngineConfig(
            pages=pages,
            page_tokens=128,
            max_running=REQUESTS,
            step_cost=1 << 20,
            mixed_cost=1 << 20,
            replay=replay,
            speculation="off",
        )
        self.engine, self.prefixes = Engine(nano("cpu"), config), prefixes
        self.dice = random.Random(1)
        self.run(0)

    def run(self, suffix: int) -> list[FinishedEvent]:
        """Read all prompts with fresh suffixes of this length; the ends."""
        for ids in self.prefixes:
            tail = [self.dice.randrange(64, 7000) for _ in range(suffix)]
            self.engine.add(Request(prompt=ids + tail, max_tokens=1, ignore_end=True))
        ends: list[FinishedEvent] = []
        while not self.engine.idle:
            ends += [event for event in self.engine.step() if isinstance(event, FinishedEvent)]
        return ends


def check(warm: Warm, suffix: int) -> None:
    """One forward for all, a window of replayed rows each. Raises `WrongResult`."""
    steps, rows = warm.engine.metrics.steps, warm.engine.runner.rows
    ends = warm.run(suffix)
    window = warm.engine.model.plan.window
    if warm.engine.metrics.steps - steps != 1 or warm.engine.runner.rows - rows != REQUESTS * (suffix + window):
        raise WrongResult(
            f"{warm.engine.metrics.steps - steps} forwards, {warm.engine.runner.rows - rows} rows for {REQUESTS} hits"
        )
    if any(end.usage.cached_tokens != PREFIX for end in ends):
        raise WrongResult(f"hits of {[end.usage.cached_tokens for end in ends]} tokens, {PREFIX} are cached")


def _build(options: Options) -> Iterator[Case]:
    prefixes = text_prompts(REQUESTS, PREFIX)
    bounded, exact = Warm(prefixes, "bounded"), Warm(prefixes, "exact")

    def stored(suffix: int) -> Callable[[], object]:
        def run() -> None:
            with patch("kvist.engine.scheduler.replay_span", stored_windows):
                bounded.run(suffix)

        return run

    for suffix in SUFFIXES[:2] if options.quick else SUFFIXES:
        yield TimedCase(
            name=f"8 hits of {PREFIX}, suffix {suffix}, {weights_label()}",
            variants={
                "bounded": lambda suffix=suffix: bounded.run(suffix),  # type: ignore[misc]
                "stored windows": stored(suffix),
                "exact": lambda suffix=suffix: exact.run(suffix),  # type: ignore[misc]
            },
            subject="bounded",
            check=lambda suffix=suffix: check(bounded, suffix),  # type: ignore[misc]
        )


BENCHMARK = Benchmark(
    name="replay-cost",
    summary="time to first token of 8 prefix hits: bounded and exact replay against stored windows, by suffix",
    build=_build,
)
