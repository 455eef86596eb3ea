"""`step-cost`: what a step costs beside the model and the sampler, at 64 running and 1,000 waiting requests.

The forward pass and the choice of tokens are stood in for; all else is the engine's own. Processor time of the stepping thread;
the median step is the value, and the check is that every request that ran got its tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.cases import Benchmark, Case, CountedCase, Options, WrongResult
from kvist.engine.acceptance import Wanted
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import FinishedEvent, Job, Request, TokenEvent
from kvist.engine.runner import StepResult
from kvist.engine.sampler import Choice
from kvist.engine.scheduler import Piece
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset

RUNNING, WAITING, STEPS = 64, 1000, 120
ALLOWED_MS = 1.0
MIXES: tuple[tuple[str | int, int, int], ...] = (("off", 40, 1), ("off", 1000, 3), (5, 1000, 1))
"""Speculation, tenants, priorities."""
LOGITS_WV = torch.zeros(RUNNING * 6, 256)


def _run(pieces: Sequence[Piece]) -> StepResult:
    counts = [piece.stop - piece.wanted for piece in pieces]
    return StepResult(LOGITS_WV[: sum(counts)], counts, [True] * len(pieces))


def _chosen(wanted: Sequence[Wanted], logits_WV: torch.Tensor, *, rejection: bool) -> list[list[Choice]]:
    return [[Choice(5, None)] * (entry.drafts + 1) for entry in wanted]


def _propose(jobs: Sequence[Job]) -> list[Proposal]:
    return [Proposal([5, 5, 6, 5, 5], [0.9, 0.8, 0.7, 0.6, 0.5]) for _ in jobs]


@contextmanager
def hollow(speculation: str | int) -> Iterator[Engine]:
    """An engine whose model and sampler cost nothing and whose drafts are right about half the time."""
    config = EngineConfig(
        pages=RUNNING * 30, page_tokens=128, max_running=RUNNING, max_waiting=2 * WAITING, step_cost=4096, speculation=speculation
    )
    engine = Engine(random_model(preset("tiny"), Numerics(), 0), config, drafter=_propose)
    engine.runner.run = _run  # type: ignore[method-assign]
    engine.runner.check = lambda pieces: {}  # type: ignore[method-assign]
    with patch("kvist.engine.engine.choices", _chosen):
        yield engine


def step_times(speculation: str | int, tenants: int, priorities: int) -> list[float]:
    """Milliseconds of processor time of steps with all slots taken and the queue full, ascending. Raises `WrongResult`."""
    made = said = ends = 0
    times_ms: list[float] = []
    with hollow(speculation) as engine:
        while len(times_ms) < STEPS:
            while engine.scheduler.waiting < WAITING:
                prompt = [(made * 7 + i) % 250 + 4 for i in range(20 + made % 80)]
                tenant, priority = str(made % tenants), made % priorities
                engine.add(
                    Request(prompt=prompt, max_tokens=400, ignore_end=True, tenant=tenant, priority=priority, deadline_s=1e9)
                )
                made += 1
            full = len(engine.scheduler.running) == RUNNING
            began = time.thread_time()
            events = engine.step()
            if full:
                times_ms.append(1e3 * (time.thread_time() - began))
            said += sum(len(event.tokens) for event in events if isinstance(event, TokenEvent))
            ends += sum(isinstance(event, FinishedEvent) for event in events)
        running = sum(job.new_tokens for job in engine.jobs.values())
        if said != running + 400 * ends or said < STEPS * RUNNING // 2:
            raise WrongResult(f"{said} tokens were told; {ends} replies of 400 have ended, the others have {running}")
    return sorted(times_ms)


def _build(options: Options) -> Iterator[Case]:
    for speculation, tenants, priorities in MIXES[: 1 if options.quick else None]:
        times_ms = step_times(speculation, tenants, priorities)
        kind = "plain" if speculation == "off" else f"{speculation} drafts"
        yield CountedCase(
            name=f"{RUNNING} running, {WAITING:,} waiting, {tenants:,} tenants, {priorities} priorities, {kind}",
            count=lambda times_ms=times_ms: statistics.median(times_ms),  # type: ignore[misc]
            check=lambda: None,
            unit="ms",
            better="lower",
            peers={"allowed": ALLOWED_MS, "p95": statistics.quantiles(times_ms, n=20)[-1]},
        )


BENCHMARK = Benchmark(
    name="step-cost",
    summary="scheduling and bookkeeping of a step at 64 running and 1,000 waiting requests, model and sampler stood in for",
    build=_build,
)
