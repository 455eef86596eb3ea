"""schemathesis on the server's own OpenAPI: bodies and paths that fit it and that break it, over a real socket; never a 5xx.

The engine is a script that sees pictures; the routes, limits and errors are real. The issue's count runs under `long`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation

from tests.integration.test_server_files import seeing
from tests.server_fakes import Live, serving

ADMIN = "kv-openapi-admin-key-0123456789"
FEW, MANY = 3, 10_000
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(seeing(), max_choices=4, default_max_tokens=8, admin_keys=[ADMIN], captures_per_minute=0) as server:
        yield server


def operations(live: Live) -> list[APIOperation[Any, Any, Any]]:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def ask(operation: APIOperation[Any, Any, Any], mode: GenerationMode, count: int, seen: Counter[tuple[str, int]]) -> None:
    """`count` requests to an operation; each is answered in time, by a result or by a 4xx that says why."""

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "nano"  # a made-up name would end everything at the door
        answer = case.call(timeout=10, headers={"x-api-key": ADMIN})
        seen[operation.label, answer.status_code] += 1
        assert answer.status_code < 500, (answer.status_code, answer.text, case.as_curl_command())
        if answer.status_code >= 400 and answer.content and "json" in str(answer.headers.get("content-type")):
            message = answer.json()["error"]["message"]
            assert message
            assert len(message) < 2000

    check()


def run(live: Live, count: int, caplog: pytest.LogCaptureFixture) -> Counter[tuple[str, int]]:
    """Spread `count` requests over all operations and both modes; no key is in the log, nothing runs on."""
    caplog.set_level(logging.DEBUG)
    seen: Counter[tuple[str, int]] = Counter()
    every = [(operation, mode) for operation in operations(live) for mode in MODES]
    for operation, mode in every:
        if not operation.body and mode is GenerationMode.NEGATIVE:
            continue  # a path is text, and any text fits: nothing of it can be broken
        plain = not operation.body and "{" not in operation.path
        ask(operation, mode, 1 if plain else max(FEW, count // len(every)), seen)
    assert ADMIN not in "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records)
    assert live.engine.open == 0
    return seen


def test_our_openapi_holds(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    seen = run(live, 0, caplog)
    asked = {label for label, _ in seen}
    assert {"POST /v1/chat/completions", "POST /v1/files", "DELETE /v1/files/{number}", "POST /kvist/pins"} <= asked
    assert any(status == 200 for label, status in seen if label.startswith("POST")), seen
    assert any(status == 400 for _, status in seen)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_our_openapi_holds_many_times(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    seen = run(live, MANY, caplog)
    assert sum(seen.values()) > MANY // 2
    print(sorted(seen.items()))


def test_every_path_parameter_is_described(live: Live) -> None:
    """A generator that reads the document fills paths by it."""
    paths = live.http().get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        named = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
        for operation in methods.values():
            described = [entry["name"] for entry in operation.get("parameters", ()) if entry["in"] == "path"]
            assert described == named, path
