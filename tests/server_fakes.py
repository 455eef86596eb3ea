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
from kvist.server.main import serve_app
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

    `requests` keeps what was asked; `open` counts what runs. `closed` turns true when the server is gone.
    """

    script: Script
    requests: list[Request] = field(default_factory=list)
    open: int = 0
    left_early: int = 0
    closed: bool = False

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """The events of one reply."""
        self.requests.append(request)
        self.open += 1
        number, usage, whole = len(self.requests), Usage(prompt_tokens=len(request.prompt)), False
        try:
            for step in [*self.script(request), END_ID]:
                if isinstance(step, Exception):
                    if not usage.completion_tokens:
                        whole = True
                        raise step
                    whole = True
                    yield FinishedEvent(id=number, reason="error", usage=usage, error=step)
                    return
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                ids = [step] if isinstance(step, int) else TOKENIZER.encode(step, allow_special=True)
                for token in ids:
                    usage.completion_tokens += 1
                    wants = request.sampling.logprobs
                    detail = None if wants is None else (TokenLogprobs(token, -0.5, ((token, -0.5), (7, -1.5))[:wants]),)
                    yield TokenEvent(id=number, tokens=(token,), logprobs=detail)
                    if token == END_ID or usage.completion_tokens == request.max_tokens:
                        whole = True
                        reason = "stop" if token == END_ID else "length"
                        yield FinishedEvent(id=number, reason=reason, usage=usage)
                        return
                    await asyncio.sleep(0)
        finally:
            self.open -= 1
            self.left_early += not whole

    async def close(self) -> None:
        """Nothing to end."""
        self.closed = True


@dataclass(frozen=True)
class Live:
    """A server on a socket, with its clients."""

    url: str
    service: Service
    engine: ScriptedClient

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
        yield Live(f"http://127.0.0.1:{ports[0]}", service, served.engine)  # type: ignore[arg-type]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
