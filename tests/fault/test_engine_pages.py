"""Pages between requests: one page for one identity, pages under doubt, and no page lost for a request that does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvist.cache.prefix import PrefixQuery
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.errors import NonFiniteLogits
from kvist.engine.request import FinishedEvent, Job, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from tests.engine_fakes import MODEL, Scripted, follow
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import judge
from tests.equivalence.lineage import Witness

SIZE = 4
PROMPT = [(7 * i) % 250 + 4 for i in range(24)]


def scripted(tiers: Tiers | None = None, **budgets: object) -> Scripted:
    values: dict[str, object] = {
        "pages": 64, "page_tokens": SIZE, "max_running": 4, "step_cost": 40, "speculation": "off", "replay": "exact",
    }  # fmt: skip
    return Scripted(EngineConfig(**{**values, **budgets}), tiers=tiers)  # type: ignore[arg-type]


def ask(prompt: list[int], count: int = 2, **more: object) -> Request:
    return Request(prompt=prompt, max_tokens=count, ignore_end=True, **more)  # type: ignore[arg-type]


def end_of(fake: Scripted, request: Request) -> FinishedEvent:
    end = list(fake.engine.generate(request))[-1]
    assert isinstance(end, FinishedEvent)
    return end


def tables_agree(engine: Engine) -> None:
    """The memory reads exactly the pages that the job holds, and every one of them is owned."""
    for job in engine.scheduler.running.values():
        held = engine.memory.rows.held[job.slot]  # type: ignore[index]
        assert engine.memory.rows.table[job.slot, :held].tolist() == job.pages[:held]
        assert all(engine.pages.pool.references(page) > 0 for page in job.pages)
    engine.pages.pool.check()


# ---- one page for one identity


@pytest.mark.parametrize("speculation", ["off", 3])
def test_identical_requests_share_the_pages_that_they_write(speculation: object) -> None:
    """Four replies of the same tokens: what the first has published the others go on with, and their own pages are free."""
    fake = scripted(speculation=speculation)
    numbers = [fake.engine.add(ask(PROMPT, 41)) for _ in range(4)]
    replies: dict[int, list[int]] = {number: [] for number in numbers}
    most = 0
    while fake.engine.jobs:
        for event in fake.engine.step():
            if isinstance(event, TokenEvent):
                replies[event.id] += event.tokens
        tables_agree(fake.engine)
        most = max(most, fake.engine.pages.pool.owned)
    assert all(reply == follow(PROMPT, 41) for reply in replies.values())
    # 24 + 41 tokens are 16 whole pages and one: shared by all four but for the last ones, that each is still writing.
    assert fake.engine.metrics.adopted_pages >= 3 * 7
    assert most <= 16 + 4 * 3, f"{most} pages were owned at once"
    assert fake.engine.pages.pool.owned == 0


def test_adopted_pages_are_read_from_now_on() -> None:
    """The toy, exact and deterministic: freed pages are filled by others at once, and every reply has its cold run's bits."""
    config = EngineConfig(pages=40, page_tokens=SIZE, max_running=4, replay="exact", speculation="off", step_cost=64)
    watched = Witness(Engine(toy(0, True), config))
    # Prompts whose logits are wanted hit nothing, so that they compute what another one has published.
    for count in (10, 12):
        watched.add(ask(PROMPT, count, prompt_logprobs=0))
    watched.step()
    for seed in range(3):
        watched.add(ask([(seed + 5 * i) % 250 + 4 for i in range(13)], 14, sampling=SamplingParams(temperature=1.0, seed=seed)))
    for _ in range(200):
        if watched.engine.idle:
            break
        watched.step()
        tables_agree(watched.engine)
    assert watched.engine.metrics.adopted_pages >= 6
    for outcome in watched.outcomes.values():
        assert outcome.end is not None
        assert outcome.end.reason == "length"
        judge(toy(0, True), outcome)


def test_bounded_pages_are_not_exchanged() -> None:
    """Hits of another length give the same tokens' rows other bits: each reply stays on its own, to the bit of its own oracle."""
    config = EngineConfig(pages=80, page_tokens=SIZE, max_running=4, step_cost=24, mixed_cost=24, speculation="off")
    watched = Witness(Engine(toy(0, True), config))
    watched.engine.pages.awaits = lambda job, *, busy: False  # type: ignore[method-assign]
    long = [(11 * i) % 250 + 4 for i in range(90)]
    watched.add(ask(long[:20], 1))
    watched.finish()
    for _ in range(2):  # the second one hits what the first has published until now
        watched.add(ask(long, 6))
        watched.step()
        watched.step()
    watched.finish()
    hits = {admission.span.hit for admission in watched.admissions}
    assert len(hits) == 3
    assert watched.engine.pages.index.counters.duplicates > 0, "nothing was computed twice"
    assert watched.engine.metrics.adopted_pages == 0
    watched.judge([])


def test_pages_adopted_by_a_request_that_fails_are_doubted_too() -> None:
    """Its numbers went wrong on pages of another: nobody else is given them, and nothing of the other's is freed twice."""
    fake = scripted(step_cost=200)
    good, bad = (fake.engine.add(ask(PROMPT, count, prompt_logprobs=0)) for count in (1, 30))
    while good in fake.engine.jobs:
        fake.engine.step()
    assert fake.engine.metrics.adopted_pages >= 6
    assert cached(fake, PROMPT) == 24
    fake.poison.add(bad)
    ends = [event for _ in range(3) for event in fake.engine.step() if isinstance(event, FinishedEvent)]
    assert isinstance(ends[0].error, NonFiniteLogits)
    assert cached(fake, PROMPT) == 0
    fake.engine.pages.index.check()
    assert fake.engine.pages.pool.owned == 0
    assert end_of(fake, ask(PROMPT)).usage.cached_tokens == 0


# ---- pages under doubt


def cached(fake: Scripted, prompt: list[int]) -> int:
    """Tokens that the index would give a prompt now, lower tiers included."""
    job = Job(10_000, ask(prompt), 0.0)
    fake.engine.pages.enter(job)
    assert job.chain is not None
    found = fake.engine.pages.index.match(PrefixQuery(job.chain))
    fake.engine.pages.release(found.retained)
    return max(found.tokens, found.reach)


@pytest.mark.parametrize("shared", [2, 10, 18])
@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("tier", [False, True])
def test_a_page_hit_in_part_is_doubted_as_whole_pages_are(shared: int, more: int, tier: bool) -> None:
    """The request goes on inside a page of another (one that had ended in it, or a full one) and its numbers go wrong."""
    fake = scripted(Tiers(host_bytes=1 << 20, store=None) if tier else None)
    first = PROMPT[: shared + more]
    end_of(fake, ask(first, 1))
    assert cached(fake, first) == len(first)
    # Where the other one had ended inside a page, fail before that page is full: a full one would stand in its place.
    failing = fake.engine.add(ask([*PROMPT[:shared], *([200, 201, 202] if more else [200])], 5))
    fake.poison.add(failing)
    ends = [event for _ in range(4) for event in fake.engine.step() if isinstance(event, FinishedEvent)]
    assert isinstance(ends[0].error, NonFiniteLogits)
    assert ends[0].usage.cached_tokens == shared
    assert cached(fake, first) == 0, "a page whose rows led to wrong numbers is offered again"
    fake.engine.pages.index.check()
    again = end_of(fake, ask(first, 3))
    assert again.usage.cached_tokens == 0


def test_doubt_ends_where_others_have_gone_on() -> None:
    """Behind the page that was hit in part another request has published: its numbers were right, so the page stays."""
    fake = scripted()
    end_of(fake, ask(PROMPT[:12], 1))
    end_of(fake, ask(PROMPT, 1))
    failing = fake.engine.add(ask([*PROMPT[:10], 200, 201, 202], 5))
    fake.poison.add(failing)
    for _ in range(4):
        fake.engine.step()
    assert cached(fake, PROMPT) == 24
    assert end_of(fake, ask(PROMPT, 1)).usage.cached_tokens == 24


# ---- nothing is lost for a request that does not fit


@pytest.fixture
def crowded() -> Iterator[tuple[Scripted, list[int], list[int]]]:
    """16 pages: a cached prompt of 6, a running request that needs 8, and a prompt of 12 pages that only host memory holds."""
    tiers = Tiers(host_bytes=1 << 20, store=None)
    fake = scripted(tiers, pages=16, step_cost=80)
    wide = [(3 * i) % 250 + 4 for i in range(48)]
    end_of(fake, ask(wide, 1))
    while fake.engine.pages.pool.cached:
        assert fake.engine.pages.index.evict_one() is not None
    end_of(fake, ask(PROMPT, 1))
    yield fake, wide, [(9 * i) % 250 + 4 for i in range(28)]
    assert tiers.close()


def test_a_refused_request_costs_nobody_a_cached_page(crowded: tuple[Scripted, list[int], list[int]]) -> None:
    fake, wide, busy = crowded
    running = fake.engine.add(ask(busy, 5))
    fake.engine.step()
    counters, tiers = fake.engine.pages.index.counters, fake.engine.pages.tiers
    assert tiers is not None
    before, read, kept = counters.evicted, tiers.counters.host_hits, cached(fake, PROMPT)
    assert kept == 24
    waiting = fake.engine.add(ask(wide, 2))
    for _ in range(3):
        fake.engine.step()
        assert fake.engine.jobs[waiting].slot is None, "it does not fit while the other one runs"
        assert counters.evicted == before, "a cached page went for a request that does not run"
        assert tiers.counters.host_hits == read, "pages were brought back for a request that does not run"
        assert cached(fake, PROMPT) == kept
    ends = {}
    while fake.engine.jobs:
        ends |= {event.id: event for event in fake.engine.step() if isinstance(event, FinishedEvent)}
    ends |= {event.id: event for event in fake.engine.step() if isinstance(event, FinishedEvent)}
    assert ends.keys() >= {running, waiting}
    assert ends[waiting].usage.cached == {"device": 0, "host": 48}, "and then it is restored whole"
    assert MODEL.plan.alignment == 2


@pytest.mark.parametrize("wanted", [24, 36])
def test_nobody_gives_way_to_a_request_that_does_not_fit_all_the_same(wanted: int) -> None:
    """16 pages: 8 of a request of high priority, 4 of a low one. A high one of 6 pages takes the low one's place; for one of 9
    that would be in vain, so the low one goes on."""
    fake = scripted(pages=16, step_cost=200)
    high = fake.engine.add(ask([(3 * i) % 250 + 4 for i in range(28)], 4, priority=1))
    low = fake.engine.add(ask([(5 * i) % 250 + 4 for i in range(13)], 3))
    fake.engine.step()
    late = fake.engine.add(ask([(9 * i) % 250 + 4 for i in range(wanted)], 2, priority=1))
    fake.engine.step()
    fits = wanted == 24
    assert (fake.engine.jobs[low].slot is None) == (fake.engine.jobs[late].slot is not None) == fits
    assert fake.engine.metrics.preemptions == fits
    ends = {}
    for _ in range(40):
        ends |= {event.id: event.reason for event in fake.engine.step() if isinstance(event, FinishedEvent)}
    assert ends == dict.fromkeys((high, low, late), "length")
    assert fake.engine.metrics.preemptions == fits


# ---- pages that are brought back


def test_a_restore_that_raises_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages of a hit are in the pool, the others in host memory, which fails once: the request is served when it is tried
    again, and nobody holds what the failure had in its hands."""
    fake = scripted(tiers := Tiers(host_bytes=1 << 20, store=None), pages=14)
    end_of(fake, ask(PROMPT))
    end_of(fake, ask([4] * 41, 10))
    pool = fake.engine.pages.pool
    fake.engine.add(ask(PROMPT[:9], 1))
    while not fake.engine.idle:
        fake.engine.step()
    number = fake.engine.add(ask(PROMPT))
    own = tiers.get_many

    def broken(keys: list[bytes]) -> Iterator[object]:
        yield next(own(keys))
        raise MemoryError("no place for a page")

    monkeypatch.setattr(tiers, "get_many", broken)
    with pytest.raises(MemoryError, match="no place for a page"):
        fake.engine.step()
    assert pool.owned == 0, "pages stay with nobody"
    pool.check()
    monkeypatch.undo()
    events = []
    while not fake.engine.idle:
        events += fake.engine.step()
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.id == number
    assert end.usage.cached["device"] == 8
    assert end.usage.cached["host"] == 16
    assert [token for event in events if isinstance(event, TokenEvent) for token in event.tokens] == follow(PROMPT, 2)
    assert pool.owned == 0
    pool.check()
