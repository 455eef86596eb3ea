"""Pages that come back from lower tiers, in the same process and after a restart: same bits as a cold run in exact mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvist.cache.store import PageStore
from kvist.cache.store_errors import OtherModel
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.card.page_mover import PageMover
from kvist.engine.engine import Engine, store_model
from kvist.engine.gauges import gauges
from kvist.engine.page_bytes import CardPages
from kvist.engine.request import Request
from kvist.engine.sampler import SamplingParams
from kvist.page_layout import PageLayout
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Watched, judge
from tests.equivalence.replay_oracle import Oracle
from tests.equivalence.test_engine_replay import prompt_of, span_of

SIZE = 4


@pytest.fixture(autouse=True, params=["in place", "by runs"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages written where they lie, and moved as a card's are: through places that the tiers keep them in."""
    if request.param == "by runs":
        monkeypatch.setattr("kvist.engine.engine.page_bytes", CardPages.of)


def start(folder: Path, seed: int = 0, *, host_bytes: int = 0, pages: int = 60, replay: str = "exact", salt: int = 0) -> Watched:
    """An engine on a store in `folder`, for the model of this seed (whose fingerprint is just as made up)."""
    model = toy(seed, True)
    fingerprint = bytes([seed + 1, salt]) * 16
    store = PageStore.open(
        folder,
        model=store_model(model.numerics, fingerprint, SIZE),
        page_bytes=PageLayout.of(model.config, SIZE).page_bytes,
        page_tokens=SIZE,
        budget_bytes=4 << 20,
    )
    config = EngineConfig(pages=pages, page_tokens=SIZE, max_running=3, replay=replay, speculation=3, step_cost=24)
    return Watched(Engine(model, config, fingerprint=fingerprint, tiers=Tiers(host_bytes=host_bytes, store=store)))


def stop(watched: Watched) -> None:
    assert watched.engine.pages.tiers is not None
    assert watched.engine.pages.tiers.close()


def ask(watched: Watched, prompt: list[int], count: int = 6, seed: int = 5):  # type: ignore[no-untyped-def]
    sampling = SamplingParams(temperature=0.8, seed=seed)
    number = watched.add(Request(prompt=prompt, max_tokens=count, ignore_end=True, sampling=sampling))
    watched.finish()
    outcome = watched.outcomes[number]
    assert outcome.end is not None
    assert outcome.end.reason == "length", outcome.end
    return outcome


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_restored_from_disk_after_a_restart(tmp_path: Path, replay: str) -> None:
    model, trunk = toy(0, True), prompt_of(45)
    first = start(tmp_path, replay=replay)
    cold = ask(first, trunk)
    stop(first)
    second = start(tmp_path, replay=replay)
    again = ask(second, trunk)
    assert again.end.usage.cached == {"device": 0, "disk": 44}
    branch = ask(second, trunk[:30] + prompt_of(14, 9), seed=6)
    assert branch.end.usage.cached["device"] == 28
    stop(second)
    if replay == "exact":
        assert again.tokens == cold.tokens
        assert all(torch.equal(again.logits[p], cold.logits[p]) for p in range(45, 51))
        judge(model, branch)
        return
    _, cached = Oracle(model).logits(trunk, cold.tokens, span_of(model, cold), None)
    for outcome in (again, branch):
        expected, _ = Oracle(model).logits(list(outcome.request.prompt), outcome.tokens, span_of(model, outcome), cached)
        length = len(outcome.request.prompt)
        assert all(torch.equal(outcome.logits[length + i], row) for i, row in enumerate(expected))


def test_evicted_pages_come_back_from_host_memory(tmp_path: Path) -> None:
    """A pool too small for two conversations, and one between two turns of another."""
    model, trunk = toy(0, True), prompt_of(45)
    watched = start(tmp_path, host_bytes=1 << 20, pages=16)
    ask(watched, trunk)
    ask(watched, prompt_of(50, 3))
    back = ask(watched, [*trunk, 9, 8, 7])
    assert back.end.usage.cached.get("host", 0) >= 20
    assert back.end.usage.cached_tokens == 44
    judge(model, back)
    stop(watched)


def test_other_weights_and_other_settings_find_nothing(tmp_path: Path) -> None:
    """KVP-01: same folder layout, other weights, other fingerprint, other tenant: zero hits and their own output."""
    trunk = prompt_of(45)
    first = start(tmp_path / "a")
    ask(first, trunk)
    number = first.add(Request(prompt=trunk, max_tokens=2, salt=b"another tenant", ignore_end=True))
    first.finish()
    end = first.outcomes[number].end
    assert end is not None
    assert end.usage.cached_tokens == 0
    judge(toy(0, True), first.outcomes[number])
    stop(first)
    with pytest.raises(OtherModel):
        start(tmp_path / "a", seed=1)
    with pytest.raises(OtherModel):
        start(tmp_path / "a", salt=1)


def test_a_damaged_page_is_computed_again(tmp_path: Path) -> None:
    """KVP-09: every stored byte of one page file flipped: a miss, counted, and the answer of a cold run."""
    trunk = prompt_of(45)
    first = start(tmp_path)
    ask(first, trunk)
    stop(first)
    damaged = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 20_000]
    assert damaged
    for path in damaged:
        if "index" in path.name:
            continue
        content = bytearray(path.read_bytes())
        for at in range(8192, len(content), 97):
            content[at] ^= 0x40
        path.write_bytes(bytes(content))
    second = start(tmp_path)
    outcome = ask(second, trunk)
    judge(toy(0, True), outcome)
    assert outcome.end.usage.cached_tokens < 44
    tiers = second.engine.pages.tiers
    assert tiers is not None
    figures = gauges(second.engine)
    assert figures["store_corrupt"] >= 1, "by whoever came to it first: the reading ahead, or the request"
    assert figures["tier_misses"] == tiers.counters.misses
    assert figures["pages_free"] + figures["pages_owned"] + figures["pages_cached"] == figures["pages_total"]
    stop(second)


def test_a_store_needs_a_named_model(tmp_path: Path) -> None:
    model = toy(0, True)
    watched = start(tmp_path)
    config = EngineConfig(pages=60, page_tokens=SIZE)
    with pytest.raises(ValueError, match="fingerprint"):
        Engine(model, config, tiers=watched.engine.pages.tiers)
    with pytest.raises(ValueError, match="the page store is for model"):
        Engine(model, config, tiers=watched.engine.pages.tiers, fingerprint=bytes(32))
    stop(watched)


def test_an_engine_goes_on_where_no_more_memory_can_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that find no place are not kept below the device; every reply is what it was."""
    monkeypatch.setattr("kvist.engine.engine.page_bytes", CardPages.of)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    plenty = start(tmp_path / "plenty", host_bytes=1 << 20)
    want = [ask(plenty, prompt).tokens for prompt in prompts]
    stop(plenty)

    def full(mover: PageMover, nbytes: int) -> memoryview:
        raise MemoryError(f"no {nbytes} bytes to pin")

    monkeypatch.setattr(PageMover, "_piece", full)
    short = start(tmp_path / "short", host_bytes=1 << 20)
    assert [ask(short, prompt).tokens for prompt in prompts] == want
    assert short.engine.pages.tiers is not None
    assert short.engine.pages.tiers.counters.offered == 0
    stop(short)
    # Nor can what lies on a disk come back: it is computed again.
    again = start(tmp_path / "plenty", host_bytes=1 << 20)
    assert [ask(again, prompt).tokens for prompt in prompts] == want
    stop(again)
