"""Cases of the fault collection about speculation, hand-over and warm concurrency, to the bit in `deterministic` + exact mode."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine, store_model
from kvist.engine.errors import RequestTooLong
from kvist.engine.replay import replay_span
from kvist.engine.request import Request
from kvist.engine.sampler import SamplingParams
from kvist.engine.speculation import FixedPolicy
from kvist.page_layout import PageLayout
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Outcome, Watched, continuation, judge
from tests.equivalence.lineage import Computed, Witness
from tests.equivalence.test_engine_replay import ask, prompt_of, serve

NOISY = SamplingParams(temperature=0.8, seed=11)


def test_rollbacks_of_neighbours_do_not_mix() -> None:
    """SPC-03: three requests with accept lengths (0,3,5), (5,0,2), (1,1,1) step by step, one ends early, its slot is reused."""
    model = toy(0, True)
    prompts = [prompt_of(9, seed) for seed in (1, 2, 3, 4)]
    counts = [14, 4, 11, 9]
    truth = [continuation(model, prompt, count, NOISY) for prompt, count in zip(prompts, counts, strict=True)]
    lengths = [(0, 3, 5), (5, 0, 2), (1, 1, 1), (2, 5, 0)]
    taken = [0] * 4

    def propose(jobs):  # type: ignore[no-untyped-def]
        proposals = []
        for job in jobs:
            which = job.request.client
            accept = lengths[which][taken[which] % 3]
            taken[which] += 1
            known = truth[which][job.new_tokens :] + [4] * 5
            proposals.append(Proposal([t if i < accept else (t + 1) % 256 for i, t in enumerate(known[:5])], [1.0] * 5))
        return proposals

    config = EngineConfig(pages=60, page_tokens=4, max_running=3, replay="exact", speculation=5)
    watched = Watched(Engine(model, config, drafter=propose, policy=FixedPolicy(5)))
    for which in range(4):
        request = Request(prompt=prompts[which], max_tokens=counts[which], sampling=NOISY, ignore_end=True, client=which)
        watched.add(request)
    watched.finish()
    for which, outcome in watched.outcomes.items():
        assert outcome.tokens == truth[which]
        judge(model, outcome)
    assert sum(o.end.usage.accepted_tokens for o in watched.outcomes.values() if o.end) > 10


def test_penalties_count_the_drafts_before_a_row() -> None:
    """SRV-07: a verified row is chosen with the history that plain decoding has there, drafts before it included."""
    model, truth = toy(0, True), list[int]()

    def propose(jobs):  # type: ignore[no-untyped-def]
        return [Proposal((truth[jobs[0].new_tokens :] + [4] * 5)[:5], [1.0] * 5)]

    def reply(sampling: SamplingParams, drafts: int) -> Outcome:
        config = EngineConfig(pages=60, page_tokens=4, max_running=1, replay="exact", speculation=drafts or "off")
        engine = Engine(model, config, drafter=propose, policy=FixedPolicy(drafts))
        watched = Watched(engine)
        watched.add(Request(prompt=prompt_of(9, 1), max_tokens=24, sampling=sampling, ignore_end=True))
        watched.finish()
        return watched.outcomes[0]

    penalised = SamplingParams(repetition_penalty=1.5, presence_penalty=1, frequency_penalty=1)
    truth += reply(penalised, 0).tokens
    assert truth != reply(SamplingParams(), 0).tokens
    outcome = reply(penalised, 5)
    assert outcome.tokens == truth
    assert outcome.end is not None
    assert outcome.end.usage.accepted_tokens >= 10


def test_fewer_drafts_are_the_first_of_the_whole_block() -> None:
    """SPC-07: verifying 1 or 3 drafts uses the first ones of a block of 5."""
    blocks = {}
    for width in (1, 3, 5):
        watched = serve(toy(0, True), "exact", speculation=width)
        own = watched.engine.drafter
        first: list[list[int]] = []

        def spy(jobs, own=own, first=first):  # type: ignore[no-untyped-def]
            made = own(jobs)
            first.append(made[0].tokens)
            return made

        watched.engine.drafter = spy
        ask(watched, prompt_of(20), 4, sampling=NOISY)
        blocks[width] = first[0]
    assert len(blocks[5]) == 5
    assert blocks[1] == blocks[5][:1]
    assert blocks[3] == blocks[5][:3]


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.long)])
def test_one_seed_one_reply_in_any_company(rounds: int) -> None:
    """The same request at temperature 0.8 alone and in random batches, with and without speculation."""
    model, prompt = toy(0, True), prompt_of(23)
    alone = continuation(model, prompt, 12, NOISY)
    rng = random.Random(5)
    for turn in range(rounds):
        watched = serve(model, "exact", speculation=rng.choice(["off", 2, 5]), step_cost=rng.choice([3, 9, 64]))
        others = rng.randrange(0, 5)
        for other in range(others):
            params = SamplingParams(temperature=rng.random(), seed=other)
            watched.add(Request(prompt=prompt_of(rng.randrange(1, 30), turn * 10 + other), max_tokens=8, sampling=params))
            watched.step()
        number = watched.add(Request(prompt=prompt, max_tokens=12, sampling=NOISY, ignore_end=True))
        watched.finish()
        assert watched.outcomes[number].tokens == alone


@pytest.mark.parametrize("replay", ["exact", "bounded"])
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_warm_prefix_with_concurrent_partial_prefills(rounds: int, replay: str) -> None:
    """PFX-13: six requests with one prefix of 200 tokens and endings of 5, 16 tokens a step, warm: the bits of cold runs, or of
    the replay oracle. Two of them get slots whose rings end where their replay starts, with another text in them."""
    model, trunk = toy(1, True), prompt_of(200)
    config = EngineConfig(page_tokens=4, pages=400, max_running=6, step_cost=16, mixed_cost=16, replay=replay, speculation="off")
    watched = Witness(Engine(model, config))
    known: list[Computed] = []
    ask(watched, trunk, 1)
    start = replay_span(model.plan, 205, 200, replay).start
    for turn in range(rounds):
        others = [watched.add(Request(prompt=prompt_of(start + i, 70 * turn + i), max_tokens=1, ignore_end=True)) for i in (1, 2)]
        numbers = [
            watched.add(Request(prompt=trunk + prompt_of(5, 100 * turn + i), max_tokens=3, ignore_end=True)) for i in range(6)
        ]
        watched.step()
        watched.finish()
        for number in numbers:
            end = watched.outcomes[number].end
            assert end is not None
            assert (end.reason, end.usage.completion_tokens) == ("length", 3)
            assert end.usage.cached_tokens >= 200
        assert all(watched.outcomes[number].end is not None for number in others)
        # The prefix's own admission is the judge's first witness of who computed its rows.
        watched.judge(known)
        watched.admissions.clear()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 200])
@pytest.mark.parametrize("together", [1, 3])
def test_unfinished_groups_never_decide_who_is_admitted(chunk: int, together: int) -> None:
    """CMP-09: a pool that holds exactly the requests, rings of unfinished groups that hold two tokens, chunks far beyond them.

    Whoever fits is admitted in the first pass and is done after as many steps as its chunks; what cannot fit is refused at once.
    """
    model = toy(1, True)
    row = 1 + (len(model.plan.layers) - model.plan.decoder_start) / model.plan.decoder_start
    cost = int(chunk * row) + 1
    watched = serve(model, "exact", pages=18 * together, max_running=together, step_cost=cost, mixed_cost=cost)
    assert max(tail.size for tail in watched.engine.memory.tails.values()) == 2
    numbers = [watched.add(Request(prompt=prompt_of(64, seed), max_tokens=8, ignore_end=True)) for seed in range(together)]
    watched.step()
    first = watched.engine.jobs[numbers[0]]
    assert first.slot is not None, "not admitted in the first pass"
    assert first.computed >= min(chunk, 64)
    for _ in range(together * -(-64 // chunk) + 8):
        watched.step()
    for number in numbers:
        assert watched.outcomes[number].end is not None, "it waits for something that never comes"
        judge(model, watched.outcomes[number])
    with pytest.raises(RequestTooLong, match=f"cache of {72 * together} tokens"):
        watched.add(Request(prompt=prompt_of(64), max_tokens=9 + 72 * (together - 1), ignore_end=True))
    assert watched.engine.idle


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40, 41])
def test_hand_over_between_engines_with_other_rings(tmp_path: Path, length: int) -> None:
    """PDX-01: a request moves at this length to an engine with other slots, drafts and steps; ten more tokens are the same."""
    model = toy(0, True)
    prompt = prompt_of(60)[:length]
    whole = continuation(model, prompt, 14, NOISY)

    def start(**budgets: object) -> Watched:
        store = PageStore.open(
            tmp_path,
            model=store_model(model.numerics, bytes(32), 2),
            page_bytes=PageLayout.of(model.config, 2).page_bytes,
            page_tokens=2,
            budget_bytes=4 << 20,
        )
        config = EngineConfig(page_tokens=2, pages=80, replay="exact", **budgets)  # type: ignore[arg-type]
        return Watched(Engine(model, config, fingerprint=bytes(32), tiers=Tiers(host_bytes=0, store=store)))

    first = start(max_running=1, speculation=5, step_cost=4, mixed_cost=4)
    number = first.add(Request(prompt=prompt, max_tokens=14, sampling=NOISY, ignore_end=True))
    while len(first.outcomes[number].tokens) < 4:
        first.step()
    first.engine.abort(number)
    first.finish()
    made = first.outcomes[number].tokens
    assert first.engine.pages.tiers is not None
    assert first.engine.pages.tiers.close()
    second = start(max_running=4, speculation="off", step_cost=64)
    moved = second.add(Request(prompt=prompt + made, max_tokens=14 - len(made), sampling=NOISY, ignore_end=True))
    second.finish()
    outcome = second.outcomes[moved]
    assert made + outcome.tokens == whole
    judge(model, outcome)
    assert outcome.end is not None
    assert outcome.end.usage.cached.get("disk", 0) == (length + len(made) - 1) // 2 * 2
    assert second.engine.pages.tiers is not None
    assert second.engine.pages.tiers.close()
