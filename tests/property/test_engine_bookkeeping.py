"""Pool, prefix index, tiers and scheduler under random traces: no leak, no page taken for another, every reply right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.errors import DeadlineExceeded, QueueFull
from kvist.engine.request import FinishedEvent, Job, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from tests.engine_fakes import Scripted, follow

STEPS = 400


class Trace:
    """One seed's life of an engine."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        size = rng.choice((2, 4, 8))
        self.tiers = Tiers(host_bytes=rng.choice((0, 40, 400)) * 4096, store=None) if rng.random() < 0.6 else None
        config = EngineConfig(
            page_tokens=size,
            pages=-(-80 // size) + rng.randrange(0, 40),
            max_running=rng.randrange(1, 8),
            max_waiting=rng.randrange(3, 20),
            step_cost=rng.choice((2, 8, 64)),
            mixed_cost=rng.choice((2, 8)),
            replay=rng.choice(("bounded", "exact", 11)),
            speculation=rng.choice(("off", "adaptive", 5)),
        )
        self.fake = Scripted(config, drafter=self.propose, clock=lambda: self.now, tiers=self.tiers)
        self.engine = self.fake.engine
        self.trunks = [[rng.randrange(4, 256) for _ in range(80)] for _ in range(3)]
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedEvent] = {}
        self.refused = 0

    def propose(self, jobs: Sequence[Job]) -> list[Proposal]:
        proposals = []
        for job in jobs:
            known = follow(job.tokens.ids.tolist(), 5)
            right = self.rng.randrange(6)
            proposals.append(Proposal([t if i < right else 4 for i, t in enumerate(known)], [0.9**i for i in range(1, 6)]))
        return proposals

    def request(self) -> Request:
        rng = self.rng
        length = rng.randrange(1, 60)
        shared = rng.randrange(0, length + 1)
        prompt = rng.choice(self.trunks)[:shared] + [rng.randrange(4, 256) for _ in range(length - shared)]
        if self.tokens and rng.random() < 0.3:
            number = rng.choice(list(self.tokens))
            prompt = (list(self.requests[number].prompt) + self.tokens[number])[:60]
        return Request(
            prompt=prompt,
            max_tokens=rng.randrange(1, 20),
            ignore_end=True,
            priority=rng.choice((0, 0, 0, 1, 2)),
            tenant=rng.choice("abc"),
            salt=rng.choice((b"", b"", b"x")),
            deadline_s=rng.choice((None, None, None, 30.0)),
            replay=rng.choice((None, "exact")),
            sampling=SamplingParams(temperature=rng.choice((0.0, 0.7)), seed=rng.randrange(9)),
        )

    def act(self, arriving: bool) -> None:
        rng = self.rng
        if arriving and rng.random() < 0.3:
            request = self.request()
            try:
                number = self.engine.add(request)
            except QueueFull:
                self.refused += 1
            else:
                self.requests[number], self.tokens[number] = request, []
        if self.requests and rng.random() < 0.02:
            self.engine.abort(rng.choice(list(self.requests)))
        running = list(self.engine.scheduler.running.values())
        if running and rng.random() < 0.02:
            self.engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.01:
            self.fake.poison.add(rng.choice(running).id)
        self.now += 0.1
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                self.tokens[event.id] += event.tokens
            else:
                assert event.id not in self.ends, "ended twice"
                self.ends[event.id] = event
        pool = self.engine.pages.pool
        assert pool.free + pool.owned + pool.cached == pool.total
        held = {page for job in self.engine.scheduler.running.values() for page in job.pages}
        assert pool.owned == len(held), "pages are owned by nobody, or held without being owned"

    def check(self) -> None:
        pool = self.engine.pages.pool
        assert pool.owned == 0, "pages leak"
        self.engine.pages.index.check()
        assert len(self.engine.scheduler.slots) == self.engine.config.max_running
        self.engine.step()
        assert not self.engine.memory.opened, "a slot stays open"
        assert self.ends.keys() == self.requests.keys(), "a request got no end"
        for number, end in self.ends.items():
            request, reply = self.requests[number], self.tokens[number]
            assert reply == follow(request.prompt, len(reply)), f"request {number} got a wrong token"
            assert end.usage.completion_tokens == len(reply)
            assert 0 <= end.usage.accepted_tokens <= end.usage.drafted_tokens
            if end.reason == "length":
                assert len(reply) == request.max_tokens
            elif end.reason == "error":
                assert number in self.fake.poison or isinstance(end.error, DeadlineExceeded), end.error
            else:
                assert end.reason == "cancelled"


def live(seed: int, steps: int) -> Trace:
    trace = Trace(seed)
    for _ in range(steps):
        trace.act(arriving=True)
    for _ in range(4000):
        if trace.engine.idle:
            break
        trace.act(arriving=False)
    trace.check()
    if trace.tiers is not None:
        trace.tiers.close()
    return trace


@pytest.mark.parametrize("seed", range(3))
def test_traces(seed: int) -> None:
    live(seed, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_long_traces(seed: int) -> None:
    live(1000 + seed, 2000)


def test_traces_see_everything() -> None:
    """Hits from memory and from a lower tier, preemptions, refusals, poison, deadlines and accepted drafts occur."""
    seen: dict[str, int] = {}
    for seed in (3, 4, 5, 6):
        trace = live(seed, 250)
        for end in trace.ends.values():
            for tier, count in end.usage.cached.items():
                seen[tier] = seen.get(tier, 0) + count
            seen[end.reason] = seen.get(end.reason, 0) + 1
            seen["accepted"] = seen.get("accepted", 0) + end.usage.accepted_tokens
            seen["late"] = seen.get("late", 0) + isinstance(end.error, DeadlineExceeded)
        seen["refused"] = seen.get("refused", 0) + trace.refused
        seen["preempted"] = seen.get("preempted", 0) + trace.engine.metrics.preemptions
    for name in ("device", "host", "length", "error", "cancelled", "accepted", "late", "refused", "preempted"):
        assert seen.get(name, 0) > 0, (name, seen)
