"""A request's body: read within limits, parsed with care, checked against a schema.

Owns size, time and depth of what comes in, and the words of a validation error. Must not know any route. Bug case SRV-11.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from kvist.server.errors import ApiError

MAX_DEPTH = 128
_MAX_SHOWN = 80
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""What half of a surrogate pair is spelled as; whole pairs are spelled so too."""


class Body(BaseModel):
    """Base of every schema: exact types, no unknown field but those that are null.

    Clients send blocks of a reply back with all fields that their version knows, most of them null.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or all(item is not None for item in value.values()):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: item for name, item in value.items() if item is not None or name in known}


B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], *, limit_bytes: int, timeout_s: float) -> B:
    """The body as `schema`. Raises ApiError; ClientDisconnect if the client left."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _collect(request, limit_bytes)
    except TimeoutError as error:
        raise ApiError("body_timeout", f"the body did not arrive within {timeout_s:g} s; send it again") from error
    # Megabytes take a while: other clients' streams go on meanwhile.
    return await asyncio.to_thread(parse, data, schema) if len(data) > 1 << 16 else parse(data, schema)


async def _collect(request: Request, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"the body exceeds {limit_bytes} bytes (max_body_bytes); shorten it or send smaller images")


def parse(data: bytes, schema: type[B]) -> B:
    """JSON bytes as `schema`. Raises ApiError that names the field and what is wrong with it."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError as error:
        raise ApiError("invalid_json", "the body is nested too deeply; flatten it") from error
    except ValueError as error:
        raise ApiError("invalid_json", f"the body is not valid JSON in UTF-8: {_short(str(error))}") from error
    if not isinstance(value, dict):
        raise ApiError("invalid_json", f"the body must be a JSON object, got {type(value).__name__}")
    if _depth_exceeds(value, MAX_DEPTH):
        raise ApiError("invalid_json", f"the body is nested more than {MAX_DEPTH} levels deep; flatten it")
    if _HALF.search(text):
        _refuse_halves(value)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _explained(error, value) from error
    except RecursionError as error:
        raise ApiError("invalid_json", "the body is nested too deeply; flatten it") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(spelled: str) -> float:
    number = float(spelled)
    if not math.isfinite(number):
        raise ValueError(f"{_short(spelled)} is beyond what a number can hold")
    return number


def _refuse_halves(value: Any) -> None:
    """A text that has no UTF-8 form could come back in an answer, which then would have none either."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = _short(repr(error.object[error.start]))
        raise ApiError(
            "invalid_json", f"the body holds {half}, half of a surrogate pair; send the whole character or leave it out"
        ) from error


def _depth_exceeds(value: Any, limit: int) -> bool:
    level, depth = [value], 0
    while level and depth <= limit:
        depth += 1
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
    return bool(level)


def _explained(error: ValidationError, body: Any) -> ApiError:
    """The first problem in words: a field that nobody knows, one that must not be used, or a wrong value.

    Where a field may be of several kinds, each kind has its complaint: the deepest one is of the kind that was meant.
    """
    problems = error.errors(include_url=False, include_context=False)
    unknown = [problem for problem in problems if problem["type"] in ("extra_forbidden", "none_required")]
    first = max(unknown or problems, key=lambda problem: len(problem["loc"]))
    name = _place(first["loc"], body, missing=first["type"] == "missing")
    if unknown:
        shown = _short(repr(first.get("input")))
        return ApiError("unsupported_field", f"{_short(name)} = {shown} is not supported here; leave it out", param=_short(name))
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if first["type"] == "missing" else f", got {_short(repr(first.get('input')))}"
    return ApiError("invalid_value", f"{_short(name)}: {message}{shown}", param=_short(name) or None)


def _place(path: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """A problem's place as the client wrote it: pydantic also names the kinds that it tried, which are no keys of the body."""
    names: list[str] = []
    for at, part in enumerate(path):
        inside = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if inside:
            body = body[part]
        if inside or (missing and at == len(path) - 1):
            names.append(str(part))
    return ".".join(names)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


async def wait_disconnect(request: Request) -> None:
    """Returns when the client has gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


__all__ = ["Body", "ClientDisconnect", "parse", "read_body", "wait_disconnect"]
