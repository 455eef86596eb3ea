"""`/v1/responses`: answers and event streams. Nothing is stored; asking for a stored response says so.

Owns the response object. The items inside are `response_items.py`'s. Must not know how replies come about.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.server.errors import ApiError
from kvist.server.event_stream import EventStream, named_event
from kvist.server.generation import Ended, Piece, Work
from kvist.server.protocol.responses import ResponseRequest, response_wish
from kvist.server.routes.chat import chat_logprob
from kvist.server.routes.response_items import ResponseItems, Shape
from kvist.server.service import Service, Usage
from kvist.server.wish import chat_work

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs


async def create(service: Service, request: Request) -> JSONResponse | EventStream:
    """Answer. Raises ApiError."""
    body = await service.body(request, ResponseRequest)
    model = service.require_model(body.model)
    settings, caller, pictures = service.settings, service.caller(request), service.pictures(request)

    def make() -> list[Work]:
        wish = response_wish(body, pictures, thinking=settings.thinking, default_temperature=settings.default_temperature)
        return [chat_work(service.served, wish, caller, settings.default_max_tokens)]

    works = await service.prepared(make)
    answer = _Answer(service, model, request.state.id, body, works)
    if body.stream:
        return await service.stream(answer.events(service.run(works, request)), answer.error_event)
    (choice,) = await service.whole(works, request)
    return JSONResponse(answer.whole(choice.events, choice.logprobs, choice.end))


async def stored(service: Service, request: Request) -> JSONResponse:
    """Any look at a stored response: there are none."""
    raise ApiError("not_stored", "this server keeps no responses; keep the history and send it in `input`")


class _Answer:
    """One response: its head, its items, and the numbers of its events."""

    def __init__(self, service: Service, model: str, number: str, body: ResponseRequest, works: Sequence[Work]) -> None:
        self._works, self._tokenizer, self._items = works, service.served.tokenizer, ResponseItems(number)
        self._sequence = 0
        sampling = works[0].request.sampling
        choice = body.tool_choice
        self._head: Shape = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else _dump(body.text.format)},
            "tool_choice": choice if choice is None or isinstance(choice, str) else _dump(choice),
            "tools": [_dump(tool) for tool in body.tools or ()],
            "truncation": "disabled",
        }
        if self._head["tool_choice"] is None:
            self._head["tool_choice"] = "auto"

    def _logprobs(self, details: Sequence[TokenLogprobs]) -> list[Shape]:
        return [chat_logprob(self._tokenizer, detail) for detail in details]

    def _response(self, status: str, end: Ended | None = None) -> Shape:
        usage = None
        if end is not None:
            total = Usage.of(self._works, [end])
            usage = {
                "input_tokens": total.prompt,
                "input_tokens_details": {"cached_tokens": total.cached, "cache_write_tokens": 0},
                "output_tokens": total.completion,
                "output_tokens_details": {"reasoning_tokens": total.reasoning},
                "total_tokens": total.prompt + total.completion,
            }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        rest = {"output": self._items.output, "error": None, "incomplete_details": details, "usage": usage}
        return {**self._head, "status": status, **rest}

    def whole(self, events: Sequence[Any], logprobs: Sequence[TokenLogprobs], end: Ended) -> Shape:
        """The answer's body."""
        self._items.feed(events, self._logprobs(logprobs))
        self._items.finish(whole=end.reason != "length")
        return self._response(_status(end), end)

    async def events(self, items: AsyncIterator[Piece | Ended]) -> AsyncIterator[str]:
        """The stream's events."""
        begun = False
        try:
            async for item in items:
                if not begun:
                    begun = True
                    yield self._event({"type": "response.created", "response": self._response("in_progress")})
                    yield self._event({"type": "response.in_progress", "response": self._response("in_progress")})
                if isinstance(item, Piece):
                    for event in self._items.feed(item.events, self._logprobs(item.logprobs)):
                        yield self._event(event)
                    continue
                for event in self._items.finish(whole=item.reason != "length"):
                    yield self._event(event)
                status = _status(item)
                yield self._event({"type": f"response.{status}", "response": self._response(status, item)})
        finally:
            await items.aclose()  # type: ignore[attr-defined]

    def error_event(self, error: ApiError) -> str:
        """An error in the stream; `error` is what the official client looks for."""
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._event({**told, **error.openai_body()})

    def _event(self, value: Shape) -> str:
        text = named_event({**value, "sequence_number": self._sequence})
        self._sequence += 1
        return text


def _status(end: Ended) -> str:
    return "incomplete" if end.reason == "length" else "completed"


def _dump(model: Any) -> Shape:
    shape: Shape = model.model_dump(by_alias=True)
    return shape
