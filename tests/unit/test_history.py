"""What is kept of requests: a key's own only, so many and in so many bytes, never a running one's end, nothing when it is off."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from kvist.engine.request import ImageInput
from kvist.server.errors import ApiError
from kvist.server.history import DIGEST_BYTES, RECORD_BYTES, History, Record, Trace


def trace(tokens: int = 10) -> Trace:
    return Trace(prompt=array("i", range(tokens)))


def keep(history: History, number: str, tenant: str = "a", tokens: int = 10) -> Record:
    record = history.begin(tenant, number, [trace(tokens)])
    history.end(tenant, record)
    return record


def numbers(history: History, tenant: str = "a") -> list[str]:
    return [record.number for record in history.recent(tenant)]


def test_a_key_sees_its_own_only() -> None:
    history = History(requests=4, limit_bytes=10**6)
    mine, theirs = keep(history, "x", "a"), keep(history, "x", "b")
    assert history.find("a", ["x"]) is mine
    assert history.find("b", ["x"]) is theirs
    keep(history, "y", "b")
    assert numbers(history, "a") == ["x"]
    for tenant in ("a", "", "c"):
        with pytest.raises(ApiError, match="no recent request 'y' of this key; the last 4") as caught:
            history.find(tenant, ["y", "also-y"])
        assert (caught.value.status, caught.value.code) == (404, "request_not_found")
    assert history.recent("c") == []


def test_the_oldest_ended_ones_give_way() -> None:
    history = History(requests=2, limit_bytes=10**6)
    for number in "abc":
        keep(history, number)
    keep(history, "other", "b")
    assert numbers(history) == ["c", "b"], "another key's requests cost a key nothing"
    running = history.begin("a", "running", [trace()])
    for number in "defg":
        keep(history, number)
    assert numbers(history) == ["g", "f", "running"], "what runs is not counted and never given up"
    history.end("a", running)
    assert numbers(history) == ["g", "f"]
    assert running.traces[0].over


def test_bytes() -> None:
    each = RECORD_BYTES + 4 * 1000
    history = History(requests=100, limit_bytes=3 * each)
    for number in range(5):
        keep(history, str(number), tokens=1000)
    assert numbers(history) == ["4", "3", "2"]
    assert history.nbytes == 3 * each
    keep(history, "huge", tokens=10_000)
    assert numbers(history) == [], "one that is larger than the budget is not kept, and what was before it is older"
    assert history.nbytes == 0


def test_what_counts() -> None:
    """Copies share their prompt; pictures count once, by what can be looked at again; reply tokens and page names count."""
    history = History(requests=9, limit_bytes=10**9, image_token_bytes=1000)
    prompt = array("i", range(50))
    image = ImageInput(start=3, tokens=7, content=b"c" * 32, embed=lambda: None)
    traces = [Trace(prompt=prompt, images=(image, replace(image, start=20))) for _ in range(3)]
    record = history.begin("a", "n", traces)
    traces[1].tokens.extend(range(20))
    traces[2].progress.digests.extend([b"d" * 16] * 5)
    history.end("a", record)
    assert record.nbytes == 4 * 50 + 7 * 1000 + 3 * RECORD_BYTES + 4 * 20 + 5 * DIGEST_BYTES


def test_an_id_used_again() -> None:
    """The newer request takes the place; the older one's end changes nothing of it."""
    history = History(requests=4, limit_bytes=10**6)
    old = history.begin("a", "same", [trace()])
    new = history.begin("a", "same", [trace()])
    history.end("a", old)
    assert history.find("a", ["same"]) is new
    assert new.running
    history.end("a", new)
    assert numbers(history) == ["same"]


def test_switched_off() -> None:
    history = History(requests=0, limit_bytes=10**6)
    record = history.begin("a", "x", [trace()])
    assert numbers(history) == []
    history.end("a", record)
    with pytest.raises(ApiError, match="history_requests is 0"):
        history.find("a", ["x"])
    assert history.nbytes == 0
