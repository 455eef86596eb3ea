"""Many asynchronous clients on one engine: a thread that steps, a queue of events a request, an end for every request.

Owns the thread and the hand-over between it and event loops. Must not know how a step works. A client that goes away (its
iterator is closed or its task cancelled) aborts its request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvist.engine.engine import Engine
from kvist.engine.errors import EngineStopped
from kvist.engine.progress import Usage
from kvist.engine.request import Event, FinishedEvent, Job, Request


@dataclass(frozen=True)
class _Client:
    """Where a request's events go."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event]

    def give(self, event: Event) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class AsyncEngine:
    """Steps an engine in a thread of its own while there is work. Use `async with`, or `close` it.

    `on_step`: called in that thread after every step (metrics). An error that escapes a step ends all requests with it and
    stops the engine: its state is then unknown.
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

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request's `n` replies as they come. Raises what `Engine.add` raises before the first event."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        client = _Client(asyncio.get_running_loop(), queue)
        copies = [replace(request, sampling=sampling) for sampling in request.sampling.copies()]
        jobs = [await asyncio.to_thread(self.engine.prepare, copy) for copy in copies]
        numbers: list[int] = []
        try:
            for job in jobs:
                numbers.append(await asyncio.shield(self._submit(job, client)))
            running = set(numbers)
            while running:
                event = await queue.get()
                if isinstance(event, FinishedEvent):
                    running.discard(event.id)
                yield event
        finally:
            # The job's number may not have come back when the client left; the engine's thread assigns it before the abort.
            self._post(lambda: self._leave(jobs))

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

    async def close(self) -> None:
        """End all requests as cancelled and the thread with them."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, job: Job, client: _Client) -> asyncio.Future[int]:
        done: Future[int] = Future()

        def add() -> None:
            try:
                number = self.engine.submit(job)
            except Exception as error:  # noqa: BLE001  # raised where the client waits
                done.set_exception(error)
            else:
                self._clients[number] = client
                done.set_result(number)

        self._post(add)
        return asyncio.wrap_future(done)

    def _leave(self, jobs: list[Job]) -> None:
        for job in jobs:
            if self._clients.pop(job.id, None) is not None:
                self.engine.abort(job.id)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._failure is not None or not self._thread.is_alive():
                raise EngineStopped(f"the engine has stopped ({self._failure or 'closed'}); start a new one")
            self._commands.append(command)
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            while self._next():
                for event in self.engine.step():
                    self._deliver(event)
                if self.on_step is not None:
                    self.on_step(self.engine)
        except Exception as error:  # noqa: BLE001  # told to every client, and to all that come later
            self._failure = error
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
        failed = not isinstance(self._failure, EngineStopped)
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
