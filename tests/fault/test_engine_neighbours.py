"""What one client does must not reach another: refused requests, shared prefixes, deadlines, odd values, images that fail."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch

from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.errors import QueueFull
from kvist.engine.request import FinishedEvent, ImageInput, Request
from tests.engine_fakes import Scripted, follow
from tests.equivalence.engine_traces import judge
from tests.fault.test_engine_faults import ask, engine, sound

LONG = [(3 * i) % 250 + 4 for i in range(160)]


def scripted(**budgets: object) -> Scripted:
    values: dict[str, object] = {
        "pages": 200, "page_tokens": 4, "max_running": 4, "step_cost": 16, "mixed_cost": 16, "speculation": "off",
    }  # fmt: skip
    return Scripted(EngineConfig(**{**values, **budgets}))  # type: ignore[arg-type]


def test_a_refused_request_does_not_end_the_one_that_comes_after_it() -> None:
    """While a step runs, a request is refused (queue full), a waiting client leaves, and another joins: the last is served."""

    async def main() -> None:
        fake, held, go = scripted(max_running=1, max_waiting=1), threading.Event(), threading.Event()
        own = fake.engine.runner.run

        def slow(pieces):  # type: ignore[no-untyped-def]
            held.set()
            go.wait(20)
            return own(pieces)

        async with AsyncEngine(fake.engine) as served:
            fake.engine.runner.run = slow  # type: ignore[method-assign]
            running = asyncio.create_task(served.complete(ask([9, 8], 40)))
            await asyncio.to_thread(held.wait, 20)
            tasks = []
            for prompt in ([5, 5], [6, 6]):  # one waits, one is refused
                tasks.append(asyncio.create_task(served.complete(ask(prompt, 4))))
                await asyncio.sleep(0.05)
            tasks[0].cancel()
            await asyncio.sleep(0.05)
            last = asyncio.create_task(served.complete(ask([7, 7], 4)))
            await asyncio.sleep(0.05)
            go.set()
            with pytest.raises(QueueFull):
                await asyncio.wait_for(tasks[1], 20)
            tokens, end = await asyncio.wait_for(last, 20)
            assert tokens == follow([7, 7], 4)
            assert end.reason == "length"
            assert (await running)[0] == follow([9, 8], 40)

    asyncio.run(main())


def test_who_waits_for_pages_of_another_keeps_nobody_else_waiting() -> None:
    """A long prompt is computed, its twin waits for those pages; a short request of a third tenant starts meanwhile."""
    fake = scripted(max_running=4)
    fake.engine.add(ask(LONG, 2, tenant="a"))
    fake.engine.step()
    twin = fake.engine.add(ask(LONG, 2, tenant="b"))
    short = fake.engine.add(ask([5, 6, 7], 2, tenant="c"))
    ends = []
    for _ in range(60):
        ends += [event.id for event in fake.engine.step() if isinstance(event, FinishedEvent)]
        if len(ends) == 3:
            break
    assert ends[0] == short
    assert ends[-1] == twin


def test_requests_that_have_ended_are_forgotten_before_their_deadline() -> None:
    fake, ended = scripted(), []
    for round_number in range(60):
        number = fake.engine.add(ask([round_number + 4, 5], 1, deadline_s=1e9))
        ended.append(weakref.ref(fake.engine.jobs[number]))
        while not fake.engine.idle:
            fake.engine.step()
    gc.collect()
    assert sum(job() is not None for job in ended) <= 20


@pytest.mark.parametrize("wrong", [{"replay": 13.5}, {"replay": float("nan")}, {"replay": True}, {"priority": "high"},
                                   {"priority": float("nan")}, {"tenant": None}, {"salt": "text"}])  # fmt: skip
def test_values_of_another_kind_are_refused_at_the_door(wrong: dict[str, object]) -> None:
    """They would otherwise come to light inside a step, which is everybody's."""
    watched = engine()
    steady = watched.add(ask(list(range(4, 24))))
    watched.step()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        watched.add(ask(list(range(4, 24)), **wrong))
    watched.finish()
    sound(watched, steady)


def test_usage_of_a_hit_that_memory_cuts_is_what_was_used() -> None:
    """One page too few to copy a shared partial page: the hit is cut to whole pages, and so are the counts."""
    fake = scripted(pages=12, max_running=2)
    prompt = LONG[:30]
    list(fake.engine.generate(ask(prompt, 1)))
    # 30 tokens are 7 whole pages and half of the eighth; 48 need all 12 pages, so nothing is left to copy from.
    events = list(fake.engine.generate(ask(prompt + [(7 * i) % 250 + 4 for i in range(16)], 2)))
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.reason == "length"
    assert end.usage.cached_tokens == 28
    assert end.usage.replayed_tokens == 8


class Picture:
    """Embeddings that can be had so many times, then the source is gone."""

    def __init__(self, times: int, seed: int) -> None:
        self.times = times
        self.values = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))

    def __call__(self) -> torch.Tensor:
        if not self.times:
            raise OSError("the picture is gone")
        self.times -= 1
        return self.values


@pytest.fixture
def seeing():  # type: ignore[no-untyped-def]
    """The engine of the toy, made to accept images (features come ready)."""
    watched = engine(feature_bytes=1, step_cost=400, mixed_cost=400)
    model, before = watched.engine.model, watched.engine.model.vision
    model.vision = torch.nn.Identity()  # type: ignore[assignment]
    yield watched
    model.vision = before


def test_a_picture_that_fails_when_encoded_again_ends_its_request_only(seeing) -> None:  # type: ignore[no-untyped-def]
    """Two pictures and room for one: what a pass needs is held for that pass, or its loss is that request's own."""
    images = tuple(ImageInput(start=start, tokens=8, content=bytes([start]) * 32, embed=Picture(1, start)) for start in (2, 12))
    steady = seeing.add(ask(list(range(4, 24))))
    seen = seeing.add(ask([5] * 24, images=images))
    seeing.finish()
    sound(seeing, steady)
    assert seeing.outcomes[seen].end is not None


def test_a_digest_that_stands_for_spans_of_two_lengths_ends_the_second_request_only(seeing) -> None:  # type: ignore[no-untyped-def]
    content = bytes(32)
    first = seeing.add(ask([5] * 12, images=(ImageInput(start=2, tokens=8, content=content, embed=Picture(9, 1)),)))
    steady = seeing.add(ask(list(range(4, 24))))
    longer = seeing.add(ask([6] * 20, images=(ImageInput(start=2, tokens=12, content=content, embed=Picture(9, 1)),)))
    seeing.finish()
    sound(seeing, steady)
    assert seeing.outcomes[first].end.reason == "length"
    assert isinstance(seeing.outcomes[longer].end.error, ValueError)


def test_images_may_be_named_in_any_order(seeing) -> None:  # type: ignore[no-untyped-def]
    images = tuple(ImageInput(start=start, tokens=8, content=bytes([start]) * 32, embed=Picture(9, start)) for start in (2, 12))
    replies = []
    for order in (images, images[::-1]):
        number = seeing.add(ask([5] * 24, images=order))
        seeing.finish()
        replies.append(seeing.outcomes[number].tokens)
    assert replies[0] == replies[1]


def test_copies_of_a_request_equal_their_solo_runs() -> None:
    """n = 3 on the model: the copies share the prompt's pages and each is the reply that its own seed gives alone."""
    from kvist.engine.sampler import SamplingParams

    prompt, sampling = list(range(4, 40)), SamplingParams(temperature=0.9, seed=7, n=3)
    watched = engine(speculation=3)
    replies: dict[int, list[int]] = {}
    cached = []
    numbers = [watched.add(Request(prompt=prompt, max_tokens=9, ignore_end=True, sampling=one)) for one in sampling.copies()]
    watched.finish()
    for number, one in zip(numbers, sampling.copies(), strict=True):
        outcome = watched.outcomes[number]
        judge(watched.engine.model, outcome)
        assert outcome.request.sampling == one
        replies[number] = outcome.tokens
        assert outcome.end is not None
        cached.append(outcome.end.usage.cached_tokens)
    assert len({tuple(tokens) for tokens in replies.values()}) == 3
    assert cached == [0, 36, 36]
