"""A server whose engine is a script: exact texts, pauses and failures behind the real routes, on a real socket.

Owns the script's words and the thread that serves. For tests that must know what a model says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anthropic
import httpx
import openai

from kvist.engine.progress import Usage
from kvist.engine.request import Event, FinishedEvent, Request, TokenEvent
from kvist.engine.sampling.logprobs import TokenLogprobs
from kvist.server.app import create_service
from kvist.server.main import DrainingServer, serve_app
from kvist.server.served import Served
from kvist.server.service import Service
from kvist.server.settings import read_settings
from kvist.server.tracing import Tracing
from kvist.text import Tokenizer

NANO = Path(__file__).resolve().parents[1] / "models" / "nano"
TOKENIZER = Tokenizer(NANO)
END_ID = 1


@dataclass(frozen=True)
class Pause:
    """Nothing for a while."""

    seconds: float


Step = str | int | Pause | Exception
Script = Callable[[Request], Sequence[Step]]


@dataclass
class ScriptedClient:
    """Says what `script` says of a request: text (marks become control tokens), single ids, pauses, errors; then the end.

    `requests` keeps what was asked; `open` counts what runs. `closed` turns true when the server is gone. `cached`: prompt tokens
    that it claims to have found.
    """

    script: Script
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    left_early: int = 0
    closed: bool = False
    cached: int = 0

    async def submit(self, request: Request) -> ScriptedEvents:
        """The events of one reply. An error that comes first is raised."""
        self.requests.append(request)
        steps = [*self.script(request), END_ID]
        if isinstance(steps[0], Exception):
            raise steps[0]
        self.open += 1
        return ScriptedEvents(self, request, steps, len(self.requests))

    async def close(self) -> None:
        """Nothing to end."""
        self.closed = True


class ScriptedEvents:
    """One reply on its way."""

    def __init__(self, client: ScriptedClient, request: Request, steps: Sequence[Step], number: int) -> None:
        self.client, self.request, self.number = client, request, number
        self.usage, self.over = Usage(prompt_tokens=len(request.prompt), cached={"device": client.cached}), False
        self._events = self._said(steps)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def close(self) -> list[FinishedEvent]:
        """The end, if it had not come."""
        if self.over:
            return []
        self.client.left_early += 1
        return [self._end("cancelled")]

    def _end(self, reason: str, error: Exception | None = None) -> FinishedEvent:
        self.over = True
        self.client.open -= 1
        return FinishedEvent(id=self.number, reason=reason, usage=self.usage, error=error)

    async def _said(self, steps: Sequence[Step]) -> AsyncIterator[Event]:
        wants = self.request.sampling.logprobs
        for step in steps:
            if isinstance(step, Exception):
                yield self._end("error", step)
                return
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                continue
            for token in [step] if isinstance(step, int) else TOKENIZER.encode(step, allow_special=True):
                self.usage.completion_tokens += 1
                detail = None if wants is None else (TokenLogprobs(token, -0.5, ((token, -0.5), (7, -1.5))[:wants]),)
                yield TokenEvent(id=self.number, tokens=(token,), logprobs=detail)
                if token == END_ID or self.usage.completion_tokens == self.request.max_tokens:
                    yield self._end("stop" if token == END_ID else "length")
                    return
                await asyncio.sleep(0)


@dataclass(frozen=True)
class Live:
    """A server on a socket, with its clients."""

    url: str
    service: Service
    engine: ScriptedClient
    server: DrainingServer

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=20)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20)


def scripted(script: Script) -> Served:
    """A served model that follows a script; the facts are those of `models/nano`."""
    return Served(
        name="nano",
        engine=ScriptedClient(script),
        tokenizer=TOKENIZER,
        context=32768,
        vocab_size=7168,
        bos_id=0,
        eos_id=END_ID,
        created=1_700_000_000,
        fingerprint="fp_test",
    )


def says(*steps: Step) -> Script:
    """The same for every request."""
    return lambda request: steps


@contextmanager
def serving(served: Served | Script, tracing: Tracing | None = None, **settings: object) -> Iterator[Live]:
    """A live server in a thread of its own."""
    served = served if isinstance(served, Served) else scripted(served)
    service = create_service(served, read_settings(port=0, **settings), tracing)
    ports: list[int] = []
    ready = threading.Event()

    def on_ready(port: int) -> None:
        ports.append(port)
        ready.set()

    server = serve_app(service, on_ready=on_ready)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert ready.wait(10), "the server did not start"
    try:
        yield Live(f"http://127.0.0.1:{ports[0]}", service, served.engine, server)  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
