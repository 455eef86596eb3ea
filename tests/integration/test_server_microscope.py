"""Live figures and the microscope: shapes, keys, limits and ends on a scripted engine; truth on a real server with nano.

What a look sees is judged in tests/property/test_capture.py; here it is who may look, when, and that served tokens do not change.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.engine.errors import NonFiniteLogits
from kvist.engine.microscope import LayerView, View
from kvist.engine.terminal import book_text
from kvist.server.admission import Admission
from tests.integration.test_server_process import KEY, Process
from tests.server_fakes import NANO, TOKENIZER, Live, Pause, says, scripted, serving

CHAT = {"model": "nano", "messages": [{"role": "user", "content": "PRIVATEWORDS"}], "max_tokens": 9}
LAYER = LayerView(
    layer=0,
    role="window",
    half="encoder",
    ratio=0,
    source=None,
    selection_from=None,
    candidates_from=None,
    window_mass=0.75,
    row_mass=0.0,
    sink_mass=0.25,
    window_positions=[(0, 0.75)],
    rows=[],
    keeps_pool=False,
    pool=None,
    overlap=None,
    experts=[(1, 0.5)],
    engram=None,
)


@dataclass
class FakeMicroscope:
    """Takes `chunks` steps of 10 ms, then says what it was given. `error` comes instead of an answer."""

    chunks: int = 1
    error: Exception | None = None
    image_token_bytes: int = 0
    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)
    replays: list[Any] = field(default_factory=list)
    steps: int = 0

    def look(self, prompt: Any, output: Any, *, images: Any = (), replay: Any = None, proceed: Callable[[], None]) -> View:
        self.asked.append((list(prompt), list(output)))
        self.replays.append(replay)
        for _ in range(self.chunks):
            self.steps += 1
            time.sleep(0.01)
            proceed()
        if self.error is not None:
            raise self.error
        return View(position=len(prompt) + len(output) - 2, window=64, layers=[LAYER], logprob=-0.5, rank=0)


def microscope(fake: FakeMicroscope | None = None, *said: Any, **settings: Any) -> Any:
    return serving(replace(scripted(says(*(said or ("one two three",)))), microscope=fake), **settings)


def complete(live: Live, key: str = "none", **fields: Any) -> str:
    return live.openai(key).chat.completions.create(**CHAT, extra_body={"thinking": {"type": "disabled"}}, **fields).id


def look(http: httpx.Client, number: str, token: int = 0, **extra: Any) -> httpx.Response:
    return http.post("/kvist/microscope", json={"request_id": number, "token": token, **extra})


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_shapes_and_names() -> None:
    """By the answer's id of every API, or by the client's own; every reply; tokens are those of prompt and output."""
    fake = FakeMicroscope()
    with microscope(fake) as live, live.http() as http:
        number = complete(live)
        answer = look(http, number, 1)
        assert answer.status_code == 200, answer.text
        seen = answer.json()
        prompt, output = fake.asked[-1]
        assert output == TOKENIZER.encode("one two three")[:2]
        assert (seen["request_id"], seen["token"], seen["reply"]) == (number, 1, 0)
        assert seen["position"] == len(prompt)
        assert seen["prompt_tokens"] == len(prompt)
        spelled = [TOKENIZER.token_bytes(token).decode("utf-8", "replace") for token in [*prompt, *output]]
        assert [*seen["tokens"], seen["output"]["text"]] == spelled
        assert seen["window"] == 64
        assert seen["layers"][0]["window_positions"] == [[0, 0.75]]
        assert seen["layers"][0]["experts"] == [[1, 0.5]]
        assert seen["seconds"] > 0
        live.openai().completions.create(model="nano", prompt="x", n=2, extra_headers={"x-request-id": "page-1"})
        live.anthropic().messages.create(**CHAT)
        response = live.openai().responses.create(model="nano", input="x")
        assert look(http, response.id).status_code == 200
        for name in ("page-1", "cmpl-page-1"):
            assert look(http, name, reply=1).json()["reply"] == 1
        fields = {"model": "nano", "prompt": "x", "max_tokens": 2}
        for extra in ({}, {"echo": True, "logprobs": 1}, {"extra_body": {"replay": 200}}):
            look(http, live.openai().completions.create(**fields, **extra, extra_headers={"x-request-id": "again"}).id)
        assert fake.replays[-3:] == [None, "exact", 200], "a scored prompt ran as with exact replay"
        listed = http.get("/kvist/live").json()
        assert listed["data"].pop(0)["request_id"] == "again"
        assert [item["request_id"] for item in listed["data"]][2] == "page-1"
        assert [item["replies"] for item in listed["data"]] == [1, 1, 2, 1]
        assert http.get("/kvist/live/page-1", params={"reply": "1"}).json()["reply"] == 1


def test_refusals() -> None:
    fake = FakeMicroscope()
    with microscope(fake, microscope_context=40, captures_per_minute=0) as live, live.http() as http:
        number = complete(live)
        made = http.get(f"/kvist/live/{number}").json()["output_tokens"]
        for token, reply, status, code in (
            (made, 0, 400, "invalid_value"),
            (-1, 0, 400, "invalid_value"),
            (0, 1, 400, "invalid_value"),
            (True, 0, 400, "invalid_value"),
        ):
            answer = look(http, number, token, reply=reply)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert look(http, "cmpl-nobody").json()["error"]["code"] == "request_not_found"
        assert http.get("/kvist/live/nobody").status_code == 404
        assert http.get(f"/kvist/live/{number}", params={"reply": "x"}).status_code == 400
        assert http.get("/kvist/microscope").status_code == 405
        assert look(http, number, extra=1).json()["error"]["code"] == "unsupported_field"
        long = live.openai().completions.create(model="nano", prompt="word " * 60)
        answer = look(http, long.id)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "capture_too_long")
        assert "microscope_context" in answer.json()["error"]["message"]
        assert not fake.asked, "what is refused costs nothing"
    for fake_or_none, limit in ((None, 10**6), (FakeMicroscope(), 0)):
        with microscope(fake_or_none, microscope_context=limit) as live, live.http() as http:
            answer = look(http, complete(live))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "microscope_off")
    with microscope(FakeMicroscope(), history_requests=0) as live, live.http() as http:
        answer = look(http, complete(live))
        assert "history_requests is 0" in answer.json()["error"]["message"]
        assert http.get("/kvist/live").json()["data"] == []


def test_keys_do_not_see_each_other() -> None:
    """Ids, figures, tokens and quotas are a key's own; wrong keys, hosts and origins come nowhere."""
    with (
        microscope(FakeMicroscope(), api_keys=["key-of-anne", "key-of-bert"], captures_per_minute=2) as live,
        live.http() as http,
    ):
        anne, bert = {"x-api-key": "key-of-anne"}, {"x-api-key": "key-of-bert"}
        number = complete(live, "key-of-anne")
        body = {"request_id": number, "token": 0}
        assert http.get("/kvist/live", headers=anne).json()["data"][0]["request_id"] == number.removeprefix("chatcmpl-")
        assert http.get("/kvist/live", headers=bert).json()["data"] == []
        assert http.get(f"/kvist/live/{number}", headers=bert).status_code == 404
        assert http.post("/kvist/microscope", json=body, headers=bert).status_code == 404
        for path in ("/kvist/live", f"/kvist/live/{number}"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={**anne, "host": "evil.example"}).status_code == 403
            assert http.get(path, headers={**anne, "origin": "https://evil.example"}).status_code == 403
        assert http.post("/kvist/microscope", json=body).status_code == 401
        assert http.post("/kvist/microscope", json=body, headers={**anne, "origin": "https://evil.example"}).status_code == 403
        statuses = [http.post("/kvist/microscope", json=body, headers=anne).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        late = http.post("/kvist/microscope", json=body, headers=anne)
        assert late.json()["error"]["code"] == "quota_exceeded"
        assert 1 <= int(late.headers["retry-after"]) <= 30
        theirs = complete(live, "key-of-bert")
        answer = http.post("/kvist/microscope", json={"request_id": theirs, "token": 0}, headers=bert)
        assert answer.status_code == 200, "another key's quota is its own"


def test_one_look_at_a_time_and_clients_that_leave() -> None:
    fake = FakeMicroscope(chunks=10**6)
    with microscope(fake, retry_after_s=3) as live, live.http() as http:
        number = complete(live)
        captures = live.service.captures
        with ThreadPoolExecutor(1) as pool, live.http() as other:
            first = pool.submit(lambda: other.post("/kvist/microscope", json={"request_id": number, "token": 0}, timeout=0.5))
            wait_until(lambda: captures.running)
            answer = look(http, number)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json()["error"]["code"] == "too_many_requests"
            assert isinstance(first.exception(), httpx.ReadTimeout)
        wait_until(lambda: not captures.running)
        assert fake.steps < 1000, "the look ended with its client"
        fake.chunks = 1
        assert look(http, number).status_code == 200
        figures = http.get("/metrics").text
        assert 'kvist_server_captures_total{outcome="left"} 1.0' in figures
        assert 'kvist_server_captures_total{outcome="seen"} 1.0' in figures
        assert "kvist_server_capture_seconds_count 2.0" in figures


def test_looks_end_by_deadline_and_drain(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeMicroscope(chunks=10**6)
    with microscope(fake, deadline_s=0.1) as live, live.http() as http:
        assert look(http, complete(live)).json()["error"]["code"] == "deadline_exceeded"
    with microscope(fake) as live, live.http() as http:
        number = complete(live)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(look, http, number)
            wait_until(lambda: live.service.captures.running)
            live.service.admission.draining = True
            assert answer.result(5).json()["error"]["code"] == "draining"
        assert look(http, number).status_code == 503
    with microscope(FakeMicroscope(error=NonFiniteLogits("not finite"))) as live, live.http() as http:
        assert look(http, complete(live)).json()["error"]["code"] == "engine_error"
    text = "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records)
    assert "PRIVATEWORDS" not in text
    assert "one two three" not in text


def test_a_running_request() -> None:
    """Its figures and the tokens that have come can be asked for while it runs."""
    with microscope(FakeMicroscope(), "one two three", Pause(60)) as live, live.http() as http, live.http() as other:
        with http.stream("POST", "/v1/completions", json={"model": "nano", "prompt": "x", "stream": True}) as stream:
            number = stream.headers["x-request-id"]
            made = len(TOKENIZER.encode("one two three"))
            wait_until(lambda: other.get(f"/kvist/live/{number}").json()["output_tokens"] == made)
            assert other.get(f"/kvist/live/{number}").json()["state"] != "finished"
            assert look(other, number, made - 1).status_code == 200
            assert "so far" in look(other, number, made).json()["error"]["message"]
        wait_until(lambda: other.get(f"/kvist/live/{number}").json()["state"] == "finished")


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.just("known"), st.lists(st.integers(), max_size=2)
)


def test_malformed_bodies() -> None:
    with microscope(FakeMicroscope(chunks=0), captures_per_minute=0) as live, live.http() as http:
        complete(live, extra_headers={"x-request-id": "known"})

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.dictionaries(st.sampled_from(["request_id", "token", "reply", "x"]), ANY, max_size=4) | ANY)
        def check(body: Any) -> None:
            answer = http.post("/kvist/microscope", content=json.dumps(body).encode("utf-8", "surrogatepass"))
            assert answer.status_code in (200, 400, 404), answer.text

        check()
        for name in ("x" * 5000, "%00", "..%2f..%2fetc", "a/b", "é", "cmpl-", "msg_known/"):
            assert http.get(f"/kvist/live/{name}").status_code in (307, 400, 404), name


def test_the_quota_of_looks_fills_again() -> None:
    now = [0.0]
    admission = Admission(limit=1, clock=lambda: now[0])
    for _ in range(4):
        admission.take("captures", "a", 4)
    with pytest.raises(Exception, match="4 captures a minute") as caught:
        admission.take("captures", "a", 4)
    assert getattr(caught.value, "retry_after_s", 0) == 15
    admission.take("captures", "b", 4)
    now[0] = 15.0
    admission.take("captures", "a", 4)
    admission.take("captures", "a", 0)


# ---- a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("pages"), "--deterministic", "--captures-per-minute", "0", "--replay", "exact")
    yield process
    status = process.end()
    log = "".join(process.lines)
    assert status == 0, log
    for secret in (KEY, "PRIVATEWORDS", "Anne Elliot"):
        assert secret not in log, "a key or a prompt was logged"
    assert '"level": "error"' not in log, log


def client(server: Process) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=600)


def ask(http: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": "nano", "prompt": prompt, "temperature": 0, "logprobs": 3, **fields})
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def test_live_figures(server: Process) -> None:
    """The arithmetic of a request: found, replayed, computed; halves of the model; bytes; drafts; times."""
    with client(server) as http:
        prompt = book_text()[1000:5000]
        first = http.get(f"/kvist/live/{ask(http, prompt, max_tokens=16)['id']}").json()
        size = first["prompt_tokens"]
        config = json.loads((NANO / "config.json").read_text())["text_config"]
        window, sources = config["sliding_window"], config["kv_source_layer_ids"]
        assert (first["state"], first["finish_reason"], first["output_tokens"]) == ("finished", "length", 16)
        assert (first["cached_tokens"], first["replayed_tokens"], first["computed_tokens"]) == (0, 0, size)
        assert first["encoder"] == {"layers": sources[-1], "rows": size}
        assert first["decoder"]["layers"] == config["num_hidden_layers"] - sources[-1]
        deep = (window - 1) * first["decoder"]["layers"] + 1
        assert first["decoder"]["rows"] == min(size, deep), "exact replay runs the upper half on what later windows need"
        assert first["decoder"]["rows"] < size
        kinds = first["cache_bytes_per_token"]
        assert kinds["main_rows"] + kinds["index_keys"] == 140, "36 and 34 bytes a row, ratios 2, 2 and 1"
        pages = (size + 15) // 128
        assert first["cache_bytes_by_tier"]["device"] == pages * 128 * 140
        assert first["accepted_tokens"] <= first["drafted_tokens"]
        for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "prefill_tokens_per_s", "decode_tokens_per_s"):
            assert first[name] >= 0, name
        second = http.get(f"/kvist/live/{ask(http, prompt + ' And', max_tokens=2)['id']}").json()
        assert second["cached_tokens"] > 0
        assert sum(second["cached_tokens_by_tier"].values()) == second["cached_tokens"]
        assert second["cached_tokens"] + second["computed_tokens"] == second["prompt_tokens"]
        assert second["encoder"]["rows"] == second["replayed_tokens"] + second["computed_tokens"]
        listed = http.get("/kvist/live").json()["data"]
        assert [item["request_id"] for item in listed[:2]] == [second["request_id"][5:], first["request_id"][5:]]


def test_figures_of_a_running_request(server: Process) -> None:
    """While it decodes: its state, tokens that grow, its pages and windows on the device; a look at what has come already."""
    body = {"model": "nano", "prompt": "PRIVATEWORDS " + book_text()[:900], "max_tokens": 400, "logit_bias": {"1": -100}}
    with client(server) as http, client(server) as other:
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers={"x-request-id": "page-x"}) as stream:
            assert stream.status_code == 200
            wait_until(lambda: other.get("/kvist/live/page-x").json()["output_tokens"] > 0, 60)
            first = other.get("/kvist/live/page-x").json()
            assert first["state"] == "decode"
            assert first["finish_reason"] is None
            assert 0 < first["output_tokens"] < 400
            pages = -(-(first["prompt_tokens"] + first["output_tokens"]) // 128)
            assert first["cache_bytes_by_tier"]["device"] > pages * 128 * 140, "pages, windows and unfinished groups"
            assert first["cache_bytes_per_token"]["window"] > 0
            seen = look(other, "cmpl-page-x", first["output_tokens"] - 1)
            assert seen.status_code == 200, seen.text
            wait_until(lambda: other.get("/kvist/live/page-x").json()["output_tokens"] > first["output_tokens"], 60)
        wait_until(lambda: other.get("/kvist/live/page-x").json()["state"] == "finished")
        last = other.get("/kvist/live/page-x").json()
        assert last["finish_reason"] in ("cancelled", "length")
        assert last["queue_seconds"] >= 0
        assert last["decode_tokens_per_s"] > 0


def test_captures_of_a_served_reply(server: Process) -> None:
    """Every token: the capture's own likeliest token is the greedy one served, with its log-probability; masses add up."""
    with client(server) as http:
        answer = ask(http, book_text()[:2500], max_tokens=8)
        said = answer["choices"][0]["logprobs"]
        for token in (0, 3, 7):
            seen = look(http, answer["id"], token).json()
            assert seen["output"]["rank"] == 0
            assert seen["output"]["text"] == said["tokens"][token]
            assert seen["output"]["logprob"] == pytest.approx(said["token_logprobs"][token], abs=1e-5)
            assert seen["position"] == seen["prompt_tokens"] + token - 1 == len(seen["tokens"]) - 1
            assert len(seen["layers"]) == 12
            for layer in seen["layers"]:
                assert layer["window_mass"] + layer["row_mass"] + layer["sink_mass"] == pytest.approx(1, abs=1e-3)
                assert sum(mass for _, mass in layer["window_positions"]) == pytest.approx(layer["window_mass"], abs=1e-6)
                assert sum(mass for *_, mass in layer["rows"]) == pytest.approx(layer["row_mass"], abs=1e-6)
                assert len(layer["experts"]) == 4


def test_captures_change_no_served_token(server: Process) -> None:
    """Deterministic mode: replies with looks running beside them have the bits of replies without, log-probabilities included."""
    prompts = [book_text()[start : start + 1500] for start in (9_000, 20_000)]
    with client(server) as http, client(server) as looking:
        fields = {"max_tokens": 16, "temperature": 0.9, "seed": 7}
        alone = [ask(http, prompt, **fields)["choices"] for prompt in prompts]
        target = ask(http, book_text()[:2500], max_tokens=4)["id"]
        stop, looks = threading.Event(), []

        def keep_looking() -> None:
            while not stop.is_set():
                looks.append(look(looking, target, len(looks) % 4).status_code)

        watcher = threading.Thread(target=keep_looking)
        watcher.start()
        try:
            end = time.monotonic() + 120
            while len(looks) < 2:
                assert time.monotonic() < end, "no look ended"
                assert [ask(http, prompt, **fields)["choices"] for prompt in prompts] == alone
            fresh = ask(http, "PRIVATEWORDS " + prompts[0], **fields)["choices"]
        finally:
            stop.set()
            watcher.join(60)
        assert ask(http, "PRIVATEWORDS " + prompts[0], **fields)["choices"] == fresh
        assert set(looks) == {200}


@pytest.mark.long
def test_a_look_at_16k(server: Process) -> None:
    """Prints how long a look at a position of a 16,000-token prompt takes, and what serving beside it costs."""
    with client(server) as http:
        text = (book_text() * 3)[:60_000]
        ids = [0, *TOKENIZER.encode(text)][:16_000]
        assert len(ids) == 16_000
        answer = ask(http, ids, max_tokens=4)  # type: ignore[arg-type]
        seen = look(http, answer["id"], 3).json()
        print(f"\n{os.cpu_count()} cores: a look at position {seen['position']} took {seen['seconds']:.1f} s", end=" ")
        quiet = _decode_rate(http)
        with ThreadPoolExecutor(1) as pool, client(server) as other:
            running = pool.submit(look, other, answer["id"], 3)
            time.sleep(1)
            beside = _decode_rate(http)
            assert running.result().json()["output"] == seen["output"]
        print(f"decode {quiet:.0f} tokens/s alone, {beside:.0f} beside a look")
        assert seen["seconds"] < 300


def _decode_rate(http: httpx.Client) -> float:
    number = ask(http, "It was a dark night and", max_tokens=100, logit_bias={"1": -100})["id"]
    rate: float = http.get(f"/kvist/live/{number}").json()["decode_tokens_per_s"]
    return rate


def test_nothing_is_logged_of_a_look(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with microscope(FakeMicroscope(), api_keys=[KEY]) as live, live.http() as http:
        number = complete(live, KEY, extra_headers={"x-request-id": "PRIVATEID"})
        http.post("/kvist/microscope", json={"request_id": number, "token": 0}, headers={"x-api-key": KEY})
        http.get(f"/kvist/live/{number}", headers={"x-api-key": KEY})
    ours = [record for record in caplog.records if record.name.startswith(("kvist", "uvicorn", "fastapi", "starlette"))]
    lines = [f"{record.getMessage()} {getattr(record, 'fields', '')} {record.exc_text}" for record in ours]
    looks = [line for line in lines if "/kvist/" in line]
    assert len(looks) == 2
    for secret in (KEY, "PRIVATEWORDS", "one two"):
        assert not any(secret in line for line in lines)
