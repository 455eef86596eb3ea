"""A drafter that fails, or proposes what cannot be: requests go on without its drafts, to the bit, and the engine lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Drafter, Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import Job
from kvist.engine.speculation import FixedPolicy
from tests.engine_fakes import Scripted, follow
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Watched
from tests.fault.test_engine_faults import PROMPTS, ask, sound


def right(jobs: Sequence[Job]) -> list[Proposal]:
    """What the script says next."""
    return [Proposal(follow(job.tokens.ids.tolist(), 5), [0.9] * 5) for job in jobs]


def broken(jobs: Sequence[Job]) -> list[Proposal]:
    raise RuntimeError("the draft blocks are broken")


WRONG: dict[str, Drafter] = {
    "raises": broken,
    "one too few": lambda jobs: right(jobs)[1:],
    "one too many": lambda jobs: [*right(jobs), *right(jobs)],
    "id beyond the vocabulary": lambda jobs: [p._replace(tokens=[*p.tokens[:4], 256]) for p in right(jobs)],
    "id below zero": lambda jobs: [p._replace(tokens=[-1, *p.tokens[1:]]) for p in right(jobs)],
    "survival missing": lambda jobs: [p._replace(survival=[0.9] * 3) for p in right(jobs)],
    "distribution missing": lambda jobs: [p._replace(probs=[]) for p in right(jobs)],
}


def alternating(wrong: Drafter) -> Callable[[Sequence[Job]], list[Proposal]]:
    """Right and wrong by turns."""
    turns = [0]

    def propose(jobs: Sequence[Job]) -> list[Proposal]:
        turns[0] += 1
        return wrong(jobs) if turns[0] % 2 else right(jobs)

    return propose


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_proposal_costs_the_drafts_of_its_step(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(pages=80, page_tokens=4, max_running=3, speculation=5)
    fake = Scripted(config, drafter=alternating(WRONG[fault]), policy=FixedPolicy(5))

    async def main() -> None:
        async with AsyncEngine(fake.engine) as served:
            for _ in range(2):
                prompts = [[40, 41, k] for k in range(5)]
                replies = await asyncio.wait_for(asyncio.gather(*(served.complete(ask(p, 30)) for p in prompts)), 60)
                for prompt, (tokens, end) in zip(prompts, replies, strict=True):
                    assert (tokens, end.reason) == (follow(prompt, 30), "length")

    with caplog.at_level(logging.ERROR, "kvist.engine.engine"):
        asyncio.run(main())
    metrics = fake.engine.metrics
    assert metrics.draft_failures > 2
    assert metrics.counters()["draft_failures"] == metrics.draft_failures
    assert metrics.accepted_tokens > 20, "drafts of the other steps are used"
    assert metrics.ended == {"length": 10}
    assert len(caplog.records) == 1, "said once"
    assert "requests go on without drafts" in caplog.text


def test_the_model_s_own_draft_blocks_fail_in_the_middle() -> None:
    """An error after some draft layers have run leaves no trace in any ring: every logit has the bits of the full forward."""
    config = EngineConfig(pages=100, page_tokens=4, max_running=4, replay="exact", speculation=3, step_cost=64)
    watched = Watched(Engine(toy(0, True), config))
    memory, calls = watched.engine.memory, [0]
    own = memory.attend_block

    def attend_block(layer, *rest):  # type: ignore[no-untyped-def]
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise MemoryError("no room for a block")
        return own(layer, *rest)

    memory.attend_block = attend_block  # type: ignore[method-assign]
    numbers = [watched.add(ask(prompt, 12)) for prompt in PROMPTS]
    watched.finish()
    assert watched.engine.metrics.draft_failures > 3
    for number in numbers:
        sound(watched, number)
