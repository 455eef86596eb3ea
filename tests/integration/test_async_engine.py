"""Asynchronous clients: many at once, some that vanish, errors at the door, and the end of the engine itself."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.errors import EmptyPrompt, EngineStopped, QueueFull, RequestTooLong
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from tests.engine_fakes import Scripted, follow


def scripted(**budgets: object) -> Scripted:
    """A scripted engine with room for two requests at a time."""
    values: dict[str, object] = {"pages": 64, "page_tokens": 4, "max_running": 2, "max_waiting": 100, "speculation": "off"}
    return Scripted(EngineConfig(**{**values, **budgets}))  # type: ignore[arg-type]


def request(prompt: list[int], count: int, **more: object) -> Request:
    return Request(prompt=prompt, max_tokens=count, ignore_end=True, **more)  # type: ignore[arg-type]


def test_many_clients_get_their_own_tokens() -> None:
    async def main() -> None:
        rng = random.Random(0)
        prompts = [[rng.randrange(4, 256) for _ in range(rng.randrange(1, 30))] for _ in range(20)]
        async with AsyncEngine(scripted().engine) as engine:
            replies = await asyncio.gather(*(engine.complete(request(prompt, 9)) for prompt in prompts))
        for prompt, (tokens, end) in zip(prompts, replies, strict=True):
            assert tokens == follow(prompt, 9)
            assert end.reason == "length"
            assert end.usage.completion_tokens == 9

    asyncio.run(main())


def test_vanished_clients_free_what_they_held() -> None:
    """SRV-05: rounds of requests whose clients leave at once or in the middle; free pages come back, a normal one is served."""

    async def main() -> None:
        fake = scripted()
        async with AsyncEngine(fake.engine) as engine:
            for round_number in range(10):

                async def leave(index: int, round_number: int = round_number) -> None:
                    async for event in engine.generate(request([10 + index, round_number + 4, 7], 200)):
                        if isinstance(event, TokenEvent) and index % 2:
                            return

                tasks = [asyncio.create_task(leave(index)) for index in range(4)]
                await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                tokens, _ = await engine.complete(request([5, 6, round_number + 4], 8))
                assert tokens == follow([5, 6, round_number + 4], 8)
        pool = fake.engine.pages.pool
        assert pool.owned == 0
        assert pool.free + pool.cached == pool.total
        assert not fake.engine.jobs
        assert fake.engine.scheduler.idle

    asyncio.run(main())


def test_errors_at_the_door_disturb_nobody() -> None:
    async def main() -> None:
        async with AsyncEngine(scripted(max_waiting=1, max_running=1).engine) as engine:
            steady = asyncio.create_task(engine.complete(request([9, 8], 120)))
            for wrong, error in (
                (request([], 3), EmptyPrompt),
                (request([4] * 250, 200), RequestTooLong),
                (request([999], 3), ValueError),
            ):
                with pytest.raises(error):
                    await engine.complete(wrong)
            many = await asyncio.gather(*(engine.complete(request([4, k], 200)) for k in range(4, 10)), return_exceptions=True)
            refused = [reply for reply in many if isinstance(reply, QueueFull)]
            assert refused
            assert "the limit is 1" in str(refused[0])
            assert (await steady)[0] == follow([9, 8], 120)

    asyncio.run(main())


def test_copies_have_their_own_seeds_and_come_interleaved() -> None:
    async def main() -> None:
        async with AsyncEngine(scripted().engine) as engine:
            sampling = SamplingParams(temperature=20.0, seed=3, n=3)
            replies: dict[int, list[int]] = {}
            async for event in engine.generate(request([5, 6, 7], 6, sampling=sampling)):
                if isinstance(event, TokenEvent):
                    replies.setdefault(event.id, []).extend(event.tokens)
        assert len(replies) == 3
        assert len({tuple(tokens) for tokens in replies.values()}) == 3

    asyncio.run(main())


def test_closing_ends_every_request() -> None:
    async def main() -> None:
        engine = AsyncEngine(scripted().engine)
        ends: list[FinishedEvent] = []

        async def listen(prompt: list[int]) -> None:
            async for event in engine.generate(request(prompt, 230)):
                if isinstance(event, FinishedEvent):
                    ends.append(event)

        tasks = [asyncio.create_task(listen([4, k])) for k in range(5, 10)]
        await asyncio.sleep(0.05)
        await engine.close()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert len(ends) == 5
        assert all(end.reason in ("cancelled", "length") for end in ends)
        with pytest.raises(EngineStopped):
            await engine.complete(request([5], 3))

    asyncio.run(main())


def test_a_failing_step_is_told_to_everybody() -> None:
    async def main() -> None:
        fake = scripted()
        fake.engine.scheduler.plan = lambda now: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        engine = AsyncEngine(fake.engine)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(engine.complete(request([5], 3)), 10)
        with pytest.raises(EngineStopped, match="division"):
            await engine.complete(request([5], 3))

    asyncio.run(main())
