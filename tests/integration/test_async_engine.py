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


def test_a_refused_request_raises_before_there_is_a_stream() -> None:
    """`submit` raises by name and leaves nothing behind; of three copies with room for two none runs."""

    async def main() -> None:
        fake = scripted(max_waiting=2, max_running=1)
        async with AsyncEngine(fake.engine) as engine:
            for wrong, error in (
                (request([], 3), EmptyPrompt),
                (request([4] * 250, 200), RequestTooLong),
                (request([999], 3), ValueError),
            ):
                with pytest.raises(error):
                    await engine.submit(wrong)
            with pytest.raises(QueueFull, match="the limit is 2"):
                await engine.submit(request([5, 6], 9, sampling=SamplingParams(n=3)))
            tokens, _ = await engine.complete(request([5, 6], 9))
            assert tokens == follow([5, 6], 9)
            assert not fake.engine.jobs
        with pytest.raises(EngineStopped, match="closed"):
            await engine.submit(request([5], 3))

    asyncio.run(main())


def test_an_aborted_request_tells_what_it_has_cost() -> None:
    async def main() -> None:
        fake = scripted(max_running=3)
        async with AsyncEngine(fake.engine) as engine:
            prompt = list(range(10, 30))
            await engine.complete(request(prompt, 1))
            stream = await engine.submit(request(prompt, 200, sampling=SamplingParams(n=2)))
            seen: dict[int, int] = {}
            async for event in stream:
                assert isinstance(event, TokenEvent)
                seen[event.id] = seen.get(event.id, 0) + len(event.tokens)
                if len(seen) == 2 and min(seen.values()) >= 3:
                    break
            ends = await asyncio.wait_for(stream.close(), 10)
            assert {end.id for end in ends} == seen.keys()
            for end in ends:
                assert end.reason == "cancelled"
                assert end.usage.prompt_tokens == 20
                assert end.usage.cached_tokens == 20
                assert seen[end.id] <= end.usage.completion_tokens < 200
            assert await stream.close() == [], "it has ended"
            # Waiting in the queue, and not even that: there is an end all the same.
            streams = [await engine.submit(request([4, k], 200)) for k in range(4, 9)]
            for waiting in streams:
                (end,) = await asyncio.wait_for(waiting.close(), 10)
                assert (end.reason, end.usage.prompt_tokens) == ("cancelled", 2)
        pool = fake.engine.pages.pool
        assert pool.owned == 0
        assert fake.engine.metrics.ended == {"length": 1, "cancelled": 7}
        assert not engine._clients

    asyncio.run(main())


def test_a_client_that_goes_while_it_is_being_accepted_leaves_nothing() -> None:
    async def main() -> None:
        fake = scripted()
        async with AsyncEngine(fake.engine) as engine:
            busy = asyncio.create_task(engine.complete(request([8, 8], 60)))
            for pause in (0.0, 0.0005, 0.001, 0.002, 0.004):
                going = asyncio.create_task(engine.submit(request([5, 6, 7], 200)))
                await asyncio.sleep(pause)
                going.cancel()
                done = (await asyncio.gather(going, return_exceptions=True))[0]
                if not isinstance(done, BaseException):
                    await done.close()
            assert (await busy)[0] == follow([8, 8], 60)
            for _ in range(200):
                if fake.engine.idle and not engine._clients:
                    break
                await asyncio.sleep(0.01)
            assert not fake.engine.jobs
            assert not engine._clients

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["closed", "step fails", "thread is ended"])
def test_a_dead_engine_is_not_alive(ending: str) -> None:
    """However its thread ends, readiness sees it, who runs is told, and closing what ran does not hang."""

    async def main() -> None:
        fake = scripted()
        engine = AsyncEngine(fake.engine)
        assert engine.alive
        stream = await engine.submit(request([5, 6], 240))
        await anext(stream)
        assert engine.alive
        if ending == "closed":
            await engine.close()
        elif ending == "step fails":
            fake.engine.scheduler.plan = lambda now: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        else:

            def leave(engine: object) -> None:
                raise SystemExit

            engine.on_step = leave
        *_, end = [event async for event in stream]
        assert isinstance(end, FinishedEvent)
        if ending == "closed":
            assert (end.reason, end.error) == ("cancelled", None)
        else:
            assert end.reason == "error"
            assert isinstance(end.error, ZeroDivisionError if ending == "step fails" else EngineStopped)
        assert end.usage.completion_tokens > 0
        assert not engine.alive
        assert await stream.close() == []
        with pytest.raises(EngineStopped):
            await engine.submit(request([5], 3))

    asyncio.run(asyncio.wait_for(main(), 20))
