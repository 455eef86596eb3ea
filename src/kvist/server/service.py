"""What routes share: bodies, callers, running work with its figures, whole answers and streams.

Owns nothing of a protocol. Must not know field names of any API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from kvist.server.admission import Admission
from kvist.server.body import Body, ClientDisconnect, read_body, wait_disconnect
from kvist.server.captures import Captures
from kvist.server.errors import ApiError, refused
from kvist.server.event_stream import EventStream, started
from kvist.server.fetch import Basket, WebPictures
from kvist.server.figures import Figures
from kvist.server.files import FileShelf
from kvist.server.gate import tenant_of
from kvist.server.generation import Ended, Generation, Piece, Work
from kvist.server.history import History
from kvist.server.pictures import Pictures
from kvist.server.pinning import Pinner
from kvist.server.served import PinHolder, Served
from kvist.server.settings import ServerSettings
from kvist.server.tracing import Tracing
from kvist.server.wish import Caller
from kvist.text import Event, Reply, collect

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs

B = TypeVar("B", bound=Body)
T = TypeVar("T")


@dataclass(kw_only=True)
class Choice:
    """A whole reply with its end."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def reply(self) -> Reply:
        """The reply, put together."""
        return collect(self.events)

    @property
    def end(self) -> Ended:
        """How it ended; it has."""
        assert self.ended is not None, "a generation ends every reply"
        return self.ended


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of a request: its prompts once, all replies."""

    prompt: int
    completion: int
    reasoning: int
    cached: int

    @staticmethod
    def of(works: Sequence[Work], ends: Sequence[Ended]) -> Usage:
        """Sum; `cached` is what the first copy of each prompt found."""
        firsts = {end.index: end.cached_tokens for end in ends}
        starts = [sum(work.request.sampling.n for work in works[:at]) for at in range(len(works))]
        return Usage(
            prompt=sum(len(work.request.prompt) for work in works),
            completion=sum(end.completion_tokens for end in ends),
            reasoning=sum(end.reasoning_tokens for end in ends),
            cached=sum(firsts.get(start, 0) for start in starts),
        )


class Service:
    """One served model with its rules. Routes call this and shape what comes out."""

    def __init__(
        self,
        served: Served,
        settings: ServerSettings,
        admission: Admission,
        figures: Figures,
        tracing: Tracing | None = None,
    ) -> None:
        self.served, self.settings, self.admission, self.figures = served, settings, admission, figures
        self.tracing = tracing
        self.files = FileShelf(
            max_files=settings.max_files,
            max_bytes=settings.max_file_bytes,
            memory_bytes=settings.files_memory,
            keep_s=settings.file_keep_s,
        )
        self._web: WebPictures | None = None
        self._workers: ThreadPoolExecutor | None = None
        if settings.image_hosts:
            hosts = frozenset(host.lower() for host in settings.image_hosts)
            self._web = WebPictures(hosts=hosts, max_bytes=settings.max_file_bytes, timeout_s=settings.image_timeout_s)
            # A thread for each request that runs: slow hosts must not keep others from being tokenised.
            self._workers = ThreadPoolExecutor(settings.max_concurrency, thread_name_prefix="kvist-prepare")
        looking = served.microscope
        self.history = History(
            requests=settings.history_requests,
            limit_bytes=settings.history_bytes,
            image_token_bytes=0 if looking is None else looking.image_token_bytes,
        )
        self.captures = Captures(
            looking,
            admission,
            figures,
            limit_tokens=settings.microscope_context,
            per_minute=settings.captures_per_minute,
            retry_after_s=settings.retry_after_s,
            deadline_s=settings.deadline_s,
        )
        self.pinner = None if served.pins is None else self._made_pinner(served.pins)
        self.names = (settings.model_name or served.name, *settings.model_aliases)

    def _made_pinner(self, holder: PinHolder) -> Pinner:
        settings = self.settings
        tenants = [tenant_of(key.get_secret_value()) for key in settings.api_keys] if settings.isolate_keys else []
        pinner = Pinner(
            holder,
            self.served.engine,
            [tenant.encode() for tenant in dict.fromkeys(tenants)] or [b""],
            context=self.served.context,
            deadline_s=settings.deadline_s,
        )
        self.figures.gauge("pins", lambda: len(pinner.pins))
        self.figures.gauge("pinned_pages", lambda: pinner.pages)
        self.figures.gauge("pinned_pages_limit", lambda: pinner.limit_pages)
        self.figures.gauge("pinned_tokens", lambda: pinner.tokens)
        return pinner

    async def body(self, request: Request, schema: type[B]) -> B:
        """The request's body, within the server's limits."""
        return await read_body(request, schema, limit_bytes=self.settings.max_body_bytes, timeout_s=self.settings.body_timeout_s)

    def require_model(self, name: str) -> str:
        """The name to answer with. Raises ApiError for a model that is not served."""
        if name not in self.names:
            raise ApiError("model_not_found", f"model {name[:80]!r} is not served here; {self.names[0]!r} is", param="model")
        return name

    def caller(self, request: Request) -> Caller:
        """Tenant and salt from the caller's key, and the deadline."""
        tenant: str = request.state.tenant
        salt = tenant.encode() if self.settings.isolate_keys else b""
        return Caller(tenant=tenant, salt=salt, deadline_s=self.settings.deadline_s)

    async def prepared(self, make: Callable[[], list[Work]]) -> list[Work]:
        """Works made in a thread, as tokenising may take long. Raises ApiError."""
        works = await self.in_thread(make)
        count = sum(work.request.sampling.n for work in works)
        if count > self.settings.max_choices:
            raise ApiError(
                "invalid_value", f"{count} replies asked for, at most {self.settings.max_choices} (max_choices)", param="n"
            )
        return works

    async def in_thread(self, make: Callable[[], T]) -> T:
        """What takes long and belongs to a request: done beside the event loop. Raises ApiError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, make)
        except ValueError as error:
            raise refused(error) from error

    def pictures(self, request: Request) -> Pictures:
        """Where this caller's pictures may come from."""
        tenant: str = request.state.tenant
        fetch = None
        if self._web is not None:
            fetch = Basket(self._web, max_bytes=self.settings.max_body_bytes, seconds=self.settings.deadline_s).fetch
        return Pictures(stored=lambda number, where: self.files.get(tenant, number, param=where).data, fetch=fetch)

    async def run(self, works: Sequence[Work], request: Request) -> AsyncIterator[Piece | Ended]:
        """Pieces and ends of all replies. Raises ApiError. Figures, quotas and the log line learn of it."""
        began = last = time.perf_counter()
        facts: dict[str, Any] = request.state.facts
        facts |= {"prompt_tokens": sum(len(work.request.prompt) for work in works), "reply_tokens": 0}
        self.figures.prompt.inc(facts["prompt_tokens"])
        try:
            generation = Generation(self.served, works)
        except ValueError as error:
            raise refused(error) from error
        record = self.history.begin(request.state.tenant, request.state.id, generation.traces)
        events = generation.run()
        try:
            with self.admission.watched(generation):
                async for item in events:
                    now = time.perf_counter()
                    if isinstance(item, Ended):
                        facts["reply_tokens"] += item.completion_tokens
                        facts["cached_tokens"] = facts.get("cached_tokens", 0) + item.cached_tokens
                        self.figures.reply.inc(item.completion_tokens)
                    elif "first_s" not in facts:
                        facts["first_s"] = round(now - began, 4)
                        self.figures.first.observe(now - began)
                    else:
                        self.figures.between.observe(now - last)
                    last = now
                    yield item
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            if generation.left_tokens:  # made for a reply that nobody took to its end: they cost the same
                facts["left_tokens"] = generation.left_tokens
                facts["reply_tokens"] += generation.left_tokens
                self.figures.reply.inc(generation.left_tokens)
            self.history.end(request.state.tenant, record)
            if self.tracing is not None and request.state.span is not None:
                self.tracing.replies(request.state.span, [trace.progress for trace in generation.traces])
            self.admission.spend(request.state.tenant, facts["prompt_tokens"] + facts["reply_tokens"])

    async def whole(self, works: Sequence[Work], request: Request) -> list[Choice]:
        """All replies to their end; a client that leaves ends them. Raises ApiError, ClientDisconnect."""
        return await unless_gone(request, self._whole(works, request))

    async def _whole(self, works: Sequence[Work], request: Request) -> list[Choice]:
        choices = [Choice() for work in works for _ in range(work.request.sampling.n)]
        async for item in self.run(works, request):
            choice = choices[item.index]
            if isinstance(item, Ended):
                choice.ended = item
            else:
                choice.events += item.events
                choice.logprobs += item.logprobs
        return choices

    async def stream(self, events: AsyncIterator[str], on_error: Callable[[ApiError], str]) -> EventStream:
        """A stream of events' text. Raises the ApiError that came instead of the first one, if it came soon."""
        return await started(
            events,
            wait_s=self.settings.headers_after_s,
            keepalive_s=self.settings.keepalive_s,
            send_timeout_s=self.settings.send_timeout_s,
            on_error=on_error,
        )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled if the client goes. The body must have been read."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_disconnect(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
