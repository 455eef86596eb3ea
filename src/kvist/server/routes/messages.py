"""`/v1/messages` (Anthropic style) and its token count: answers, event streams, stop reasons.

Owns this API's response shapes. Must not know how replies come about.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.server.event_stream import EventStream, named_event
from kvist.server.generation import Ended, Piece, Work
from kvist.server.protocol.messages import CountRequest, MessagesRequest, messages_wish
from kvist.server.service import Choice, Service
from kvist.server.wish import chat_work, count_prompt
from kvist.text import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart

Shape = dict[str, Any]


async def create(service: Service, request: Request) -> JSONResponse | EventStream:
    """Answer. Raises ApiError."""
    body = await service.body(request, MessagesRequest)
    model = service.require_model(body.model)
    settings, caller, pictures = service.settings, service.caller(request), service.pictures(request)

    def make() -> list[Work]:
        wish = messages_wish(body, pictures, thinking=settings.thinking, default_temperature=settings.default_temperature)
        return [chat_work(service.served, wish, caller, settings.default_max_tokens)]

    works = await service.prepared(make)
    answer = _Answer(model, request.state.id, works)
    if body.stream:
        return await service.stream(answer.events(service.run(works, request)), lambda error: named_event(error.anthropic_body()))
    (choice,) = await service.whole(works, request)
    return JSONResponse(answer.whole(choice))


async def count(service: Service, request: Request) -> JSONResponse:
    """How many tokens a conversation has as a prompt. Raises ApiError."""
    body = await service.body(request, CountRequest)
    service.require_model(body.model)
    pictures = service.pictures(request)

    def ids() -> list[int]:
        wish = messages_wish(body, pictures, thinking=service.settings.thinking, default_temperature=1.0)
        return count_prompt(service.served, wish)

    return JSONResponse({"input_tokens": len(await service.in_thread(ids))})


class _Blocks:
    """The content blocks of a reply as they grow, and the events that tell of it."""

    def __init__(self, number: str) -> None:
        self._number = number
        self.content: list[Shape] = []
        self._open = False
        self._arguments: list[str] = []

    def feed(self, events: Sequence[Event]) -> list[Shape]:
        """What the next events of a reply make happen."""
        told: list[Shape] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    told += self._ensure({"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += text
                    told.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ContentDelta(text):
                    told += self._ensure({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    told.append(self._delta({"type": "text_delta", "text": text}))
                case ToolCallStart(at, name):
                    block = {"type": "tool_use", "id": f"toolu_{self._number}_{at}", "name": name, "input": {}}
                    told += [*self.close(), *self._begin(block)]
                case ToolArgumentsDelta(_, text):
                    self._arguments.append(text)
                    told.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case ToolCallEnd():
                    told += self.close()
        return told

    def close(self) -> list[Shape]:
        """End the open block."""
        if not self._open:
            return []
        self._open = False
        block, told = self.content[-1], []
        if block["type"] == "thinking":
            told.append(self._delta({"type": "signature_delta", "signature": ""}))
        if block["type"] == "tool_use":
            block["input"] = json.loads("".join(self._arguments) or "{}")
            self._arguments = []
        return [*told, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _ensure(self, block: Shape) -> list[Shape]:
        if self._open and self.content[-1]["type"] == block["type"]:
            return []
        return [*self.close(), *self._begin(block)]

    def _begin(self, block: Shape) -> list[Shape]:
        self.content.append(block)
        self._open = True
        return [{"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: Shape) -> Shape:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


class _Answer:
    """One message's head and blocks."""

    def __init__(self, model: str, number: str, works: Sequence[Work]) -> None:
        self._blocks, self._prompt_tokens = _Blocks(number), len(works[0].request.prompt)
        self._head: Shape = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model}

    def whole(self, choice: Choice) -> Shape:
        """The answer's body."""
        self._blocks.feed(choice.events)
        self._blocks.close()
        ending = _ending(choice.end)
        return {**self._head, "content": self._blocks.content, **ending, "usage": self._usage(choice.end)}

    async def events(self, items: AsyncIterator[Piece | Ended]) -> AsyncIterator[str]:
        """The stream's events."""
        begun = False
        try:
            async for item in items:
                if not begun:
                    begun = True
                    empty = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(None)}
                    yield named_event({"type": "message_start", "message": {**self._head, "content": [], **empty}})
                if isinstance(item, Piece):
                    for event in self._blocks.feed(item.events):
                        yield named_event(event)
                    continue
                for event in self._blocks.close():
                    yield named_event(event)
                yield named_event({"type": "message_delta", "delta": _ending(item), "usage": self._usage(item)})
                yield named_event({"type": "message_stop"})
        finally:
            await items.aclose()  # type: ignore[attr-defined]

    def _usage(self, end: Ended | None) -> Shape:
        cached = 0 if end is None else end.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0 if end is None else end.completion_tokens,
        }


def _ending(end: Ended) -> Shape:
    if end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[end.reason], "stop_sequence": None}
