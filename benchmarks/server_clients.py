"""Streaming clients against a running server: what each stream brought, and how long its pieces took to come.

Owns the clients and what they note, for tests and the benchmark `server-load`. Must not know how the server was started.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

NEW_TOKENS = 16


@dataclass(kw_only=True)
class Seen:
    """What the clients saw. Seconds: `first_s` from an accepted request to its first text, `waited_s` the same from the client's
    first attempt (refusals slept off), `between_s` from one piece of text to the next. `broken`: streams and answers that are
    neither whole nor a 429. `elapsed_s` runs until the last stream has ended."""

    statuses: Counter[int] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    tokens: int = 0
    elapsed_s: float = 0.0


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99. Raises ValueError for fewer than two values."""
    if len(seconds) < 2:
        raise ValueError(f"percentiles of {len(seconds)} values; let the clients run longer")
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return hundredths[49], hundredths[98]


async def load(url: str, key: str, clients: int, seconds: float) -> Seen:
    """`clients` loops, each asking again as soon as its stream has ended, until `seconds` are over."""
    seen, end = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def loop(number: int) -> None:
        since = time.perf_counter()
        while time.monotonic() < end:
            if await _one_stream(client, seen, number, since):
                since = time.perf_counter()

    headers = {"authorization": f"Bearer {key}"}
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as client:
        await asyncio.gather(*(loop(number) for number in range(clients)))
    seen.elapsed_s = time.monotonic() - began
    return seen


async def _one_stream(client: httpx.AsyncClient, seen: Seen, number: int, since: float) -> bool:
    """One streamed completion, checked to its last line; False: refused, to be tried again."""
    prompt = f"Client {number} asks: once upon a time"
    body = {"model": "nano", "prompt": prompt, "max_tokens": NEW_TOKENS, "stream": True, "seed": number}
    body["stream_options"] = {"include_usage": True}
    last, lines = time.perf_counter(), 0
    reason, usage, ended = None, None, False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        seen.statuses[answer.status_code] += 1
        if answer.status_code != 200:
            await answer.aread()
            if answer.status_code != 429:
                seen.broken.append(answer.text[:200])
                return True
            await asyncio.sleep(float(answer.headers["retry-after"]))
            return False
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            ended = line == "data: [DONE]"
            chunk = {} if ended else json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                reason = choice["finish_reason"] or reason
                if choice["text"]:
                    now = time.perf_counter()
                    (seen.between_s if lines else seen.first_s).append(now - last)
                    if not lines:
                        seen.waited_s.append(now - since)
                    last, lines = now, lines + 1
    if not ended or reason not in ("length", "stop") or usage is None:
        seen.broken.append(f"client {number}: ended {ended}, reason {reason}, usage {usage}")
        return True
    seen.tokens += usage["completion_tokens"]
    return True


def resident_mb(pid: int) -> float:
    """Resident memory of a process in 10^6 bytes. Linux. Raises OSError if there is no such process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"process {pid} states no resident memory; it has ended")
