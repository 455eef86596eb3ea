"""Many streaming clients at once on a real process: every stream ends whole or with a deliberate 429, memory stays flat.

The quick form runs in every test run; the long one is the issue's: 200 clients for two minutes. Figures are printed (`-s`);
the benchmark `server-load`, whose clients these are, keeps rows of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.server_clients import load, percentiles, resident_mb
from tests.integration.test_server_process import KEY, Process


def run(tmp_path: Path, *, clients: int, seconds: float, slots: int, growth_mb: float) -> None:
    server = Process(tmp_path / "pages", "--max-concurrency", str(slots))
    try:
        asyncio.run(load(server.url, KEY, clients, seconds / 4))
        before = resident_mb(server.process.pid)
        seen = asyncio.run(load(server.url, KEY, clients, seconds))
        after = resident_mb(server.process.pid)
    finally:
        status = server.end()
    (first50, first99), (between50, between99) = percentiles(seen.first_s), percentiles(seen.between_s)
    print(
        f"\n{clients} clients, {seconds:g} s, {slots} places: {dict(seen.statuses)}, first token p50 {first50:.3f} s "
        f"p99 {first99:.3f} s, between pieces p50 {between50 * 1000:.1f} ms p99 {between99 * 1000:.1f} ms, "
        f"memory {before:.0f} -> {after:.0f} MB"
    )
    assert not seen.broken, seen.broken[:5]
    assert set(seen.statuses) <= {200, 429}
    assert seen.statuses[429] if clients > slots else not seen.statuses[429]
    assert seen.statuses[200] >= slots
    assert after - before < growth_mb
    assert status == 0
    assert not [line for line in server.lines if '"level": "error"' in line]


def test_more_clients_than_places(tmp_path: Path) -> None:
    run(tmp_path, clients=12, seconds=3, slots=8, growth_mb=60)


@pytest.mark.long
def test_two_hundred_clients_for_two_minutes(tmp_path: Path) -> None:
    run(tmp_path, clients=200, seconds=120, slots=64, growth_mb=60)
