"""`/v1/completions` and `/tokenize`: answers, chunks, log-probabilities with offsets, echo and prompt scores.

Owns these APIs' response shapes. Must not know how replies come about.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.server.errors import ApiError
from kvist.server.event_stream import EventStream, data_line
from kvist.server.generation import Ended, Piece, Work
from kvist.server.pictures import Pictures
from kvist.server.protocol.chat import ChatRequest, chat_wish
from kvist.server.protocol.completions import CompletionRequest, TokenizeRequest, completion_work, prompt_ids
from kvist.server.routes.chat import DONE, error_line, usage_shape
from kvist.server.service import Choice, Service, Usage
from kvist.server.wish import count_prompt
from kvist.text import ContentDelta, Event, Tokenizer

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs


async def create(service: Service, request: Request) -> JSONResponse | EventStream:
    """Continue texts. Raises ApiError."""
    body = await service.body(request, CompletionRequest)
    model = service.require_model(body.model)
    caller, temperature = service.caller(request), service.settings.default_temperature

    def make() -> list[Work]:
        served = service.served
        return [completion_work(body, ids, served, caller, temperature) for ids in prompt_ids(body, served)]

    works = await service.prepared(make)
    answer = _Answer(service, model, request.state.id, body, works)
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return await service.stream(answer.chunks(service.run(works, request), usage), error_line)
    return JSONResponse(answer.whole(await service.whole(works, request)))


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


class _Answer:
    """One answer's constant parts, and its shapes."""

    def __init__(self, service: Service, model: str, number: str, body: CompletionRequest, works: Sequence[Work]) -> None:
        self._body, self._works, self._served = body, works, service.served
        self._owner = [work for work in works for _ in range(work.request.sampling.n)]
        self._head = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.served.fingerprint or None,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer's body. A prompt that was only scored has no new token, though the engine had to choose one."""
        scored = self._body.max_tokens == 0
        shapes = [self._scored(choice) if scored else self._choice(choice) for choice in choices]
        usage = usage_shape(Usage.of(self._works, [choice.end for choice in choices]))
        if scored:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._head, "choices": shapes, "usage": usage}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        index = choice.end.index
        echo = self._echo(index)
        listed = _Listed(self._served.tokenizer)
        if echo and self._body.logprobs is not None:
            self._list_prompt(listed, choice.end, index)
        for detail in choice.logprobs:
            listed.add(detail.token, detail)
        logprobs = None if self._body.logprobs is None else listed.shape()
        text = echo + _text(choice.events)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.end.reason}

    def _scored(self, choice: Choice) -> dict[str, Any]:
        index, listed = choice.end.index, _Listed(self._served.tokenizer)
        self._list_prompt(listed, choice.end, index)
        logprobs = None if self._body.logprobs is None else listed.shape()
        return {"index": index, "text": self._echo(index), "logprobs": logprobs, "finish_reason": "length"}

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        return self._served.tokenizer.decode(self._shown_prompt(index), skip_control=True)

    def _shown_prompt(self, index: int) -> list[int]:
        """The prompt's tokens; the begin token that we put in front of text is not the client's."""
        ids = [int(token) for token in self._owner[index].request.prompt]
        return ids[1:] if ids[0] == self._served.bos_id else ids

    def _list_prompt(self, listed: _Listed, end: Ended, index: int) -> None:
        ids, scores = self._shown_prompt(index), end.prompt_logprobs or ()
        skipped = len(scores) - len(ids) if scores else 0
        for at, token in enumerate(ids):
            listed.add(token, scores[at + skipped] if scores else None)

    async def chunks(self, items: AsyncIterator[Piece | Ended], with_usage: bool) -> AsyncIterator[str]:
        """The stream's lines."""
        spare = {"usage": None} if with_usage else {}
        ends: list[Ended] = []
        listed = [_Listed(self._served.tokenizer) for _ in self._owner]
        seen: set[int] = set()
        try:
            async for item in items:
                echo = "" if item.index in seen else self._echo(item.index)
                seen.add(item.index)
                ended = item if isinstance(item, Ended) else None
                ends += [ended] if ended else []
                text = echo + (_text(item.events) if isinstance(item, Piece) else "")
                for detail in item.logprobs if isinstance(item, Piece) else ():
                    listed[item.index].add(detail.token, detail)
                if not text and ended is None:
                    continue
                logprobs = None if self._body.logprobs is None else listed[item.index].taken()
                reason = None if ended is None else ended.reason
                choice = {"index": item.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                yield data_line({**self._head, "choices": [choice], **spare})
        finally:
            await items.aclose()  # type: ignore[attr-defined]
        if with_usage:
            yield data_line({**self._head, "choices": [], "usage": usage_shape(Usage.of(self._works, ends))})
        yield DONE


class _Listed:
    """Log-probabilities as this API lists them: tokens, theirs, the best ones, and where each begins in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._offset = tokenizer, 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token: int, detail: TokenLogprobs | None) -> None:
        """The next token; None where nothing precedes it."""
        text = self._spelled(token)
        top = None if detail is None else {self._spelled(best): value for best, value in reversed(detail.top)}
        self._rows.append((text, None if detail is None else detail.logprob, top, self._offset))
        self._offset += len(text)

    def taken(self) -> dict[str, Any]:
        """The rows since the last call, as a shape."""
        shape, self._rows = self.shape(), []
        return shape

    def shape(self) -> dict[str, Any]:
        """All rows."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[at] for row in self._rows] for at, name in enumerate(names)}

    def _spelled(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


async def tokenize(service: Service, request: Request) -> JSONResponse:
    """Ids of a text or a chat. Raises ApiError."""
    body = await service.body(request, TokenizeRequest)
    if body.model is not None:
        service.require_model(body.model)
    pictures = service.pictures(request)
    ids = await service.in_thread(lambda: encoded_ids(service, body, pictures))
    tokens = [service.served.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    return JSONResponse({"count": len(ids), "max_model_len": service.served.context, "tokens": ids, "token_strs": tokens})


def encoded_ids(service: Service, body: TokenizeRequest, pictures: Pictures) -> list[int]:
    """Ids of a text, or of a chat as its route would encode it. Raises ApiError, ValueError."""
    served, settings = service.served, service.settings
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("invalid_value", "send prompt or messages, one of the two", param="prompt")
    if body.prompt is not None:
        front = [served.bos_id] if body.add_begin else []
        return [*front, *served.tokenizer.encode(body.prompt)]
    assert body.messages is not None
    chat = ChatRequest(
        model=service.names[0],
        messages=body.messages,
        tools=body.tools,
        reasoning_effort=body.reasoning_effort,
        thinking=body.thinking,
    )
    return count_prompt(served, chat_wish(chat, pictures, thinking=settings.thinking, default_temperature=1.0))
