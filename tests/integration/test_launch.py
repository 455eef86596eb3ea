"""Starting an engine from words: the memory plan is printed, and a page store that cannot be used or shared says so."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from kvist.cache.store_errors import StoreBudgetTooSmall, StoreUnwritable
from kvist.engine.errors import BudgetTooSmall
from kvist.engine.launch import Launched, LaunchOptions, launch, user_cache
from kvist.server.settings import read_settings
from tests.server_fakes import NANO


def started(cache: Path, **budgets: str) -> Launched:
    return launch(str(NANO), LaunchOptions(**{"memory": "200MB", "cache_dir": cache, "cache_budget": "20MB", **budgets}))  # type: ignore[arg-type]


def test_the_plan_is_printed_by_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvist")
    launched = started(tmp_path, host_cache="10MB")
    plan = launched.engine.engine.plan
    asyncio.run(launched.close())
    words = [record.message for record in caplog.records if record.message.startswith("memory plan:")]
    assert any(f"{plan.tokens:,}" in line and "in device pages" in line for line in words)
    assert any("at most 268,435,456 B to be written, 268,435,456 B read ahead" in line for line in words)
    for tier, size in (("host", 10_000_000), ("disk", 20_000_000)):
        (line,) = (line for line in words if f"in tier {tier}" in line)
        tokens = int(line.split()[2].replace(",", ""))
        assert 0.9 * size < tokens * float(plan.layout.bytes_per_token) <= size


def test_a_second_engine_reads_the_store_of_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = started(tmp_path), started(tmp_path)
    tiers = [launched.tiers for launched in (first, second)]
    assert [tier is not None and tier.store is not None and tier.store.read_only for tier in tiers] == [False, True]
    assert "opened read-only, new pages are not kept on disk" in caplog.text
    assert first.list_folder is not None
    assert second.list_folder is None
    for launched in (second, first):
        asyncio.run(launched.close())


def test_what_cannot_be_is_named_and_leaves_the_store_to_others(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no directory")
    with pytest.raises(StoreUnwritable, match="Choose a directory that this user can write"):
        started(occupied / "pages")
    with pytest.raises(StoreBudgetTooSmall, match="a disk budget of 1,000 bytes holds no page"):
        started(tmp_path / "a", cache_budget="1000")
    with pytest.raises(BudgetTooSmall, match="give at least"):
        started(tmp_path / "b", memory="1MB")
    after = started(tmp_path / "b")
    assert after.tiers is not None
    assert after.tiers.store is not None
    assert not after.tiers.store.read_only, "the engine that could not start still holds the writer's lock"
    asyncio.run(after.close())


def test_pages_are_kept_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server starts with when nothing is set: a store within a budget in the user's cache directory; 0 keeps none."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    settings = read_settings([])
    default = launch(str(NANO), LaunchOptions(memory="200MB", cache_dir=settings.cache_dir, cache_budget=settings.cache_budget))
    assert default.tiers is not None
    assert default.tiers.store is not None
    (folder,) = (tmp_path / "home" / ".cache" / "kvist" / "pages").iterdir()
    assert any(folder.iterdir())
    page_bytes = default.engine.engine.plan.layout.page_bytes
    assert 3_800_000_000 < default.tiers.store.stat().capacity * page_bytes <= 4_000_000_000
    asyncio.run(default.close())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert user_cache() == tmp_path / "cache" / "kvist" / "pages"
    monkeypatch.undo()
    without = started(tmp_path / "none", cache_budget="0")
    assert without.tiers is None
    asyncio.run(without.close())
    assert not (tmp_path / "none").exists()
