"""Many streaming clients at once on a real process: every stream ends whole or with a deliberate 429, memory stays flat.

The quick form runs in every test run; the long one is the issue's: 200 clients for two minutes. Figures are printed (`-s`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.integration.test_server_process import KEY, Process


@dataclass
class Seen:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


async def one_stream(client: httpx.AsyncClient, seen: Seen, number: int) -> None:
    """One streamed completion, checked to its last line."""
    body = {
        "model": "nano",
        "prompt": f"Client {number} asks: once upon a time",
        "max_tokens": 16,
        "stream": True,
        "seed": number,
    }
    last = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        seen.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            await answer.aread()
            if answer.status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]))
            else:
                seen.broken.append(answer.text[:200])
            return
        lines = []
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            (seen.between_s if lines else seen.first_s).append(now - last)
            last = now
            lines.append(line.removeprefix("data: "))
    reasons = [choice["finish_reason"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    if lines[-1] != "[DONE]" or reasons[-1] not in ("length", "stop"):
        seen.broken.append(lines[-1][:200])


async def load(url: str, clients: int, seconds: float) -> Seen:
    """`clients` loops of streams for a while."""
    seen, end = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def loop(number: int) -> None:
        while time.monotonic() < end:
            await one_stream(client, seen, number)

    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as client:
        await asyncio.gather(*(loop(number) for number in range(clients)))
    return seen


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise AssertionError("no VmRSS")


def run(tmp_path: Path, *, clients: int, seconds: float, slots: int, growth_mb: float) -> None:
    server = Process(tmp_path / "pages", "--max-concurrency", str(slots))
    try:
        asyncio.run(load(server.url, clients, seconds / 4))
        before = resident_mb(server.process.pid)
        seen = asyncio.run(load(server.url, clients, seconds))
        after = resident_mb(server.process.pid)
    finally:
        status = server.end()
    firsts, betweens = (statistics.quantiles(values, n=100) for values in (seen.first_s, seen.between_s))
    print(
        f"\n{clients} clients, {seconds:g} s, {slots} places: {dict(seen.statuses)}, first token p50 {firsts[49]:.3f} s "
        f"p99 {firsts[98]:.3f} s, between pieces p50 {betweens[49] * 1000:.1f} ms p99 {betweens[98] * 1000:.1f} ms, "
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
