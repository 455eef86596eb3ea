"""`/v1/completions` and `/tokenize`: schemas and translation. Plain text in, plain text out; no marks are read.

Owns these APIs' field names. Must not know responses or HTTP.
"""

from __future__ import annotations

from typing import Any

from kvist.engine.request import Request
from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.generation import Work
from kvist.server.grammars import format_grammar
from kvist.server.protocol.chat import ChatMessage, Thinking, Tool
from kvist.server.protocol.parts import (
    SampledBody,
    checked_max_tokens,
    output_format,
    sampling_params,
    stop_strings,
)
from kvist.server.served import Served
from kvist.server.wish import Caller, require_short, wanted_tokens
from kvist.text import TokenizerError

DEFAULT_TOKENS = 16
"""What this API has always taken when max_tokens is left out."""


class CompletionRequest(SampledBody):
    """The request. `max_tokens` 0 with `echo` scores the prompt only."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: None = None


class TokenizeRequest(Body):
    """Text, or a chat as `/v1/chat/completions` would encode it. `add_begin`: with the begin token in front of text."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    reasoning_effort: str | int | None = None
    thinking: Thinking | None = None
    add_begin: bool = True


def prompt_ids(request: CompletionRequest, served: Served) -> list[list[int]]:
    """The prompts as ids; text gets the begin token in front, as the model was trained."""
    asked = request.prompt
    prompts = [asked] if isinstance(asked, str) or (asked and isinstance(asked[0], int)) else asked
    if not prompts:
        raise ApiError("invalid_value", "prompt is an empty list; send a text", param="prompt")
    return [_ids(prompt, served) for prompt in prompts]


def _ids(prompt: Any, served: Served) -> list[int]:
    if isinstance(prompt, str):
        require_short(served, (prompt,))
        try:
            return [served.bos_id, *served.tokenizer.encode(prompt)]
        except TokenizerError as error:
            raise ApiError("invalid_prompt", str(error), param="prompt") from error
    size = min(served.vocab_size, len(served.tokenizer))
    if not prompt:
        raise ApiError("invalid_value", "a prompt of token ids is empty; give at least one", param="prompt")
    if bad := [token for token in prompt if not 0 <= token < size]:
        raise ApiError("invalid_value", f"prompt holds token id {bad[0]}, the vocabulary is 0..{size - 1}", param="prompt")
    return list(prompt)


def completion_work(request: CompletionRequest, ids: list[int], served: Served, caller: Caller, temperature: float) -> Work:
    """The work of one prompt. Raises ApiError, ValueError."""
    if request.best_of not in (None, request.n or 1):
        raise ApiError("unsupported_field", f"best_of = {request.best_of} is not supported here; leave it out", param="best_of")
    if request.stream and request.echo and request.logprobs is not None:
        raise ApiError("unsupported_field", "echo with logprobs cannot stream: the scores come at the end", param="stream")
    scoring = request.max_tokens == 0
    if scoring and not request.echo:
        raise ApiError(
            "invalid_value", "max_tokens is 0, at least 1 is needed (with echo, 0 scores the prompt)", param="max_tokens"
        )
    wanted = 1 if scoring else checked_max_tokens({"max_tokens": request.max_tokens})
    stops = stop_strings(request.stop)
    asked = output_format(request.response_format)
    return Work(
        request=Request(
            prompt=ids,
            max_tokens=wanted_tokens(served, len(ids), wanted, DEFAULT_TOKENS),
            sampling=sampling_params(
                default_temperature=temperature,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                repetition_penalty=request.repetition_penalty,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                logit_bias=request.logit_bias,
                seed=request.seed,
                n=request.n,
                logprobs=request.logprobs,
            ),
            stops=stops or None,
            grammar=None if asked is None else format_grammar(asked),
            prompt_logprobs=request.logprobs if request.echo else None,
            replay=request.replay,
            tenant=caller.tenant,
            salt=caller.salt,
            deadline_s=caller.deadline_s,
        ),
        stops=stops,
    )
