"""Many asynchronous clients on one engine: a thread that steps, a queue of events a request, an end for every request.

Owns the thread and the hand-over between it and event loops. Must not know how a step works. A client that goes away (its
stream is closed or its task cancelled) aborts its request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from kvist.engine.engine import Engine
from kvist.engine.errors import EngineStopped
from kvist.engine.progress import Usage
from kvist.engine.request import Event, FinishedEvent, Job, Request

T = TypeVar("T")


@dataclass(frozen=True)
class _Client:
    """Where a request's events go."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event]

    def give(self, event: Event) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class RequestStream:
    """The events of an accepted request's `n` replies as they come; iterate it once, then `close` it. One event loop."""

    def __init__(self, leave: Callable[[], None], events: asyncio.Queue[Event], numbers: Sequence[int]) -> None:
        self._leave, self._events, self._running = leave, events, set(numbers)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event; the last one of each reply is its FinishedEvent."""
        if not self._running:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, FinishedEvent):
            self._running.discard(event.id)
        return event

    def leave(self) -> None:
        """End the replies that still run, without waiting for their ends. Leaving twice changes nothing."""
        if self._running:
            self._leave()

    async def close(self) -> list[FinishedEvent]:
        """End the replies that still run and wait for their ends, which say what each has cost; at most the step under way."""
        self.leave()
        return [event async for event in self if isinstance(event, FinishedEvent)]


class AsyncEngine:
    """Steps an engine in a thread of its own while there is work. Use `async with`, or `close` it.

    `on_step`: called in that thread after every step (metrics). An error that escapes a step ends all requests with it and
    stops the engine: its state is then unknown, and `alive` is False.
    """

    def __init__(self, engine: Engine, *, on_step: Callable[[Engine], None] | None = None) -> None:
        self.engine, self.on_step = engine, on_step
        self._clients: dict[int, _Client] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are served: the engine's thread runs, nothing has stopped it and nobody is closing it."""
        return self._thread.is_alive() and self._failure is None and not self._closing

    async def submit(self, request: Request) -> RequestStream:
        """Check and queue a request (its `n` replies); its events.

        Raises what `Engine.add` raises (EmptyPrompt, RequestTooLong, ValueError, GrammarError, QueueFull), and EngineStopped;
        then none of its replies runs.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue()
        client = _Client(asyncio.get_running_loop(), queue)
        copies = [replace(request, sampling=sampling) for sampling in request.sampling.copies()]
        jobs = [await asyncio.to_thread(self.engine.prepare, copy) for copy in copies]
        accepted = self._add(jobs, client)
        try:
            numbers = await asyncio.shield(accepted)
        except asyncio.CancelledError:
            # The numbers may be on their way: the engine's thread assigns them before it comes to this.
            self._leave(jobs)
            raise
        return RequestStream(lambda: self._leave(jobs), queue, numbers)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request's `n` replies as they come. Raises what `submit` raises before the first event."""
        stream = await self.submit(request)
        try:
            async for event in stream:
                yield event
        finally:
            stream.leave()

    async def complete(self, request: Request) -> tuple[list[int], FinishedEvent]:
        """All tokens of a single reply and its end. Raises the request's own error."""
        tokens: list[int] = []
        async for event in self.generate(request):
            if isinstance(event, FinishedEvent):
                if event.error is not None:
                    raise event.error
                return tokens, event
            tokens += event.tokens
        raise AssertionError("a request ends with FinishedEvent")

    async def between_steps(self, work: Callable[[Engine], T]) -> T:
        """What `work` gives, called in the engine's thread between two steps. Raises what it raises, and EngineStopped."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                self._require_running()
                done.set_result(work(self.engine))
            except Exception as error:  # noqa: BLE001  # raised where the caller waits
                done.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(done)

    async def close(self) -> None:
        """End all requests as cancelled and the thread with them."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        await asyncio.to_thread(self._thread.join)

    def _add(self, jobs: list[Job], client: _Client) -> asyncio.Future[list[int]]:
        """All jobs or none: the numbers of those that were queued."""
        done: Future[list[int]] = Future()

        def add() -> None:
            queued: list[int] = []
            try:
                self._require_running()
                for job in jobs:
                    queued.append(self.engine.submit(job))
            except Exception as error:  # noqa: BLE001  # raised where the client waits
                for job in jobs[: len(queued)]:
                    self.engine.abort(job.id)
                done.set_exception(error)
            else:
                self._clients.update(dict.fromkeys(queued, client))
                done.set_result(queued)

        self._post(add)
        return asyncio.wrap_future(done)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Abort jobs; their ends come as those of others do. An engine that has stopped has ended them itself."""

        def abort() -> None:
            for job in jobs if self._failure is None else ():
                self.engine.abort(job.id)

        with suppress(EngineStopped):
            self._post(abort)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._require_running()
            self._commands.append(command)
            self._wake.notify_all()

    def _require_running(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the engine has stopped ({self._failure}); start a new one")

    def _run(self) -> None:
        try:
            while self._next():
                for event in self.engine.step():
                    self._deliver(event)
                if self.on_step is not None:
                    self.on_step(self.engine)
        except BaseException as error:  # noqa: BLE001  # whatever ends the thread is told to every client, and to all that come later
            ended = EngineStopped(f"the engine's thread was ended by {type(error).__name__}")
            self._failure = error if isinstance(error, Exception) else ended
        self._stop()

    def _next(self) -> bool:
        """Wait for work and take commands; False when the engine is to end."""
        while True:
            with self._wake:
                while not self._commands and not self._closing and self.engine.idle:
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            for event in self.engine.take_ended():
                self._deliver(event)
            if closing:
                return False
            if not self.engine.idle:
                return True

    def _deliver(self, event: Event) -> None:
        client = self._clients.get(event.id)
        if client is None:
            return
        if isinstance(event, FinishedEvent):
            del self._clients[event.id]
        client.give(event)

    def _stop(self) -> None:
        """Every request gets its end, also those that were handed in last."""
        with self._wake:
            self._failure = self._failure or EngineStopped("the engine was closed")
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        failed = not self._closing
        for number, client in list(self._clients.items()):
            self._clients.pop(number)
            reason = "error" if failed else "cancelled"
            client.give(
                FinishedEvent(id=number, reason=reason, usage=self._usage(number), error=self._failure if failed else None)
            )
            if not failed:
                self.engine.abort(number)

    def _usage(self, number: int) -> Usage:
        job = self.engine.jobs.get(number)
        return Usage() if job is None else job.usage
