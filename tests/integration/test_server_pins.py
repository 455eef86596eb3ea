"""Pinned prefixes: held under pressure, bounded, for operators only, a copy a key, and there again after kill -9."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.pins import EnginePins
from kvist.engine.terminal import book_text
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.server.errors import ApiError
from kvist.server.protocol.pins import setting_pin
from kvist.server.served import Served
from tests.integration.test_server_guards import wait_until
from tests.integration.test_server_process import KEY, Process
from tests.server_fakes import END_ID, TOKENIZER, Live, says, serving

ADMIN = "kv-admin-key-0123456789"
ONE, OTHER = "kv-key-one-0123456789", "kv-key-other-0123456789"
PAGES, PAGE_TOKENS, CONTEXT = 48, 16, 256
WORDS = book_text().split()
PICTURE = {"type": "file", "file": {"file_id": "file-0"}}
PREFIX = " ".join(WORDS[:60])


def pinning(share: float = 0.9, folder: Path | None = None) -> Served:
    """A small random model whose cache holds 48 pages, 16 of them for its longest request."""
    config = replace(preset("tiny"), vocab_size=len(TOKENIZER))
    settings = EngineConfig(pages=PAGES, page_tokens=PAGE_TOKENS, context=CONTEXT, max_running=2)
    engine = AsyncEngine(Engine(random_model(config, Numerics(), 0), settings, tokenizer=TOKENIZER))
    return Served(
        name="tiny",
        engine=engine,
        tokenizer=TOKENIZER,
        context=engine.engine.plan.context,
        vocab_size=config.vocab_size,
        bos_id=0,
        eos_id=END_ID,
        created=0,
        pins=EnginePins(engine, share, folder),
    )


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(pinning(), admin_keys=[ADMIN]) as server:
        yield server


def call(live: Live, method: str, path: str = "", key: str | None = ADMIN, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"x-api-key": key}
    return httpx.request(method, f"{live.url}/kvist/pins{path}", headers=headers, json=body or None, timeout=60)


def cached(live: Live, prompt: str, key: str = "none") -> int:
    answer = live.openai(key).completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def flood(live: Live, key: str = "none") -> None:
    """More other text than the cache holds."""
    for number in range(8):
        cached(live, f"{number} " + " ".join(WORDS[500 + 90 * number : 590 + 90 * number]), key)


def test_a_pinned_prefix_stays(live: Live) -> None:
    """Under pressure the pinned prefix is a hit, tail included, and an equal one without a pin is not; unpinned it goes."""
    made = call(live, "POST", name="manual", prompt=PREFIX)
    assert made.status_code == 200, made.text
    pin = made.json()
    assert (pin["name"], pin["copies"], pin["cached_tokens"], pin["source"]) == ("manual", 1, 0, "api")
    assert pin["tokens"] == 1 + len(TOKENIZER.encode(PREFIX))
    again = call(live, "POST", name="manual", prompt=PREFIX).json()
    assert again == pin, "pinning the same again changes nothing"
    other = " ".join(WORDS[100:160])
    cached(live, other)
    flood(live)
    assert cached(live, other) == 0
    assert cached(live, f"{PREFIX} and more") >= pin["tokens"] - PAGE_TOKENS
    listed = call(live, "GET").json()
    assert [entry["name"] for entry in listed["data"]] == ["manual"]
    assert listed["pages"] == pin["pages"] == -(-pin["tokens"] // PAGE_TOKENS)
    figures = httpx.get(f"{live.url}/metrics").text
    assert f"kvist_server_pinned_pages {float(pin['pages'])}" in figures
    assert "kvist_server_pins 1.0" in figures
    assert call(live, "DELETE", "/manual").json()["deleted"]
    flood(live)
    assert cached(live, PREFIX) == 0
    assert call(live, "GET").json()["pages"] == 0
    missing = call(live, "DELETE", "/manual")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "pin_not_found")


def test_the_bound(live: Live) -> None:
    """Pins never take the pages of the longest request, whatever the share; that request runs beside them."""
    limit = call(live, "GET").json()["limit_pages"]
    assert limit == PAGES - CONTEXT // PAGE_TOKENS
    names = []
    for number in range(20):
        text = " ".join(WORDS[100 * number : 100 * number + 60])
        answer = call(live, "POST", name=f"p{number}", prompt=text)
        if answer.status_code != 200:
            break
        names.append(f"p{number}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "pins_full")
    assert names
    assert call(live, "GET").json()["pages"] <= limit
    ids = [5 + number % 100 for number in range(CONTEXT - 8)]
    whole = live.openai().completions.create(model="tiny", prompt=ids, max_tokens=8)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == CONTEXT - 8
    call(live, "DELETE", f"/{names[0]}")
    assert call(live, "POST", name="again", prompt=text).status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "../x", "prompt": "a"}, "invalid_value"),
        ({"name": "", "prompt": "a"}, "invalid_value"),
        ({"name": "x" * 65, "prompt": "a"}, "invalid_value"),
        ({"name": "x"}, "invalid_value"),
        ({"name": "x", "prompt": "a", "messages": []}, "invalid_value"),
        ({"name": "x", "prompt": "word " * 2000}, "context_length_exceeded"),
        ({"name": "x", "prompt": "a", "model": "other"}, "model_not_found"),
        ({"name": "x", "prompt": "a", "ids": [1]}, "unsupported_field"),
        ({"prompt": "a"}, "invalid_value"),
        ({"name": "x", "messages": [{"role": "user", "content": [PICTURE]}]}, "file_not_found"),
    ],
)
def test_refusals(live: Live, body: dict[str, Any], code: str) -> None:
    answer = call(live, "POST", **body)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"] == code
    assert call(live, "GET").json()["data"] == []


def test_a_name_means_one_prefix(live: Live) -> None:
    call(live, "POST", name="x", prompt="some text")
    answer = call(live, "POST", name="x", prompt="another text")
    assert answer.status_code == 400
    assert "delete it first" in answer.json()["error"]["message"]


def test_operators_only() -> None:
    """An ordinary key is not enough, a wrong one is wrong; without admin keys nobody may; the admin key opens nothing else."""
    with serving(pinning(), admin_keys=[ADMIN], api_keys=[ONE]) as live:
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/x")):
            for key in (None, ONE, "kv-wrong"):
                assert call(live, method, path, key).status_code == 401, (method, key)
        assert httpx.get(f"{live.url}/v1/models", headers={"x-api-key": ADMIN}).status_code == 401
        assert call(live, "GET").status_code == 200
    with serving(pinning()) as live:
        answer = call(live, "GET")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_only")
    with serving(says("hi"), admin_keys=[ADMIN]) as live:
        assert call(live, "GET").status_code == 404, "a scripted engine cannot pin"


def test_keys_that_are_kept_apart_get_copies() -> None:
    with serving(pinning(), admin_keys=[ADMIN], api_keys=[ONE, OTHER]) as live:
        pin = call(live, "POST", name="both", prompt=PREFIX).json()
        assert pin["copies"] == 2
        assert call(live, "GET").json()["pages"] == pin["pages"]
        flood(live, ONE)
        for key in (ONE, OTHER):
            assert cached(live, PREFIX, key) > 0
    with serving(pinning(), admin_keys=[ADMIN], api_keys=[ONE, OTHER], isolate_keys=False) as live:
        assert call(live, "POST", name="one", prompt=PREFIX).json()["copies"] == 1
        assert cached(live, PREFIX, OTHER) > 0


def test_a_chat_s_beginning(live: Live) -> None:
    """Messages are encoded as the chat route does: a conversation that begins with them is a hit."""
    system = {"role": "system", "content": " ".join(WORDS[:80])}
    call(live, "POST", name="system", messages=[system])
    flood(live)
    answer = live.openai().chat.completions.create(
        model="tiny", messages=[system, {"role": "user", "content": "hello"}], max_tokens=1
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 80


def test_pins_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "man ual.txt").write_text("a file's text")
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "system", "content": "be kind"}]}))
    assert setting_pin("plain text", 0).prompt == "plain text"
    named = setting_pin(f"@{tmp_path / 'man ual.txt'}", 1)
    assert (named.name, named.prompt) == ("man-ual-1", "a file's text")
    chat = setting_pin(f"@{tmp_path / 'chat.json'}", 2)
    assert chat.messages is not None
    assert chat.messages[0].content == "be kind"
    (tmp_path / "bad.json").write_text('{"messages": 5}')
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for name, words in (("bad.json", "messages"), ("bad.txt", "UTF-8")):
        with pytest.raises(ValueError, match=words):
            setting_pin(f"@{tmp_path / name}", 3)
    with pytest.raises(OSError):
        setting_pin(f"@{tmp_path / 'none.txt'}", 4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"pins": 5}',
        '{"format": 1, "pins": [{"name": "x", "ids": ["a"]}]}',
        '{"format": 9, "pins": []}',
        "[" * 50_000,
    ],
)
def test_a_damaged_list_is_named(tmp_path: Path, text: str) -> None:
    """The list of an earlier process is not believed: what is wrong with it is said, with the way out."""
    with serving(pinning(folder=tmp_path), admin_keys=[ADMIN]) as live:
        (tmp_path / "pins.json").write_text(text)
        assert live.service.pinner is not None
        with pytest.raises(ValueError, match="delete it"):
            live.service.pinner._saved()
        assert call(live, "POST", name="fresh", prompt="text").status_code == 200
        assert [name for name, _ in live.service.pinner._saved()] == ["fresh"]
        assert (tmp_path / "pins.json").stat().st_mode & 0o777 == 0o600


def test_a_list_is_taken_over(tmp_path: Path) -> None:
    """What an earlier process had pinned is pinned again, whatever is wrong with the settings; until then it stays listed."""
    ids = [0, *TOKENIZER.encode(PREFIX)]
    too_long = [5] * (CONTEXT * 2)
    listed = [{"name": "old", "ids": ids}, {"name": "long", "ids": too_long}]
    (tmp_path / "pins.json").write_text(json.dumps({"format": 1, "pins": listed}))
    with serving(pinning(folder=tmp_path), admin_keys=[ADMIN]) as live:
        pinner = live.service.pinner
        assert pinner is not None
        assert call(live, "POST", name="new", prompt="text").status_code == 200
        assert {name for name, _ in pinner._saved()} == {"old", "long", "new"}, "nothing is lost before it is pinned again"

        async def broken() -> list[tuple[str, list[int]]]:
            raise ValueError("a file that is not there")

        async def keep() -> None:
            keeping = asyncio.ensure_future(pinner.keep(broken))
            async with asyncio.timeout(30):
                while len(pinner.pins) < 2:
                    await asyncio.sleep(0.02)
            keeping.cancel()
            await asyncio.wait((keeping,))

        asyncio.run(keep())
        assert [pin["name"] for pin in call(live, "GET").json()["data"]] == ["new", "old"]
        assert call(live, "DELETE", "/long").status_code == 200, "what could not be pinned can be taken off the list"
        assert {name for name, _ in pinner._saved()} == {"old", "new"}


def test_a_prefix_that_does_not_stay_is_not_pinned(live: Live) -> None:
    """Pages that are gone before they can be held: an error, nothing half held."""
    assert live.service.pinner is not None
    holder = live.service.pinner._holder
    hold = holder.hold

    async def late(ids: list[int], salt: bytes) -> Any:
        return await hold(ids[: PAGE_TOKENS + 1], salt)

    holder.hold = late  # type: ignore[method-assign,assignment]
    answer = call(live, "POST", name="x", prompt=PREFIX)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    assert call(live, "GET").json() == {"object": "list", "data": [], "pages": 0, "limit_pages": 32, "tokens": 0}


def test_pins_survive_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin over the API and one of the settings: after kill -9 both are pinned again from the disk, without computing."""
    monkeypatch.setenv("KVIST_SERVE_ADMIN_KEYS", json.dumps([ADMIN]))
    (tmp_path / "book.txt").write_text(book_text()[3000:6000])
    monkeypatch.setenv("KVIST_SERVE_PINS", json.dumps([f"@{tmp_path / 'book.txt'}"]))

    def pins(process: Process) -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{process.url}/kvist/pins", headers={"x-api-key": ADMIN}, timeout=30).json()
        return {pin["name"]: pin for pin in answer["data"]}

    first = Process(tmp_path / "pages")
    body = {"name": "manual", "prompt": book_text()[:3000]}
    made = httpx.post(f"{first.url}/kvist/pins", json=body, headers={"x-api-key": ADMIN}, timeout=60).json()
    assert made["cached_tokens"] == 0
    wait_until(lambda: len(pins(first)) == 2, 30)
    whole = sum(pin["tokens"] // 128 for pin in pins(first).values())
    wait_until(lambda: first.figure("kvist_tier_written") >= whole, 20)
    first.end(signal.SIGKILL)
    second = Process(tmp_path / "pages")
    wait_until(lambda: len(pins(second)) == 2, 30)
    for name, pin in pins(second).items():
        assert pin["cached_tokens"] >= pin["tokens"] - 128, name
        assert pin["source"] == ("api" if name == "manual" else "settings")
    assert second.figure("kvist_tier_disk_hits") > 0
    answer = second.openai().completions.create(model="nano", prompt=book_text()[:3000], max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= made["tokens"] - 128
    assert second.end() == 0
    log = "".join(first.lines + second.lines)
    assert KEY not in log
    assert ADMIN not in log
    assert "Elliot" not in log, "a pin's text was logged"


def test_pins_of_an_engine_without_room() -> None:
    """Where the longest request may take every page, nothing can be pinned, and that is said."""
    with pytest.raises(ValueError, match="share"):
        pinning(share=1.0)
    with serving(pinning(share=0.0), admin_keys=[ADMIN]) as live:
        answer = call(live, "POST", name="x", prompt="text")
        assert (answer.json()["error"]["code"], ApiError("pins_full", "").status) == ("pins_full", 400)
