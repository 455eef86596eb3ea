"""Malformed requests: whatever a body holds, the answer is a result or a 4xx that explains itself, never a 5xx, never a hang.

Bodies are valid ones with fields replaced, removed and added, and raw bytes. The engine is a script; the routes are real.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.server.app import create_app, create_service
from kvist.server.logs import JsonLines
from kvist.server.settings import read_settings
from tests.server_fakes import says, scripted

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PROMPT = "PRIVATEWORDS"
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "nano",
        "messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "y", "reasoning_content": "z"}],
        "tools": [TOOL],
        "stop": ["a"],
        "max_tokens": 4,
        "logit_bias": {"5": 1},
        "response_format": {"type": "text"},
        "stream": False,
    },
    "/v1/completions": {"model": "nano", "prompt": [PROMPT, "y"], "max_tokens": 3, "logprobs": 1, "echo": True, "n": 2},
    "/v1/responses": {
        "model": "nano",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "description": "d", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "model": "nano",
        "max_tokens": 4,
        "system": "s",
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"model": "nano", "messages": [{"role": "user", "content": PROMPT}]},
    "/tokenize": {"messages": [{"role": "user", "content": PROMPT}]},
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 10**30, 1e308, -0.5, "", "x", "\ud800", "<｜User｜>", "｜DSML｜", "\x00", "none", "max", "nano"]),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    """A copy with one place replaced, removed, or given a further key."""
    copy = json.loads(json.dumps(body))
    if not path:
        return {**copy, "extra": value} if how == "add" and isinstance(copy, dict) else value
    place = copy
    for key in path[:-1]:
        place = place[key]
    if how == "remove":
        del place[path[-1]]
    elif how == "add" and isinstance(place[path[-1]], dict):
        place[path[-1]]["extra"] = value
    else:
        place[path[-1]] = value
    return copy


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(VALID)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60))
    body: Any = VALID[path]
    for _ in range(draw(st.integers(1, 3))):
        if isinstance(body, dict | list):
            options = list(places(body))
            body = changed(
                body, draw(st.sampled_from(options)), draw(ANYTHING), draw(st.sampled_from(["replace", "remove", "add"]))
            )
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    return path, data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 19)) == 0 else data


KEY = "kv-fuzz-key-0123456789"
APP = create_app(create_service(scripted(says("ok</think>fine")), read_settings(max_choices=4, api_keys=[KEY])))


LOOP = asyncio.Runner()
HEADERS = {"authorization": f"Bearer {KEY}"}
CLIENT = httpx.AsyncClient(transport=httpx.ASGITransport(app=APP), base_url="http://localhost", headers=HEADERS)


class Listener(logging.Handler):
    """The server's log as it would be written; `lines` are those since it was last emptied."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def log() -> Iterator[Listener]:
    listener, logger = Listener(), logging.getLogger("kvist.server")
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    yield listener
    logger.removeHandler(listener)
    logger.setLevel(before)


async def answer(path: str, data: bytes) -> httpx.Response:
    async with asyncio.timeout(10):
        return await CLIENT.post(path, content=data)


def check(request: tuple[str, bytes], log: Listener) -> None:
    path, data = request
    log.lines.clear()
    response = LOOP.run(answer(path, data))
    assert len(log.lines) == 1, "a request is one line; a fault would have a trace besides"
    assert KEY not in log.lines[0]
    assert PROMPT not in log.lines[0]
    assert response.status_code < 500, (response.text, data)
    if response.status_code != 200:
        message = response.json()["error"]["message"]
        assert message, data
        assert len(message) < 2000, "an error does not repeat the request"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_malformed_requests(log: Listener, request: tuple[str, bytes]) -> None:
    check(request, log)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_ten_thousand_malformed_requests(log: Listener, request: tuple[str, bytes]) -> None:
    check(request, log)


def test_the_valid_bodies_are_valid() -> None:
    for path, body in VALID.items():
        assert LOOP.run(answer(path, json.dumps(body).encode())).status_code == 200, path


@pytest.mark.parametrize(
    ("part", "place", "words"),
    [
        ({"image_url": {"url": "x"}}, "", "discriminator 'type'"),
        ({"type": "audio"}, "", "'text', 'image_url'"),
        ({"type": "image_url", "image_url": "x"}, ".image_url", "dictionary"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url.url", "string, got 5"),
        ({"type": "image_url", "image_url": {"url": "x", "alt": 1}}, ".image_url.alt", "not supported"),
    ],
)
def test_a_wrong_part_is_named_by_its_place(part: dict[str, Any], place: str, words: str) -> None:
    """Of the kinds that a content may be, the one that was meant complains, at the client's own path."""
    body = {"model": "nano", "messages": [{"role": "user", "content": [part]}]}
    error = LOOP.run(answer("/v1/chat/completions", json.dumps(body).encode())).json()["error"]
    assert error["param"] == f"messages.0.content.0{place}"
    assert words in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "\ud800"}},
        {"metadata": {"\udfff": "a"}},
        {"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {"type": "object"}}}},
        {"user": "a\udc00b"},
    ],
)
def test_half_characters_are_refused_wherever_they_stand(fields: dict[str, Any]) -> None:
    """Fields that an answer repeats would have no UTF-8 form; whole pairs, which JSON spells alike, are characters."""
    body = {"model": "nano", "input": "x", **fields}
    response = LOOP.run(answer("/v1/responses", json.dumps(body).encode()))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    whole = {"model": "nano", "input": "x", "metadata": {"a": "🐈"}}
    assert LOOP.run(answer("/v1/responses", json.dumps(whole).encode())).json()["metadata"] == {"a": "🐈"}


def test_numbers_that_are_none_are_refused_wherever_they_stand() -> None:
    """JSON can spell more than a number holds; an answer that repeated it would be no JSON."""
    for spelled in ("1e400", "-1e999", "NaN", "Infinity"):
        data = f'{{"model": "nano", "input": "x", "metadata": {{"a": {spelled}}}}}'
        response = LOOP.run(answer("/v1/responses", data.encode()))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json"), spelled


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", '"prompt": [%s]'),
        ("/v1/completions", '"prompt": "x", "max_tokens": %s'),
        ("/v1/chat/completions", '"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "%s"'),
    ],
)
def test_errors_do_not_repeat_a_long_value(path: str, fields: str) -> None:
    data = f'{{"model": "nano", {fields % ("9" * 4000)}}}'
    response = LOOP.run(answer(path, data.encode()))
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) < 1100
