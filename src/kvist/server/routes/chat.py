"""`/v1/chat/completions`: answers, chunks, and the figures in them.

Owns this API's response shapes. Must not know how replies come about. `reasoning_content` is DeepSeek's name for reasoning.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.server.errors import ApiError
from kvist.server.event_stream import EventStream, data_line
from kvist.server.generation import Ended, Piece, Work
from kvist.server.protocol.chat import ChatRequest, chat_wish
from kvist.server.service import Choice, Service, Usage
from kvist.server.wish import chat_work
from kvist.text import ContentDelta, Event, ReasoningDelta, Tokenizer, ToolArgumentsDelta, ToolCallStart

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs

DONE = "data: [DONE]\n\n"


async def create(service: Service, request: Request) -> JSONResponse | EventStream:
    """Answer a chat. Raises ApiError."""
    body = await service.body(request, ChatRequest)
    model = service.require_model(body.model)
    settings = service.settings
    caller, pictures = service.caller(request), service.pictures(request)

    def make() -> list[Work]:
        wish = chat_wish(body, pictures, thinking=settings.thinking, default_temperature=settings.default_temperature)
        return [chat_work(service.served, wish, caller, settings.default_max_tokens)]

    works = await service.prepared(make)
    answer = ChatAnswer(service, model, request.state.id, works)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await service.stream(answer.chunks(service.run(works, request), usage), error_line)
    return JSONResponse(answer.whole(await service.whole(works, request)))


def error_line(error: ApiError) -> str:
    """An error in a stream of this API's family; clients raise it."""
    return data_line(error.openai_body())


class ChatAnswer:
    """One answer's constant parts, and its shapes."""

    def __init__(self, service: Service, model: str, number: str, works: Sequence[Work]) -> None:
        self._number, self._works, self._tokenizer = number, works, service.served.tokenizer
        self._head = {
            "id": f"chatcmpl-{number}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.served.fingerprint or None,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer's body."""
        usage = Usage.of(self._works, [choice.end for choice in choices])
        shapes = [self._choice(choice) for choice in choices]
        return {**self._head, "object": "chat.completion", "choices": shapes, "usage": usage_shape(usage)}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        reply, end = choice.reply, choice.end
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if not reply.content and not reply.tool_calls:
            message["content"] = ""
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(end.index, at),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(reply.tool_calls)
            ]
        logprobs = None if self._works[0].request.sampling.logprobs is None else self._logprobs(choice.logprobs)
        return {"index": end.index, "message": message, "logprobs": logprobs, "finish_reason": end.reason}

    async def chunks(self, items: AsyncIterator[Piece | Ended], with_usage: bool) -> AsyncIterator[str]:
        """The stream's lines. With usage every chunk has the field, and one more comes last."""
        spare = {"usage": None} if with_usage else {}
        ends: list[Ended] = []
        waiting: dict[int, list[TokenLogprobs]] = {}
        seen: set[int] = set()
        try:
            async for item in items:
                if item.index not in seen:
                    seen.add(item.index)
                    yield self._chunk(item.index, {"role": "assistant", "content": ""}, spare)
                if isinstance(item, Ended):
                    ends.append(item)
                    yield self._chunk(item.index, {}, spare, waiting.pop(item.index, None), item.reason)
                    continue
                # Tokens that show nothing yet hand their log-probabilities on to the next chunk.
                held = waiting.setdefault(item.index, [])
                held += item.logprobs
                for delta in self._deltas(item):
                    yield self._chunk(item.index, delta, spare, waiting.pop(item.index, None))
        finally:
            await items.aclose()  # type: ignore[attr-defined]
        if with_usage:
            usage = usage_shape(Usage.of(self._works, ends))
            yield data_line({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        for event in piece.events:
            delta = self._delta(piece.index, event)
            if delta:
                yield delta

    def _delta(self, index: int, event: Event) -> dict[str, Any]:
        match event:
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ContentDelta(text):
                return {"content": text}
            case ToolCallStart(at, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": at, "id": self._call_id(index, at), "type": "function", "function": function}]}
            case ToolArgumentsDelta(at, text):
                return {"tool_calls": [{"index": at, "function": {"arguments": text}}]}
        return {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        spare: dict[str, Any],
        logprobs: list[TokenLogprobs] | None = None,
        reason: str | None = None,
    ) -> str:
        shown = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return data_line({**self._head, "object": "chat.completion.chunk", "choices": [choice], **spare})

    def _call_id(self, index: int, at: int) -> str:
        return f"call_{self._number}_{index}_{at}"

    def _logprobs(self, details: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [chat_logprob(self._tokenizer, detail) for detail in details], "refusal": None}


def chat_logprob(tokenizer: Tokenizer, detail: TokenLogprobs) -> dict[str, Any]:
    """One token with the best ones beside it."""
    top = [_token(tokenizer, token, logprob) for token, logprob in detail.top]
    return {**_token(tokenizer, detail.token, detail.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(spelled)}


def usage_shape(usage: Usage) -> dict[str, Any]:
    """Usage as chat and completions spell it."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
