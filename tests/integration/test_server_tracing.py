"""Spans: what a trace holds and never holds, the caller's trace, the wire to a collector, and nothing when off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvist.engine.errors import NonFiniteLogits
from kvist.server.tracing import Tracing, otlp_tracing
from tests.integration.test_server_guards import wait_until
from tests.integration.test_server_images import tiny_vision
from tests.server_fakes import Live, Pause, says, scripted, serving

KEY = "kv-traced-key-0123456789"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"model": "tiny-vision", "prompt": "PRIVATEWORDS are here", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


@pytest.fixture(scope="module")
def live(tracing: Tracing) -> Iterator[Live]:
    with serving(tiny_vision(), tracing, api_keys=[KEY]) as server:
        yield server


def taken(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """Exactly `count` spans since the last time, by start."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    exporter.clear()
    assert len(spans) == count, [span.name for span in spans]
    return spans


def check_private(spans: list[ReadableSpan]) -> None:
    text = "\n".join(span.to_json() for span in spans)
    for secret in ("PRIVATEWORDS", KEY, "/secret-path"):
        assert secret not in text
    assert not any(span.events for span in spans), "exceptions carry messages, messages carry values"


def test_a_request_s_spans(live: Live, exporter: InMemorySpanExporter) -> None:
    """Request, queue, prefill, decode: one trace, in order, inside each other's times, with the tokens of the usage."""
    answer = live.openai(KEY).completions.create(**ASK)
    assert answer.usage is not None
    request, queue, prefill, decode = taken(exporter, 4)
    assert [span.name for span in (request, queue, prefill, decode)] == ["POST /v1/completions", "queue", "prefill", "decode"]
    assert request.attributes is not None
    assert (request.attributes["http.response.status_code"], request.attributes["kvist.prompt_tokens"]) == (
        200,
        answer.usage.prompt_tokens,
    )
    for inner in (queue, prefill, decode):
        assert inner.parent is not None
        assert inner.parent.span_id == request.context.span_id
        assert inner.context.trace_id == request.context.trace_id
    edges = [queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
    assert edges == sorted(edges)  # type: ignore[type-var]
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    slack_ns = 5_000_000
    assert request.start_time - slack_ns <= queue.start_time  # type: ignore[operator]
    assert decode.end_time <= request.end_time + slack_ns  # type: ignore[operator]
    assert prefill.attributes is not None
    assert prefill.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert decode.attributes is not None
    assert decode.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert decode.attributes["kvist.end"] in ("length", "stop")
    check_private([request, queue, prefill, decode])
    long = ASK | {"prompt": "PRIVATEWORDS " * 40}
    live.openai(KEY).completions.create(**long)
    taken(exporter, 4)
    live.openai(KEY).completions.create(**long)
    again = taken(exporter, 4)[2].attributes
    assert again is not None
    assert int(again["kvist.cached_tokens"]) > 0, "a prefix hit shows"  # type: ignore[arg-type]


def test_copies_and_streams(live: Live, exporter: InMemorySpanExporter) -> None:
    list(live.openai(KEY).completions.create(**ASK, n=2, stream=True))
    spans = taken(exporter, 7)
    assert sorted(span.name for span in spans) == ["POST /v1/completions", *["decode"] * 2, *["prefill"] * 2, *["queue"] * 2]
    assert {span.attributes["kvist.index"] for span in spans if span.name == "decode" and span.attributes} == {0, 1}


@pytest.mark.parametrize(
    ("header", "follows"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", None),
        ("00-zzz-yyy-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        ("x" * 5000, False),
    ],
)
def test_the_caller_s_trace(live: Live, exporter: InMemorySpanExporter, header: str, follows: bool | None) -> None:
    """W3C traceparent: followed when whole, its wish not to be sampled obeyed, ignored when broken."""
    client = live.openai(KEY).with_options(default_headers={"traceparent": header, "tracestate": "a=1"})
    client.completions.create(**ASK)
    if follows is None:
        wait_until(lambda: live.service.admission.running == 0)
        assert not exporter.get_finished_spans()
        return
    spans = taken(exporter, 4)
    assert {f"{span.context.trace_id:032x}" == TRACE for span in spans} == {follows}
    parent = spans[0].parent
    assert (parent is not None and f"{parent.span_id:016x}" == PARENT) == follows


def test_refusals_and_paths(live: Live, exporter: InMemorySpanExporter) -> None:
    """A refused request has its span without inner ones; made-up paths do not become names; probes are not traced."""
    with live.http() as http:
        http.get("/health")
        http.get("/live")
        http.get("/secret-path/PRIVATEWORDS", headers={"x-api-key": KEY})
        http.post("/v1/completions", json=ASK, headers={"x-api-key": "kv-wrong"})
    with pytest.raises(openai.BadRequestError):
        live.openai(KEY).completions.create(**{**ASK, "max_tokens": -1})
    spans = taken(exporter, 3)
    assert [span.name for span in spans] == ["GET other", "POST other", "POST /v1/completions"]
    statuses = [span.attributes["http.response.status_code"] for span in spans if span.attributes]
    assert statuses == [404, 401, 400]
    assert all(span.status.is_unset for span in spans), "a client's mistake is no fault of the server"
    check_private(spans)


def test_a_failed_and_an_abandoned_request(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with serving(scripted(says("text", NonFiniteLogits("PRIVATEWORDS"))), tracing) as live, pytest.raises(openai.APIStatusError):
        live.openai().completions.create(**ASK | {"model": "nano"})
    (failed,) = taken(exporter, 1)
    assert not failed.status.is_ok
    assert not failed.status.is_unset
    check_private([failed])
    with serving(scripted(says("a", Pause(30))), tracing) as live:
        stream = live.openai().completions.create(**ASK | {"model": "nano"}, stream=True)
        next(iter(stream))
        stream.close()
        (left,) = taken(exporter, 1)
        assert left.attributes is not None
        assert left.attributes["http.response.status_code"] == 200


@contextmanager
def collector() -> Iterator[tuple[str, Callable[[], list[ExportTraceServiceRequest]]]]:
    """A collector on loopback; what it got."""
    got: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            del args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", lambda: got
    finally:
        server.shutdown()
        server.server_close()


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-kvist")
        tracing = otlp_tracing()
        with serving(scripted(says("hi")), tracing) as live:
            live.openai().completions.create(**ASK | {"model": "nano"})
        tracing.close()
        (message,) = got()
    (resource,) = message.resource_spans
    assert "my-kvist" in {attribute.value.string_value for attribute in resource.resource.attributes}
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert names == ["POST /v1/completions"]
    assert b"PRIVATEWORDS" not in message.SerializeToString()


def test_off_loads_nothing_and_missing_is_said() -> None:
    """Without tracing no SDK is loaded (the web framework loads the bare API itself); asking for what is missing is said."""
    code = (
        "import sys, kvist.server.main\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
        "sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from kvist.server.tracing import otlp_tracing\n"
        "try: otlp_tracing()\nexcept ValueError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lines = result.stdout.splitlines()
    assert lines[0] == "[]", result.stdout + result.stderr
    assert "pip install '.[otel]'" in lines[1]
