"""A request's prompts with their `n` replies each, run on an engine: pieces of each reply as they come, and the end of each.

Owns the copies, their merging, and that a client which leaves ends them all. Must not know HTTP or a protocol's words.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.server.errors import ApiError, failed, refused
from kvist.server.history import Trace
from kvist.server.reply_stream import ReplyStream
from kvist.server.served import Served
from kvist.server.token_text import TokenText
from kvist.text import Event

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to run: the engine's request (its `sampling.n` replies), and how the replies' text is read.

    `stops`: stop strings, looked for in content; the engine is told of them only where it would find the same. `calls` False:
    tool calls are left out.
    """

    request: Request
    parse: bool = False
    reasoning: bool = False
    stops: tuple[str, ...] = ()
    calls: bool = True


@dataclass(frozen=True, kw_only=True)
class Piece:
    """More of reply `index`. `logprobs`: one entry a token that it took, if asked for."""

    index: int
    events: tuple[Event, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of reply `index`: `stop`, `length` or `tool_calls`; the stop string; what it cost."""

    index: int
    reason: str
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class _Reply:
    """One copy on its way from the engine to the queue."""

    def __init__(self, served: Served, work: Work, prompt: array[int], index: int) -> None:
        self.index, self.prompt_tokens = index, len(work.request.prompt)
        self.stream = ReplyStream(parse=work.parse, reasoning=work.reasoning, stops=work.stops, calls=work.calls)
        self.text = TokenText(served.tokenizer, self.stream, parse=work.parse, reasoning=work.reasoning)
        # A prompt that is scored runs all layers on all its positions, which is what exact replay stands for.
        replay = work.request.replay if work.request.prompt_logprobs is None else "exact"
        self.trace = Trace(prompt=prompt, images=work.request.images, replay=replay)
        self.end_ids = frozenset(work.request.stop_ids) | {served.eos_id}

    def take(self, event: TokenEvent) -> Piece:
        """Tokens up to a stop string."""
        events: list[Event] = []
        logprobs: list[TokenLogprobs] = []
        for at, token in enumerate(event.tokens):
            if self.stream.over:
                break
            self.trace.tokens.append(token)
            events += self.text.feed(token)
            detail = event.logprobs[at] if event.logprobs else None
            if detail is not None and token not in self.end_ids:
                logprobs.append(detail)
        return Piece(index=self.index, events=tuple(events), logprobs=tuple(logprobs))

    def tail(self) -> Piece:
        """What was held back."""
        return Piece(index=self.index, events=tuple(self.text.finish()))

    def end(self, finished: FinishedEvent) -> Ended:
        """The end as the client sees it; the engine's own may be later or another where a stop string cut the reply."""
        length = finished.reason == "length" and not self.stream.over
        reason = "length" if length else "tool_calls" if self.stream.tool_calls else "stop"
        known = finished.stop if isinstance(finished.stop, str) else None
        return Ended(
            index=self.index,
            reason=reason,
            stop=self.stream.matched or known,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.text.count,
            reasoning_tokens=self.text.reasoning_count,
            cached_tokens=finished.usage.cached_tokens,
            prompt_logprobs=finished.prompt_logprobs,
        )


class Generation:
    """Runs works side by side; iterate `run` once. Replies are numbered through. `stop` ends all from outside with an error.

    `left_tokens`: tokens that were made for replies that came to no end (their client left, or the engine failed them).
    """

    def __init__(self, served: Served, works: Sequence[Work]) -> None:
        """Raises ValueError for stop strings that cannot be."""
        self._served = served
        self.left_tokens = 0
        self._queue: asyncio.Queue[Piece | Ended | ApiError] = asyncio.Queue()
        self._replies: list[tuple[_Reply, Request]] = []
        for work in works:
            prompt = array("i", work.request.prompt)
            for sampling in work.request.sampling.copies():
                reply = _Reply(served, work, prompt, len(self._replies))
                self._replies.append((reply, replace(work.request, sampling=sampling, progress=reply.trace.progress)))

    @property
    def traces(self) -> list[Trace]:
        """What can be told of each reply while it comes and afterwards."""
        return [reply.trace for reply, _ in self._replies]

    def stop(self, error: ApiError) -> None:
        """End with this error after what has come already."""
        self._queue.put_nowait(error)

    async def run(self) -> AsyncIterator[Piece | Ended]:
        """Pieces and ends of all replies as they come. Raises ApiError; closing it ends the engine's requests."""
        tasks = [asyncio.create_task(self._one(reply, request)) for reply, request in self._replies]
        open_ones = len(tasks)
        try:
            while open_ones:
                item = await self._queue.get()
                if isinstance(item, ApiError):
                    raise item
                open_ones -= isinstance(item, Ended)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, reply: _Reply, request: Request) -> None:
        try:
            events = await self._served.engine.submit(request)
        except Exception as error:  # noqa: BLE001  # told to the client by name
            self._queue.put_nowait(refused(error))
            return
        try:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    self._finish(reply, event)
                    continue
                self._give(reply.take(event))
                if reply.stream.over:  # a stop string that the engine does not know of
                    for end in await events.close():
                        self._queue.put_nowait(reply.end(end))
                    return
        except Exception as error:  # noqa: BLE001  # told to the client by name
            self._queue.put_nowait(failed(error))
        finally:
            self.left_tokens += sum(end.usage.completion_tokens for end in await events.close())

    def _give(self, piece: Piece) -> None:
        if piece.events or piece.logprobs:
            self._queue.put_nowait(piece)

    def _finish(self, reply: _Reply, event: FinishedEvent) -> None:
        if event.reason in ("error", "cancelled"):
            self.left_tokens += event.usage.completion_tokens
        if event.reason == "error":
            raise failed(event.error)
        if event.reason == "cancelled":
            raise ApiError("engine_stopped", "the engine was closed before this request ended; send it again")
        self._give(reply.tail())
        self._queue.put_nowait(reply.end(event))
