"""`/kvist/live` and `/kvist/microscope`: how a request goes on, and what the model read for one of its tokens.

Owns the shapes of these answers; docs/server.md explains their figures. Must not know how a position is run again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.engine.anatomy import Anatomy
from kvist.server.errors import ApiError
from kvist.server.history import Record, Trace
from kvist.server.protocol.microscope import MicroscopeRequest
from kvist.server.service import Service, unless_gone
from kvist.text import Tokenizer

if TYPE_CHECKING:
    from kvist.engine.microscope import LayerView, View

Shape = dict[str, Any]
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_DIGITS = 9


async def recent(service: Service, request: Request) -> JSONResponse:
    """The caller's requests that run or ran last, newest first."""
    records = service.history.recent(request.state.tenant)
    return JSONResponse({"object": "list", "data": [_summary(record) for record in records]})


async def live(service: Service, request: Request) -> JSONResponse:
    """How one of the caller's requests goes on or went; `?reply=1` for another of several replies. Raises ApiError."""
    asked: str = request.path_params["request_id"]
    record = service.history.find(request.state.tenant, _names(asked))
    trace = _reply(record, request.query_params.get("reply", "0"))
    # Looking pages up in a store of millions of pages takes a while.
    figures = await asyncio.to_thread(_figures, trace, service.served.anatomy)
    head = {"request_id": asked, "object": "kvist.live", "model": service.names[0], "created": record.created}
    return JSONResponse({**head, "replies": len(record.traces), "reply": record.traces.index(trace), **figures})


async def look(service: Service, request: Request) -> JSONResponse:
    """What every layer read for one token of the caller's request: the position is run again. Raises ApiError."""
    began = time.perf_counter()
    body = await service.body(request, MicroscopeRequest)
    record = service.history.find(request.state.tenant, _names(body.request_id))
    trace = _reply(record, str(body.reply))
    view = await unless_gone(request, service.captures.look(request.state.tenant, trace, body.token))
    request.state.facts["positions"] = view.position + 1
    shape = await asyncio.to_thread(_view_shape, view, trace, body, service.served.tokenizer)
    return JSONResponse({**shape, "seconds": round(time.perf_counter() - began, 4)})


def _names(asked: str) -> list[str]:
    """A request's id as it may be kept: itself, or without what an API puts before it in its answer's id."""
    bare = [asked.removeprefix(prefix) for prefix in ANSWER_PREFIXES if asked.startswith(prefix)]
    return [asked, *bare]


def _reply(record: Record, index: str) -> Trace:
    if not index.isdecimal() or len(index) > 4 or int(index) >= len(record.traces):
        raise ApiError("invalid_value", f"reply {index[:20]!r}: the request has {len(record.traces)}, from 0 on", param="reply")
    return record.traces[int(index)]


def _summary(record: Record) -> Shape:
    return {
        "request_id": record.number,
        "created": record.created,
        "state": "finished" if not record.running else _state(record.traces[0]),
        "replies": len(record.traces),
        "prompt_tokens": len(record.traces[0].prompt),
        "output_tokens": sum(len(trace.tokens) for trace in record.traces),
    }


def _state(trace: Trace) -> str:
    return "finished" if trace.over else trace.progress.state


def _figures(trace: Trace, anatomy: Anatomy | None) -> Shape:
    progress, usage = trace.progress, trace.progress.usage
    shape: Shape = {
        "state": _state(trace),
        "finish_reason": progress.reason,
        "prompt_tokens": len(trace.prompt),
        "output_tokens": len(trace.tokens),
        "cached_tokens": usage.cached_tokens,
        "cached_tokens_by_tier": {tier: usage.cached.get(tier, 0) for tier in ("device", "host", "disk")},
        "replayed_tokens": usage.replayed_tokens,
        "computed_tokens": progress.computed_tokens,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "preemptions": usage.preemptions,
    }
    return shape if anatomy is None else {**shape, **_seconds(trace, anatomy), **_layers_and_bytes(trace, anatomy)}


def _seconds(trace: Trace, anatomy: Anatomy) -> Shape:
    """Waiting, prefill and decode so far; None for what has not begun."""
    progress, now = trace.progress, anatomy.clock()
    end = now if progress.ended_at is None and not trace.over else progress.ended_at
    queue = prefill = decode = None
    if progress.queued_at is not None and (first := progress.started_at or end) is not None:
        queue = first - progress.queued_at
    if progress.started_at is not None and (first := progress.first_at or end) is not None:
        prefill = first - progress.started_at
    if progress.first_at is not None and progress.newest_at is not None:
        decode = progress.newest_at - progress.first_at
    return {
        "queue_seconds": queue,
        "prefill_seconds": prefill,
        "prefill_tokens_per_s": progress.encoder_rows / prefill if prefill else None,
        "decode_seconds": decode,
        "decode_tokens_per_s": (len(trace.tokens) - 1) / decode if decode else None,
    }


def _layers_and_bytes(trace: Trace, anatomy: Anatomy) -> Shape:
    progress, tokens = trace.progress, len(trace.prompt) + len(trace.tokens)
    held = anatomy.whereabouts(progress.digests, progress.replay_length)
    by_tier = {tier: pages * anatomy.page_bytes for tier, pages in held.items()}
    running = progress.pages > 0
    if running:  # its own pages, finished or not, its windows and unfinished groups
        by_tier["device"] = progress.pages * anatomy.page_bytes + anatomy.slot_bytes
    return {
        "encoder": {"layers": anatomy.encoder_layers, "rows": progress.encoder_rows},
        "decoder": {"layers": anatomy.decoder_layers, "rows": progress.decoder_rows},
        "cache_bytes_per_token": {
            "main_rows": anatomy.main_row_bytes,
            "index_keys": anatomy.index_key_bytes,
            "window": anatomy.window_bytes / tokens,
            "draft": anatomy.draft_bytes / tokens,
            "unfinished_groups": anatomy.group_bytes / tokens,
        },
        "cache_bytes_per_token_by_tier": {tier: total / tokens for tier, total in by_tier.items()},
        "cache_bytes_by_tier": by_tier,
    }


def _view_shape(view: View, trace: Trace, body: MicroscopeRequest, tokenizer: Tokenizer) -> Shape:
    read = [*trace.prompt, *trace.tokens[: body.token]]
    return {
        "request_id": body.request_id,
        "token": body.token,
        "reply": body.reply,
        "position": view.position,
        "window": view.window,
        "prompt_tokens": len(trace.prompt),
        "output": {"text": _spelled(tokenizer, [trace.tokens[body.token]])[0], "logprob": view.logprob, "rank": view.rank},
        "tokens": _spelled(tokenizer, read),
        "layers": [_layer_shape(layer) for layer in view.layers],
    }


def _layer_shape(layer: LayerView) -> Shape:
    shape = dict(vars(layer))
    shape["window_positions"] = [(position, round(mass, _DIGITS)) for position, mass in layer.window_positions]
    shape["rows"] = [(first, last, round(mass, _DIGITS)) for first, last, mass in layer.rows]
    return shape


def _spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
