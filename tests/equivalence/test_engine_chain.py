"""The equality chain of the engine, to the bit, in `deterministic` mode with exact replay.

Alone = batched = chunked = preempted = beside cancelled neighbours = speculated = prefix hit: each reply of a random trace is
compared with one full forward of the dense reference.
"""

from __future__ import annotations

import random

import pytest

from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import Request
from kvist.engine.sampler import SamplingParams
from kvist.engine.speculation import FixedPolicy
from kvist.model.transformer import Transformer
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import LuckyDrafter, Outcome, Watched, continuation, draw_config, draw_requests, judge

FEW = range(2)
MANY = range(2, 80)


def run_trace(seed: int, model: Transformer | None = None) -> dict[str, int]:
    """One trace, judged, on `model` (None: a toy); what it exercised."""
    rng = random.Random(seed)
    model = model or toy(seed % 2, True)
    requests = draw_requests(rng, rng.randrange(3, 7))
    replies = {(r.sampling.seed, *r.prompt): continuation(model, r.prompt, r.max_tokens, r.sampling) for r in requests[:3]}
    config = draw_config(rng)
    width = config.drafts(model.config)
    drafter = LuckyDrafter(model, rng, width, replies) if width and rng.random() < 0.7 else None
    engine = Engine(model, config, drafter=drafter)
    watched = Watched(engine)
    cancelled = set()
    waiting = list(requests)
    while waiting or not engine.idle:
        while waiting and rng.random() < 0.4:
            watched.add(waiting.pop())
        if watched.outcomes and rng.random() < 0.03:
            number = rng.choice(list(watched.outcomes))
            engine.abort(number)
            cancelled.add(number)
        running = list(engine.scheduler.running.values())
        if running and rng.random() < 0.05:
            engine.scheduler.preempt(rng.choice(running))
        watched.step()
        engine.pages.pool.check()
    engine.pages.index.check()
    assert engine.pages.pool.owned == 0, "pages leak"
    seen = {"hits": 0, "preempted": 0, "accepted": 0, "cancelled": 0}
    for number, outcome in watched.outcomes.items():
        assert outcome.end is not None
        assert outcome.end.reason in ("length", "cancelled"), outcome.end
        if outcome.end.reason == "length":
            assert len(outcome.tokens) == outcome.request.max_tokens
        else:
            assert number in cancelled
            seen["cancelled"] += 1
        judge(model, outcome)
        usage = outcome.end.usage
        seen["hits"] += usage.cached_tokens > 0
        seen["preempted"] += usage.preemptions
        seen["accepted"] += usage.accepted_tokens
    return seen


@pytest.mark.parametrize("seed", FEW)
def test_random_traces(seed: int) -> None:
    run_trace(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", MANY)
def test_more_random_traces(seed: int) -> None:
    run_trace(seed)


def test_traces_exercise_what_they_claim() -> None:
    """Over a few traces there are prefix hits, preemptions and accepted drafts (else the equality says little)."""
    total: dict[str, int] = {}
    for seed in (11, 13):
        for name, count in run_trace(seed).items():
            total[name] = total.get(name, 0) + count
    assert total["hits"] > 0
    assert total["preempted"] > 0
    assert total["accepted"] > 0


PROMPT = [(7 * i * i + 3 * i) % 250 + 4 for i in range(41)]


def alone(width: int, drafts: list[int] | None, *, start: int = 41, count: int = 12) -> Outcome:
    """One reply with forced drafts after every token (None: the model's own)."""
    model = toy(0, True)
    sampling = SamplingParams(temperature=0.0)
    truth = continuation(model, PROMPT[:start], count, sampling)

    def propose(jobs):  # type: ignore[no-untyped-def]
        proposals = []
        for job in jobs:
            accept = drafts[job.new_tokens % len(drafts)] if drafts else 0
            known = truth[job.new_tokens :] + [5] * width
            tokens = [known[i] if i < accept else (known[i] + 1) % 256 for i in range(width)]
            proposals.append(Proposal(tokens, [1.0] * width))
        return proposals

    pages = 20 + (start + count) // 4
    config = draw_config(random.Random(0), speculation=width, pages=pages, page_tokens=4, step_cost=64, mixed_cost=64)
    engine = Engine(model, config, drafter=propose if drafts else None, policy=FixedPolicy(width))
    watched = Watched(engine)
    number = watched.add(Request(prompt=PROMPT[:start], max_tokens=count, sampling=sampling, ignore_end=True))
    watched.finish()
    outcome = watched.outcomes[number]
    assert outcome.tokens == truth
    return outcome


@pytest.mark.parametrize("start", [1, 2, 7, 8])
@pytest.mark.parametrize("width", [1, 5])
def test_rollback_at_every_boundary(width: int, start: int) -> None:
    """SPC-01: forced accept lengths 0..width from prompts of both parities: rows, tails, rings and text as without drafts."""
    outcome = alone(width, [0, width, 1, width - 1, 2 % (width + 1)], start=start)
    judge(toy(0, True), outcome)
    assert outcome.end is not None
    assert 0 < outcome.end.usage.accepted_tokens <= outcome.end.usage.drafted_tokens


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.long)])
def test_own_drafts_do_not_change_greedy_text(count: int) -> None:
    """SPC-05: what the model's own drafts change is nothing, over 400 tokens."""
    judge(toy(0, True), alone(5, None, count=count))
