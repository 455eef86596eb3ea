"""docs/capacity.md holds what the arithmetic gives now; its figures agree with what an engine would allocate."""

from __future__ import annotations

import pytest

from kvist.engine.budget import EngineConfig, plan_memory
from kvist.presets import preset
from tools.capacity_tables import PAGE, TABLES, cache_table, memory_table, written


def test_the_page_is_current() -> None:
    """`python tools/capacity_tables.py` writes it anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text
    for name, table in TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in text


def test_figures_are_the_release_s() -> None:
    """890 bytes a token; a million tokens of it in 0.93 GB; a budget's tokens are the engine's."""
    assert "| `v41-flash` | 890 |" in cache_table()
    assert "933.2 MB" in cache_table()
    plan = plan_memory(preset("nano"), EngineConfig(memory_bytes=10**9, step_cost=512), dtype_bytes=4)
    assert f"| `nano` | 1,000 MB | {plan.tokens:,} | {plan.context:,} |" in memory_table()


def test_markers_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="markers for cache"):
        written("a page without any")
