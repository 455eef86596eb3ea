"""`kvist serve nano` as a process of its own, driven by the official clients: text, scores, grammars, cancel, SIGTERM, kill -9.

What the model says is not judged here, only that every way of asking says the same and that constraints hold.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from kvist.engine.terminal import book_text
from tests.server_fakes import NANO, TOKENIZER

KEY = "kv-process-key-0123456789"
OFF = {"thinking": {"type": "disabled"}}
CITY = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "weather of a city", "parameters": SCHEMA}}]
ASK = [{"role": "user", "content": "PRIVATEWORDS how is the weather?"}]


class Process:
    """A server process; its log lines are read as they come."""

    def __init__(self, cache: Path, *flags: str) -> None:
        environment = {**os.environ, "KVIST_SERVE_API_KEYS": json.dumps([KEY]), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "kvist",
            "serve",
            str(NANO),
            "--port",
            "0",
            "--memory",
            "200MB",
            "--cache-dir",
            str(cache),
        ]
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        ready: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                if '"ready"' in line:
                    ready.put(json.loads(line)["address"])
            ready.put("")

        self.reader = threading.Thread(target=read, daemon=True)  # a failed test must not keep pytest from ending
        self.reader.start()
        self.url = ready.get(timeout=90)
        assert self.url, "".join(self.lines)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def figure(self, name: str) -> float:
        """One figure of /metrics."""
        text = httpx.get(f"{self.url}/metrics", headers={"x-api-key": KEY}).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return float(found[1])

    def end(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        self.process.send_signal(sig)
        status = self.process.wait(60)
        self.reader.join(10)
        return status


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("pages"), "--keepalive-s", "0.2", "--headers-after-s", "0.1")
    yield process
    status = process.end()
    log = "".join(process.lines)
    assert status == 0, log
    for secret in (KEY, "PRIVATEWORDS", "Anne Elliot"):
        assert secret not in log, "a key or a prompt was logged"
    assert '"level": "error"' not in log, log


def test_ways_of_asking_agree(server: Process) -> None:
    """Greedy text: whole, streamed, in a batch, after a prefix hit; echo's scores equal the reply's log-probabilities."""
    client, prompt = server.openai(), "It was a dark night and"
    fields = {"model": "nano", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**fields)
    again = client.completions.create(**fields)
    streamed = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].text
    assert again.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text
    assert streamed[-1].usage is not None
    assert whole.usage is not None
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    pair = client.completions.create(**{**fields, "prompt": [prompt, "Another"]})
    assert pair.choices[0].text == text
    said = whole.choices[0].logprobs
    assert said is not None
    spelled = {TOKENIZER.token_bytes(token).decode("utf-8", "replace"): token for token in range(len(TOKENIZER))}
    ids = [0, *TOKENIZER.encode(prompt), *(spelled[token] for token in said.tokens or ())]
    scored = client.completions.create(model="nano", prompt=ids, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == prompt + text
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    scores = scored.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[-12:] == pytest.approx(said.token_logprobs, abs=2e-2)
    assert None not in scores.token_logprobs, "the begin token precedes the first"


def test_seeds(server: Process) -> None:
    client = server.openai()

    def say(seed: int | None) -> str:
        return client.completions.create(model="nano", prompt="The", max_tokens=12, seed=seed).choices[0].text

    assert say(3) == say(3)
    assert len({say(None) for _ in range(4)}) > 1, "without a seed every request draws its own"
    copies = client.completions.create(model="nano", prompt="The", max_tokens=12, seed=3, n=3).choices
    assert copies[0].text == say(3)
    assert len({choice.text for choice in copies}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_by_grammar(server: Process, stream: bool) -> None:
    """A base model calls tools by their schema when it must; deltas add up to the same."""
    client = server.openai()
    fields = {"model": "nano", "messages": ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"max_tokens": 120, "seed": 1, "extra_body": OFF}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            choice = events.until_done().get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in CITY["enum"]
    assert 1 <= arguments["days"] <= 9
    assert not choice.message.content


def test_reasoning_then_a_call_by_grammar(server: Process) -> None:
    """With thinking the grammar lets reasoning come first; a bias makes this base model end it at once."""
    answer = server.openai().chat.completions.create(
        model="nano",
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
        reasoning_effort="low",
        max_tokens=120,
        logit_bias={"9": 100},
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["get_weather"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1


def test_formats(server: Process) -> None:
    client = server.openai()
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    for extra in (OFF, {}):
        answer = client.chat.completions.create(
            model="nano", messages=ASK, response_format=schema, max_tokens=200, logit_bias={"9": 100}, seed=1, extra_body=extra
        )
        value = json.loads(answer.choices[0].message.content or "")
        assert set(value) == {"city", "days"}
    regex = {"type": "regex", "regex": "[ab]{3}/(x|y)"}
    answer = client.chat.completions.create(
        model="nano", messages=ASK, max_tokens=20, extra_body={**OFF, "response_format": regex}
    )
    assert re.fullmatch(regex["regex"], answer.choices[0].message.content or "")
    lark = {"type": "grammar", "grammar": 'start: "yes" | "no"'}
    answer = client.chat.completions.create(
        model="nano", messages=ASK, max_tokens=20, extra_body={**OFF, "response_format": lark}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="nano", messages=ASK, extra_body={**OFF, "response_format": {"type": "regex", "regex": "(a"}}
        )
    assert caught.value.code == "invalid_grammar"
    response = client.responses.create(
        model="nano",
        input="trip?",
        max_output_tokens=200,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}},
    )
    assert set(json.loads(response.output_text)) == {"city", "days"}


def test_unlike_requests_side_by_side(server: Process) -> None:
    """SRV-07: a biased request beside a plain one; each is what it is alone."""
    client = server.openai()
    plain = {"model": "nano", "prompt": "Once upon a time there was", "max_tokens": 16, "temperature": 0}
    biased = {**plain, "logit_bias": {"500": 100}, "logprobs": 0}
    alone = client.completions.create(**plain).choices[0].text
    results: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda: results.update(plain=client.completions.create(**plain))),
        threading.Thread(target=lambda: results.update(biased=client.completions.create(**biased))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results["plain"].choices[0].text == alone  # type: ignore[attr-defined]
    tokens = results["biased"].choices[0].logprobs.tokens  # type: ignore[attr-defined]
    assert len(tokens) == 16
    assert len(set(tokens)) == 1


def test_anthropic(server: Process) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model="nano", max_tokens=120, messages=ASK, tools=tools, tool_choice=choice, thinking={"type": "disabled"}
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].input["city"] in CITY["enum"]
    counted = client.messages.count_tokens(model="nano", messages=ASK, tools=tools, thinking={"type": "disabled"})
    assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_every_endpoint_by_its_client(server: Process) -> None:
    """Whole and streamed, the official clients get the same greedy text from each API, and read what is served."""
    client = server.openai()
    anthropic_client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == anthropic_client.models.retrieve("nano").id == "nano"
    chat = {"model": "nano", "messages": ASK, "max_tokens": 10, "temperature": 0, "extra_body": OFF}
    said = client.chat.completions.create(**chat).choices[0].message.content
    assert said
    chunks = client.chat.completions.create(**chat, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    asked = {"model": "nano", "input": ASK, "max_output_tokens": 10, "temperature": 0, "reasoning": {"effort": "none"}}
    assert client.responses.create(**asked).output_text == said
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    assert events[-1].type == "response.incomplete", "ten tokens cut it"
    message = {"model": "nano", "messages": ASK, "max_tokens": 10, "thinking": {"type": "disabled"}}
    message |= {"extra_body": {"temperature": 0}}  # the client has no argument for it any more
    assert anthropic_client.messages.create(**message).content[0].text == said
    with anthropic_client.messages.stream(**message) as message_stream:
        assert message_stream.get_final_text() == said
    ids = httpx.post(f"{server.url}/tokenize", json={"messages": ASK, **OFF}, headers={"x-api-key": KEY}).json()["tokens"]
    assert (
        len(ids) == anthropic_client.messages.count_tokens(model="nano", messages=ASK, thinking={"type": "disabled"}).input_tokens
    )


def test_choices_and_effort(server: Process) -> None:
    """`n` whole and streamed agree choice by choice; efforts 1 and 100 are accepted, 0 and 101 named as wrong."""
    client = server.openai()
    fields = {"model": "nano", "messages": ASK, "max_tokens": 6, "n": 3, "seed": 5, "extra_body": OFF}
    whole = [choice.message.content for choice in client.chat.completions.create(**fields).choices]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == whole
    for effort in (1, 100, "low", "max"):
        answer = client.chat.completions.create(model="nano", messages=ASK, max_tokens=2, extra_body={"reasoning_effort": effort})
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    for effort in (0, 101):
        with pytest.raises(openai.BadRequestError, match="1 to 100"):
            client.chat.completions.create(model="nano", messages=ASK, max_tokens=2, extra_body={"reasoning_effort": effort})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_keepalive_while_a_long_prompt_is_read(server: Process, path: str) -> None:
    """SRV-13 with the real engine: headers and comments come while thousands of tokens are read; then the text does."""
    text = f"{path} {book_text()[:15_000]}"
    inputs = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text, "max_output_tokens": 2}}
    body = inputs.get(path, {"messages": [{"role": "user", "content": text}]})
    limit = {} if path == "/v1/responses" else {"max_tokens": 2}
    began, headers_s, comments, events = time.monotonic(), 0.0, 0, 0
    with httpx.stream(
        "POST",
        server.url + path,
        json={"model": "nano", "stream": True, **body, **limit},
        headers={"x-api-key": KEY},
        timeout=120,
    ) as answer:
        assert answer.status_code == 200
        headers_s = time.monotonic() - began
        for line in answer.iter_lines():
            comments += line.startswith(":") and not events
            events += line.startswith("data:")
    whole_s = time.monotonic() - began
    assert comments >= 2, "nothing kept the connection alive"
    assert events >= 1
    assert headers_s < whole_s / 2


def test_names_and_keys_at_the_door(server: Process) -> None:
    """A rebound name and a foreign page are refused; a key that somebody puts into a path or a query reaches no log."""
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": KEY, **headers}).status_code == 403
    for key in (KEY, "kv-wrong"):
        answer = httpx.get(f"{server.url}/v1/{KEY}", params={"key": KEY}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == (404 if key == KEY else 401)
        assert KEY not in answer.text
    bad = httpx.post(f"{server.url}/v1/completions", json={"model": KEY, "prompt": "x"}, headers={"x-api-key": KEY})
    assert bad.status_code == 404


def test_leaving_frees_everything(server: Process) -> None:
    """SRV-05 with a real engine: streams closed in the middle; nothing runs afterwards, pages come back."""
    client, prompt = server.openai(), book_text()[:2000]
    for _ in range(3):
        stream = client.completions.create(model="nano", prompt=prompt, max_tokens=3000, stream=True, temperature=0)
        next(iter(stream))
        stream.close()
    end = time.monotonic() + 10
    while server.figure("kvist_requests_running") or server.figure("kvist_server_running"):
        assert time.monotonic() < end, "a request that was left runs on"
        time.sleep(0.05)
    assert server.figure("kvist_pages_owned") == 0
    answer = client.completions.create(model="nano", prompt=prompt, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100, "what was computed for those who left is a prefix hit"


Said = tuple[list[threading.Thread], list[list[str]], list[Exception]]


def streams_that_have_begun(server: Process, prompts: list[str]) -> Said:
    """Greedy streams of all prompts at once: their threads, what comes of each, how they fail."""
    said: list[list[str]] = [[] for _ in prompts]
    failures: list[Exception] = []

    def stream(number: int) -> None:
        fields = {"model": "nano", "prompt": prompts[number], "max_tokens": 3000, "temperature": 0, "stream": True}
        try:
            for chunk in server.openai().completions.create(**fields):
                said[number].append(chunk.choices[0].text)
        except (openai.APIError, httpx.HTTPError) as error:
            failures.append(error)

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while not all(len(pieces) > 2 for pieces in said):
        assert time.monotonic() < end, "a stream did not begin"
        time.sleep(0.01)
    return threads, said, failures


def test_killed_and_restarted(tmp_path: Path) -> None:
    """kill -9 under load: every client gets an error, a new process finds the prefix on disk, and no token was or is wrong.

    Deterministic with exact replay, where that is a promise; bounded replay is an approximation whose text may differ.
    """
    exact = ("--replay", "exact", "--deterministic")
    fields = {"model": "nano", "prompt": book_text()[:3000], "max_tokens": 8, "temperature": 0}
    first = Process(tmp_path / "pages", *exact)
    before = first.openai().completions.create(**fields)
    end = time.monotonic() + 20
    while first.figure("kvist_tier_written") < 3:
        assert time.monotonic() < end, "no page reached the disk"
        time.sleep(0.1)
    prompts = [f"{number}. {book_text()[500 * number :][:300]}" for number in range(6)]
    threads, said, failures = streams_that_have_begun(first, [book_text()[:3000], *prompts])
    first.end(signal.SIGKILL)
    for thread in threads:
        thread.join(10)
    assert len(failures) == len(threads), "a stream that was cut looks whole"
    for error in failures:
        assert re.search("(?i)peer|connect|closed|incomplete", str(error)), error
    second = Process(tmp_path / "pages", *exact)
    after = second.openai().completions.create(**fields)
    assert after.choices[0].text == before.choices[0].text
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) > 100
    assert second.figure("kvist_tier_prefetched") + second.figure("kvist_tier_disk_hits") > 0, "nothing was read from disk"
    for prompt, pieces in zip([book_text()[:3000], *prompts], said, strict=True):
        whole = second.openai().completions.create(**{**fields, "prompt": prompt, "max_tokens": 24}).choices[0].text
        came = "".join(pieces)[: len(whole)].rstrip("\ufffd")
        assert came
        assert whole.startswith(came), "what a killed stream had said is not what the model says"
    # SIGTERM lets a running stream end before the process does.
    long = second.openai().completions.create(**{**fields, "max_tokens": 60}, stream=True)
    chunks = iter(long)
    next(chunks)
    second.process.send_signal(signal.SIGTERM)
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason == "length"
    assert second.process.wait(30) == 0
    second.reader.join(10)
    assert any('"drained"' in line and '"all_ended": true' in line for line in second.lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "abc"], "setting port"),
        (["--host", "0.0.0.0"], "reachable from outside"),
        (["--memory", "1MB"], "give at least"),
        (["--config", "/no/such/file.toml"], "is no file"),
    ],
)
def test_what_cannot_start_says_why(tmp_path: Path, flags: list[str], words: str) -> None:
    command = [sys.executable, "-m", "kvist", "serve", str(NANO), "--cache-dir", str(tmp_path), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "kvist", "serve", str(NANO), "--cache-dir", str(tmp_path), "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 2
    assert f"127.0.0.1:{port}: Address already in use" in result.stderr
    assert "loading" not in result.stderr, "that is found out before the model is read"
    assert "Traceback" not in result.stderr
