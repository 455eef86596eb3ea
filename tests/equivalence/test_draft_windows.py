"""Draft windows that are filled only when somebody drafts give the drafts, to the bit, of windows filled in every step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvist.engine.budget import EngineConfig
from kvist.engine.draft_windows import DraftWindows
from kvist.engine.drafter import BlockDrafter, Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import Job, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from kvist.engine.speculation import FixedPolicy
from tests.equivalence.conftest import toy


class Moody(FixedPolicy):
    """Drafts in some steps only, with long and short pauses."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)
        self.rng, self.left, self.on = random.Random(seed), 3, True

    def wants_drafts(self, requests: int) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.on = not self.on
            self.left = self.rng.choice((1, 2, 5, 12, 20))
        return self.on


class Eager(DraftWindows):
    """Fills them in every step."""

    def saw(self, targets, rows, pieces):  # type: ignore[no-untyped-def]
        self.blocks.observe(targets, rows, self.memory)


def life(seed: int, lazy: bool, arrivals: int) -> tuple[list[tuple[int, int, list[int], list[float]]], dict[int, list[int]], int]:
    """Every proposal (request, position, tokens, survival), every reply, and how many rows were filled late."""
    model, rng = toy(seed % 2, True), random.Random(seed)
    config = EngineConfig(
        pages=rng.choice((24, 60)), page_tokens=4, max_running=rng.choice((1, 3, 5)), step_cost=rng.choice((5, 40)),
        mixed_cost=5, replay="exact", speculation=3,
    )  # fmt: skip
    engine = Engine(model, config, policy=Moody(seed))
    assert model.mtp is not None
    engine.runner.windows = (DraftWindows if lazy else Eager)(model.mtp, engine.memory, model.plan.window)
    own, late, seen = BlockDrafter(engine.runner, 3), 0, []

    def propose(jobs: Sequence[Job]) -> list[Proposal]:
        nonlocal late
        assert engine.runner.windows is not None
        late += engine.runner.windows.pending
        made = own(jobs)
        seen.extend((job.id, len(job), p.tokens, p.survival) for job, p in zip(jobs, made, strict=True))
        return made

    engine.drafter = propose
    replies: dict[int, list[int]] = {}
    for step in range(600):
        if step >= arrivals and engine.idle:
            break
        if step < arrivals and rng.random() < 0.15:
            prompt = [rng.randrange(4, 256) for _ in range(rng.choice((1, 2, 9, 30)))]
            number = engine.add(
                Request(
                    prompt=prompt, max_tokens=rng.choice((4, 40)), ignore_end=True, priority=rng.choice((0, 0, 1)),
                    sampling=SamplingParams(temperature=0.8, seed=rng.randrange(9)),
                )
            )  # fmt: skip
            replies[number] = []
        if replies and rng.random() < 0.01:
            engine.abort(rng.choice(list(replies)))
        running = list(engine.scheduler.running.values())
        if running and rng.random() < 0.02:
            engine.scheduler.preempt(rng.choice(running))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                replies[event.id] += event.tokens
    assert engine.idle
    return seen, replies, late


@pytest.mark.parametrize("seed", [1, 3, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 18))])
def test_lazy_windows_give_the_same_drafts(seed: int) -> None:
    arrivals = 40 if seed < 6 else 120
    (lazy, replies, late), (eager, same, _) = life(seed, True, arrivals), life(seed, False, arrivals)
    assert replies == same, "drafts have changed an output"
    assert late > 0, "nothing was ever filled late"
    assert len(lazy) == len(eager) > 10
    for ours, theirs in zip(lazy, eager, strict=True):
        assert ours == theirs, f"request {theirs[0]} at position {theirs[1]} is offered other drafts"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `window` steps, and at most `DRAFT_ROWS` rows: more are written in between."""
    model = toy(1, True)
    engine = Engine(model, EngineConfig(pages=80, page_tokens=4, max_running=4, speculation=3), policy=FixedPolicy(0))
    for number in range(4):
        engine.add(Request(prompt=[9 + number, 8], max_tokens=40, ignore_end=True))
    windows = engine.runner.windows
    assert windows is not None
    for _ in range(20):
        engine.step()
    assert windows.pending == 4 * model.plan.window
    monkeypatch.setattr("kvist.engine.draft_windows.DRAFT_ROWS", 10)
    for _ in range(10):
        engine.step()
        assert windows.pending <= 10
