"""A disk that takes its time keeps nobody waiting but the request that wants its pages: others go on decoding meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import store_model
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.page_layout import PageLayout
from tests.engine_fakes import MODEL, Scripted, follow
from tests.fault.faulty_files import FaultyFiles

SIZE, DELAY_S = 4, 0.3
PROMPT = [(7 * i) % 250 + 4 for i in range(41)]


def engine(folder: Path, disk: FaultyFiles, host_bytes: int = 0, patience_s: float | None = None) -> tuple[Scripted, Tiers]:
    store = PageStore.open(
        folder,
        model=store_model(MODEL.numerics, bytes(32), SIZE),
        page_bytes=PageLayout.of(MODEL.config, SIZE).page_bytes,
        page_tokens=SIZE,
        files=disk,
    )
    tiers = Tiers(host_bytes=host_bytes, store=store, read_timeout_s=patience_s)
    config = EngineConfig(pages=64, page_tokens=SIZE, max_running=3, speculation="off")
    return Scripted(config, tiers=tiers, fingerprint=bytes(32)), tiers


def ask(prompt: list[int], count: int) -> Request:
    return Request(prompt=prompt, max_tokens=count, ignore_end=True)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a store that holds the whole pages of PROMPT."""
    fake, tiers = engine(tmp_path, FaultyFiles())
    list(fake.engine.generate(ask(PROMPT, 1)))
    assert tiers.close()
    return tmp_path


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_who_decodes_does_not_wait_for_pages_of_others(stored: Path, host_bytes: int) -> None:
    fake, tiers = engine(stored, disk := FaultyFiles(), host_bytes)
    steady = fake.engine.add(ask([9, 8, 7], 100))
    fake.engine.step()
    disk.read_delay_s = DELAY_S
    restored = fake.engine.add(ask(PROMPT, 5))
    said: dict[int, list[int]] = {steady: [], restored: []}
    ends, longest, alone = {}, 0.0, 0
    while restored not in ends:
        began = time.perf_counter()
        events = fake.engine.step()
        longest = max(longest, time.perf_counter() - began)
        alone += not said[restored]
        for event in events:
            if isinstance(event, TokenEvent):
                said[event.id] += event.tokens
            else:
                ends[event.id] = event
        assert steady in ends or any(isinstance(event, TokenEvent) and event.id == steady for event in events)
        time.sleep(0.01)
    assert longest < DELAY_S / 2, f"a step took {longest:.2f} s"
    assert alone > 3, "tokens came while the disk was read"
    assert said[restored] == follow(PROMPT, 5)
    end = ends[restored]
    assert isinstance(end, FinishedEvent)
    assert end.usage.cached_tokens == 40
    assert end.usage.cached.get("host" if host_bytes else "disk") == 40
    assert tiers.counters.misses == tiers.counters.slow == 0
    fake.engine.abort(steady)
    assert tiers.close()


def test_a_request_that_is_alone_waits_for_its_pages(stored: Path) -> None:
    """Steps do not spin while there is nobody else to serve."""
    fake, tiers = engine(stored, FaultyFiles(read_delay_s=DELAY_S))
    steps = fake.engine.metrics.steps
    events = list(fake.engine.generate(ask(PROMPT, 3)))
    assert [token for event in events if isinstance(event, TokenEvent) for token in event.tokens] == follow(PROMPT, 3)
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage.cached == {"device": 0, "disk": 40}
    assert fake.engine.metrics.steps - steps == 3
    assert tiers.close()


def test_a_disk_that_hangs_is_given_up(stored: Path) -> None:
    """Nobody else is there to be served, and yet the engine does not stand still: the prompt is computed again, and counted."""
    fake, tiers = engine(stored, FaultyFiles(read_delay_s=2 * DELAY_S), patience_s=0.02)
    began = time.perf_counter()
    events = list(fake.engine.generate(ask(PROMPT, 3)))
    assert time.perf_counter() - began < DELAY_S
    assert [token for event in events if isinstance(event, TokenEvent) for token in event.tokens] == follow(PROMPT, 3)
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage.cached_tokens == 0
    assert tiers.counters.slow == 1
    assert tiers.close()


def test_a_prompt_that_is_scored_has_nothing_read_for_it(stored: Path) -> None:
    """All its rows run whatever is stored, so it must not wait for pages either."""
    fake, tiers = engine(stored, FaultyFiles())
    fake.engine.add(ask([9, 8, 7], 20))
    fake.engine.step()
    scored = fake.engine.add(Request(prompt=PROMPT, max_tokens=1, ignore_end=True, prompt_logprobs=0))
    fake.engine.step()
    assert tiers.counters.prefetched == 0
    assert scored not in fake.engine.jobs or fake.engine.jobs[scored].slot is not None
    assert tiers.close()
