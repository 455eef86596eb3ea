"""The door and the operations: keys, names, limits, hostile bodies, keep-alive, deadlines, clients that leave, draining."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import openai
import pytest

from kvist.engine.errors import DeadlineExceeded, EngineStopped
from kvist.server.service import Service
from tests.server_fakes import NANO, TOKENIZER, Live, Pause, says, scripted, serving

KEY = "kv-a-very-secret-key"
CHAT = {"model": "nano", "messages": [{"role": "user", "content": "hello"}]}


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Poll; fails after a while."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Missing and wrong keys get 401 on all but /live and /health; no key is ever in a log line."""
    caplog.set_level(logging.DEBUG)
    with serving(says("hi"), api_keys=[KEY, "another-key-of-mine"]) as live, live.http() as http:
        for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/no/such/path"):
            assert http.get(path).status_code == 401, path
        for headers in ({"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": KEY}, {"x-api-key": "wrong-key-9"}):
            answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert http.get("/live").status_code == http.get("/health").status_code == 200
        heads = [http.head(path) for path in ("/live", "/health")]
        assert [(head.status_code, head.content) for head in heads] == [(200, b"")] * 2, "what load balancers ask"
        assert live.openai(KEY).chat.completions.create(**CHAT).choices[0].message.content == ""
        live.anthropic("another-key-of-mine").messages.create(max_tokens=9, **CHAT)
        tenants = {request.tenant for request in live.engine.requests}
        salts = {request.salt for request in live.engine.requests}
        assert len(tenants) == len(salts) == 2
        http.get(f"/v1/{KEY}", headers={"authorization": f"Bearer {KEY}"}, params={"key": KEY})
        http.post("/v1/chat/completions", json={"api_key": KEY}, headers={"authorization": f"Bearer {KEY}"})
    ours = [record for record in caplog.records if record.name.startswith(("kvist", "uvicorn", "fastapi", "starlette"))]
    text = "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')} {record.exc_text}" for record in ours)
    assert "/v1/chat/completions" in text
    for secret in (KEY, KEY[:-1], "another-key-of-mine", "wrong-key-9", "hello"):
        assert secret not in text, "a key or a prompt was logged"


def test_host_and_origin() -> None:
    with serving(says("hi"), allowed_hosts=["box.example"], allowed_origins=["https://app.example"]) as live, live.http() as http:
        for host, status in (("evil.example", 403), ("localhost:1", 200), ("box.example", 200), ("127.0.0.1.evil.example", 403)):
            assert http.get("/v1/models", headers={"host": host}).status_code == status, host
        for origin, status in ((live.url, 200), ("https://app.example", 200), ("https://evil.example", 403), ("null", 403)):
            answer = http.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == status, origin
        allowed = http.get("/v1/models", headers={"origin": "https://app.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"


def hostile_bodies() -> list[tuple[str, bytes, int]]:
    head = b'{"model": "nano", "messages": [{"role": "user", "content": "x"}], "metadata": '
    return [
        ("nested", head + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        ("nested objects", head + b'{"a":' * 500 + b"1" + b"}" * 501, 400),
        ("cut", head, 400),
        ("empty", b"", 400),
        ("not UTF-8", b'{"model": "\xff\xfe"}', 400),
        ("NaN", head + b'{"a": NaN}}', 400),
        ("no object", b"[1, 2]", 400),
        ("many digits", head + b'{"a": ' + b"9" * 20_000 + b"}}", 400),
        ("lone surrogate", b'{"model": "nano", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("too large", b" " * 200_000, 413),
    ]


def test_hostile_bodies() -> None:
    """SRV-11: 400 or 413 quickly, in all routes; the server lives on."""
    with serving(says("hi"), max_body_bytes=2_000_000) as live, live.http() as http:
        for name, body, status in hostile_bodies():
            for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
                began = time.monotonic()
                answer = http.post(path, content=body if status == 400 else body * 20)
                assert answer.status_code == status, (name, path, answer.text[:200])
                assert time.monotonic() - began < 2, name
                assert answer.json()["error"]["message"]
        assert live.openai().chat.completions.create(**CHAT).choices
        assert len(live.engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 2_000_000}]}),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 10**7}]}]},
        ),
        ("/v1/responses", {"input": "\n" * 6_000_000}),
        ("/v1/completions", {"prompt": "hello " * 2_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 60_000}),
    ],
)
def test_prompts_far_beyond_the_context_are_refused_quickly(path: str, body: dict[str, object]) -> None:
    """What cannot fit however it is encoded is not encoded; many messages are no quadratic work; others are served meanwhile."""
    with serving(says("hi")) as live, live.http() as http:
        began = time.monotonic()
        answer = http.post(path, json={"model": "nano", **body})
        assert answer.status_code == 400
        assert "context of 32768 tokens" in answer.json()["error"]["message"]
        assert time.monotonic() - began < 8
        assert not live.engine.requests


def test_chunked_body_beyond_the_limit() -> None:
    with serving(says("hi"), max_body_bytes=10_000) as live, live.http() as http, contextlib.suppress(httpx.WriteError):
        answer = http.post("/v1/completions", content=(b"x" * 1000 for _ in range(100)))
        assert answer.status_code == 413


def test_slow_body_is_given_up() -> None:
    """Slow-loris: a body that never ends gets 408 and the connection closed."""
    with serving(says("hi"), body_timeout_s=0.2) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            answer = read_to_the_end(raw)
        assert answer.startswith(b"HTTP/1.1 408")
        assert live.service.admission.running == 0


def read_to_the_end(raw: socket.socket) -> bytes:
    return b"".join(iter(lambda: raw.recv(1 << 16), b""))


def test_slow_heads_are_given_up() -> None:
    """Slow-loris: a head that never ends, at the start of a connection or behind a served request; fast ones are not touched."""
    with serving(says("hi"), head_timeout_s=0.3) as live:
        host, port = live.url.removeprefix("http://").split(":")
        for before in (b"", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                began = time.monotonic()
                raw.sendall(before + b"GET /live HTTP/1.1\r\nHost: local")
                answer = read_to_the_end(raw)
            assert time.monotonic() - began < 3
            assert answer.count(b"HTTP/1.1 200") == bool(before)
        with live.http() as http:
            for _ in range(3):
                assert http.get("/live").status_code == 200
                time.sleep(0.35)


def test_a_stream_that_nobody_reads_is_given_up() -> None:
    big = ["word"] * (28_000 // len(TOKENIZER.encode("word")))
    with serving(says("</think>", *big, Pause(60), "end"), send_timeout_s=0.3, default_max_tokens=10**6) as live:
        host, port = live.url.removeprefix("http://").split(":")
        body = json.dumps(CHAT | {"stream": True, "max_tokens": 30_000}).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            wait_until(lambda: len(live.engine.requests) == 1)
            wait_until(lambda: live.engine.open == 0 and live.service.admission.running == 0, 20)
        assert live.engine.left_early == 1


def test_too_many_at_a_time() -> None:
    with serving(says("a", Pause(30), "b"), max_concurrency=2, retry_after_s=7) as live, live.http() as http:
        clients = [live.http() for _ in range(2)]
        streams = [client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) for client in clients]
        with contextlib.ExitStack() as held:
            for stream in streams:
                held.enter_context(stream)
            wait_until(lambda: live.service.admission.running == 2)
            answer = http.post("/v1/chat/completions", json=CHAT)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
            assert http.get("/health").status_code == 200, "busy is not unready"
            assert "kvist_server_running 2.0" in http.get("/metrics").text
        for client in clients:
            client.close()
        wait_until(lambda: live.service.admission.running == 0)
        assert live.engine.left_early == 2


def test_clients_that_leave() -> None:
    """SRV-05: streaming or not, a client that goes ends its request; places come back every time."""
    with serving(says("a", Pause(60), "b"), max_concurrency=4) as live:
        for number in range(6):
            with live.http() as http, contextlib.suppress(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=CHAT | {"stream": bool(number % 2)}, timeout=0.2)
            wait_until(lambda: live.engine.open == 0 and live.service.admission.running == 0)
        assert live.engine.left_early == len(live.engine.requests) == 6


def test_a_reply_cut_at_a_stop_string_keeps_its_figures() -> None:
    """The engine is not told of stop strings where there is reasoning: it is stopped in the middle, and its usage counts."""
    with serving(says("thought</think>one STOP two", Pause(60))) as live:
        live.engine.cached = 3
        body = {**CHAT, "stop": ["STOP"]}
        whole = live.openai().chat.completions.create(**body)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("one ", "stop")
        *_, last = live.openai().chat.completions.create(stream=True, stream_options={"include_usage": True}, **body)
        for usage in (whole.usage, last.usage):
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == 3
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert live.engine.open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_made_for_a_client_that_left_are_counted(stream: bool) -> None:
    """In the figures and against the key's quota, as if it had waited for the end."""
    key = {"authorization": f"Bearer {KEY}"}
    with serving(says(*range(300, 340), Pause(60)), tokens_per_minute=60, api_keys=[KEY]) as live, live.http() as http:
        with contextlib.suppress(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=key, timeout=0.5)
        wait_until(lambda: live.engine.open == 0 and live.service.admission.running == 0)
        assert "kvist_server_reply_tokens_total 40.0" in http.get("/metrics", headers=key).text
        assert len(live.engine.requests[0].prompt) < 50, "the prompt alone does not use up the quota"
        answer = http.post("/v1/chat/completions", json=CHAT, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")


def test_keepalive_while_nothing_comes() -> None:
    """SRV-13: headers and comments at once, and the comments are no events to a client."""
    with serving(says(Pause(0.5), "late</think>text"), headers_after_s=0.05, keepalive_s=0.1) as live, live.http() as http:
        began, lines = time.monotonic(), []
        with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            assert time.monotonic() - began < 0.4, "headers wait for the first token"
            lines = list(answer.iter_lines())
        assert sum(line.startswith(":") for line in lines) >= 3
        chunks = list(live.openai().chat.completions.create(stream=True, **CHAT))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "text"
        with live.anthropic().messages.stream(max_tokens=99, **CHAT) as stream:
            assert stream.get_final_text() == "text"


def test_a_fault_of_ours_is_named_in_each_api(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw: 500 in the API's own form, its trace in the log and nothing of it in the answer."""

    def broken(self: Service, request: object) -> None:
        raise RuntimeError("SECRET-INSIDE")

    monkeypatch.setattr(Service, "caller", broken)
    with serving(says("hi")) as live, live.http() as http:
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(path, json=CHAT | {"max_tokens": 5})
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["type"] == "api_error"
            assert "SECRET" not in answer.text
        assert answer.json()["type"] == "error"
        assert http.get("/health").status_code == 200
    faults = [record for record in caplog.records if record.getMessage() == "fault"]
    assert ["SECRET-INSIDE" in str(record.exc_info) for record in faults] == [True, True]


def test_line_ends_in_a_reply_split_no_event() -> None:
    """Clients that cut streams at what Unicode calls the end of a line still get whole events."""
    said = "</think>a\u2028b\u2029c\x85d"
    with serving(says(said)) as live, live.http() as http:
        with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "a\u2028b\u2029c\x85d"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/completions"])
def test_whatever_costs_time_counts(path: str) -> None:
    """Encoding a prompt costs too: it takes a place and one of the key's requests."""
    body = {"model": "nano", "prompt": "x"} if path != "/v1/messages/count_tokens" else CHAT
    with serving(says("hi"), requests_per_minute=1) as live, live.http() as http:
        assert http.post(path, json=body).status_code == 200
        answer = http.post(path, json=body)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


def test_late_errors_are_events_and_early_ones_statuses() -> None:
    for pause, kind in ((0.0, openai.APIStatusError), (0.3, openai.APIError)):
        with serving(says(Pause(pause), DeadlineExceeded("not within 1 s")), headers_after_s=0.1) as live:
            client = live.openai()
            with pytest.raises(kind, match="not within") as caught:
                list(client.chat.completions.create(stream=True, **CHAT))
            assert isinstance(caught.value, openai.APIStatusError) == (not pause)
    with serving(says(EngineStopped("closed"))) as live, pytest.raises(openai.APIStatusError) as stopped:
        live.openai().chat.completions.create(**CHAT)
    assert stopped.value.status_code == 503


def test_not_ready_once_the_engine_has_stopped() -> None:
    with serving(replace(scripted(says("hi")), stopped=lambda: "the engine failed")) as live, live.http() as http:
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert http.get("/live").status_code == 200


def test_quota_of_a_key() -> None:
    with serving(says("hi"), requests_per_minute=2, api_keys=[KEY, "other"]) as live:
        for _ in range(2):
            live.openai(KEY).chat.completions.create(**CHAT)
        with pytest.raises(openai.RateLimitError) as caught:
            live.openai(KEY).chat.completions.create(**CHAT)
        assert caught.value.code == "quota_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        live.openai("other").chat.completions.create(**CHAT)
    with serving(says("hi"), tokens_per_minute=30) as live:
        live.openai().chat.completions.create(**CHAT)
        with pytest.raises(openai.RateLimitError):
            live.openai().chat.completions.create(**CHAT)


def test_request_ids_and_unknown_paths() -> None:
    with serving(says("hi")) as live, live.http() as http:
        assert http.get("/live", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert len(http.get("/live", headers={"x-request-id": "bad id!"}).headers["x-request-id"]) == 24
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-2"})
        assert answer.json()["id"] == "chatcmpl-mine-2"
        for path in ("/nope", "/v1/models/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd"):
            answer = http.get(path)
            assert answer.status_code == 404, path
            assert "root:" not in answer.text
        slashed = http.post("/v1/chat/completions/", json=CHAT)
        assert (slashed.status_code, slashed.json()["error"]["code"]) == (404, "not_found"), "no redirect to what Host says"
        assert http.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"
        figures = http.get("/metrics").text
        assert 'route="/v1/chat/completions",status="200"' in figures
        assert "passwd" not in figures, "a client's path became a label"


def test_made_up_methods_are_no_labels(caplog: pytest.LogCaptureFixture) -> None:
    """A method is any word: what a client makes up neither grows the figures nor stands in the log."""
    caplog.set_level(logging.DEBUG)
    with serving(says("hi")) as live, live.http() as http:
        for number in range(3):
            assert http.request(f"{KEY}{number}", "/live").status_code == 405
        assert http.delete("/v1/files/file-0").status_code == 404
        figures = http.get("/metrics").text
    assert KEY not in figures
    assert 'method="other",route="/live",status="405"} 3.0' in figures
    assert 'method="DELETE",route="/v1/files/{number}",status="404"} 1.0' in figures
    ours = [record for record in caplog.records if record.name.startswith("kvist")]
    assert [record.fields["method"] for record in ours if record.getMessage() == "request"][:4] == [*["other"] * 3, "DELETE"]  # type: ignore[attr-defined]
    assert not any(KEY in str(record.__dict__) for record in ours)


def drained(live: Live, drain_s: float) -> list[object]:
    """Start a stream, begin to stop the server in its own thread as a signal would, and collect what the stream says."""
    got: list[object] = []

    def read() -> None:
        try:
            got.extend(live.openai().chat.completions.create(stream=True, **CHAT))
        except openai.APIError as error:
            got.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: live.engine.open == 1)
    live.service.settings.drain_s = drain_s
    live.service.admission.draining = True
    with live.http() as http:
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 503
        assert http.get("/live").status_code == 200
    return [thread, got]


def test_draining_lets_requests_end() -> None:
    with serving(says("a</think>b", Pause(0.5), "c")) as live:
        thread, got = drained(live, 10)
    thread.join(5)  # type: ignore[attr-defined]
    texts = [chunk.choices[0].delta.content or "" for chunk in got]  # type: ignore[attr-defined]
    assert "".join(texts) == "bc"


def test_draining_ends_what_takes_too_long_with_a_reason() -> None:
    with serving(says("a</think>b", Pause(60), "c")) as live:
        thread, got = drained(live, 0.2)
    thread.join(5)  # type: ignore[attr-defined]
    assert isinstance(got[-1], openai.APIError)  # type: ignore[index]
    assert "shut down" in str(got[-1])  # type: ignore[index]


def test_a_second_signal_ends_at_once_with_a_reason() -> None:
    """The first SIGTERM waits for a stream that would take minutes; the second does not, and its client is told why."""
    got: list[object] = []

    def read(live: Live) -> None:
        try:
            got.extend(live.openai().chat.completions.create(stream=True, **CHAT))
        except openai.APIError as error:
            got.append(error)

    with serving(says("a</think>b", Pause(60), "c"), drain_s=60) as live:
        thread = threading.Thread(target=read, args=(live,))
        thread.start()
        wait_until(lambda: live.engine.open == 1)
        live.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: live.server.should_exit)
        time.sleep(0.3)
        assert thread.is_alive(), "a running stream has its time"
        began = time.monotonic()
        live.server.handle_exit(signal.SIGTERM, None)
    assert time.monotonic() - began < 5
    thread.join(5)
    assert "shut down" in str(got[-1])
    assert live.engine.open == 0


def test_openapi_names_every_body() -> None:
    with serving(says("hi")) as live, live.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["additionalProperties"] is False
            assert "$ref" not in json.dumps(schema)


def test_the_documented_snippets_run() -> None:
    """The Python blocks of docs/clients.md, at this server's address."""
    text = (NANO.parents[1] / "docs" / "clients.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    with serving(says("hi")) as live:
        for block in blocks:
            exec(compile(block.replace("http://127.0.0.1:8000", live.url), "docs/clients.md", "exec"), {})
        assert len(live.engine.requests) == 4
