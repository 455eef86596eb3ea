"""Pieces that several APIs' requests share: response formats, sampling with the server's defaults.

Owns their limits and messages. Must not know one API's field names beyond what they share.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvist.engine.request import MAX_STOP_CHARACTERS, MAX_STOPS
from kvist.engine.sampling.params import SamplingParams
from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.grammars import OutputFormat

Json = dict[str, Any]
Bias = dict[str, float]


class TextFormat(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema with its name, as OpenAI's chat sends it."""

    name: str = "answer"
    description: str | None = None
    schema_: Annotated[Json | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """A JSON value of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatJsonSchemaFormat(Body):
    """The same as the Responses API spells it."""

    type: Literal["json_schema"]
    name: str = "answer"
    description: str | None = None
    schema_: Annotated[Json | bool, Field(alias="schema")]
    strict: bool | None = None


class RegexFormat(Body):
    """A text that a regular expression matches as a whole (ours)."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    """A text of a Lark grammar (ours)."""

    type: Literal["grammar"]
    grammar: str


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]
FlatFormat = Annotated[
    TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")
]
AnyFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | FlatJsonSchemaFormat | RegexFormat | GrammarFormat


class StreamOptions(Body):
    """`include_usage`: a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SampledBody(Body):
    """What both of OpenAI's completion APIs ask in the same words. `replay` (ours): as the server's setting, for this request."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    replay: str | int | None = None
    user: str | None = None


def output_format(asked: AnyFormat | None) -> OutputFormat | None:
    """What a response format asks of the content."""
    match asked:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return OutputFormat(kind="json_schema", source={"type": "object"})
        case JsonSchemaFormat():
            schema = asked.json_schema.schema_
            return OutputFormat(kind="json_schema", source={} if schema is None else schema)
        case FlatJsonSchemaFormat():
            return OutputFormat(kind="json_schema", source=asked.schema_)
        case RegexFormat():
            return OutputFormat(kind="regex", source=asked.regex)
        case GrammarFormat():
            return OutputFormat(kind="lark", source=asked.grammar)


def sampling_params(
    *,
    default_temperature: float,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Bias | None = None,
    seed: int | None = None,
    n: int | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    """Sampling as asked, else the defaults; without a seed one is drawn, so that equal requests differ. Raises ValueError."""
    given: dict[str, Any] = {
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "n": n,
    }
    return SamplingParams(
        temperature=default_temperature if temperature is None else temperature,
        seed=secrets.randbits(63) if seed is None else seed % (1 << 64),
        logit_bias=_biases(logit_bias or {}),
        logprobs=logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )


def _biases(asked: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in asked.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise ApiError("invalid_value", f"logit_bias: {token[:40]!r} is no token id", param="logit_bias")
        biases[int(token)] = bias
    return biases


def stop_strings(asked: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; an empty list is none. The engine's limits, also where it is not told of them."""
    stops = () if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    if len(stops) > MAX_STOPS:
        raise ApiError("invalid_value", f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise ApiError(
                "invalid_value", f"a stop string must have 1..{MAX_STOP_CHARACTERS} characters, got {len(stop)}", param="stop"
            )
    return stops


def checked_max_tokens(fields: Mapping[str, int | None]) -> int | None:
    """The limit of new tokens, given under one or more names: they must agree and be at least 1. Bug case SRV-15."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ApiError("conflicting_fields", f"{shown} contradict each other; send one of them", param=next(iter(given)))
    for name, value in given.items():
        if value < 1:
            raise ApiError("invalid_value", f"{name} must be at least 1, got {value}", param=name)
    return next(iter(given.values()), None)
