"""Many streaming clients on a server process of its own: seconds to the first token and between pieces, throughput, memory.

$KVIST_LOAD_CLIENTS (200), $KVIST_LOAD_SECONDS (120) and $KVIST_LOAD_PLACES (64, the server's max_concurrency) say how many and
how long; a sixth of the time warms up before, and streams that have begun end after it. The clients share the machine's cores
with the server. A stream that is not whole, a status besides 200 and 429, an error in the log, or memory that grows ends the run
without a row.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Benchmark, Better, Case, CountedCase, Options, WrongResult
from benchmarks.server_clients import Seen, load, percentiles, resident_mb

MODEL = Path(__file__).resolve().parents[1] / "models" / "nano"
KEY = "a-key-of-the-load-test"
START_S, STOP_S = 90.0, 60.0
GROWTH_ALLOWED_MB = 60.0
SAMPLE_S = 2.0


@dataclass(kw_only=True)
class Server:
    """A running `kvist serve nano`."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Take the log's lines until the process ends; to be run in a thread."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if '"ready"' in line and not self.url:
                self.url = json.loads(line)["address"]
                self.ready.set()
        self.ready.set()


@contextmanager
def running(places: int) -> Iterator[Server]:
    """A server with its defaults on a port of its own, its pages in a folder that goes with it. Raises OSError, WrongResult."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvist", "serve", str(MODEL), "--port", "0", "--cache-dir", folder]
        command += ["--max-concurrency", str(places)]
        environment = {**os.environ, "KVIST_SERVE_API_KEYS": json.dumps([KEY])}
        server = Server(process=subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        reader = threading.Thread(target=server.read, daemon=True)
        reader.start()
        try:
            server.ready.wait(START_S)
            if not server.url:
                raise OSError(f"the server did not start: {''.join(server.lines)[-2000:]}")
            yield server
            server.process.send_signal(signal.SIGTERM)
            status = server.process.wait(STOP_S)
            reader.join(STOP_S)
        finally:
            server.process.kill()
            server.process.wait()
    errors = [line for line in server.lines if '"level": "error"' in line]
    if status or errors or KEY in "".join(server.lines):
        raise WrongResult(
            f"the server ended with {status}; errors {errors[:2]}; its key in the log: {KEY in ''.join(server.lines)}"
        )


async def watched(server: Server, clients: int, seconds: float) -> tuple[Seen, list[float]]:
    """The clients' findings, and the server's memory all the while."""
    memory = [resident_mb(server.process.pid)]
    asking = asyncio.create_task(load(server.url, KEY, clients, seconds))
    while not asking.done():
        await asyncio.wait((asking,), timeout=SAMPLE_S)
        memory.append(resident_mb(server.process.pid))
    return asking.result(), memory


def number(name: str, default: float, least: float) -> float:
    """An option from the environment. Raises ValueError."""
    value = float(os.environ.get(name, default))
    if not value >= least:
        raise ValueError(f"{name} is {value:g}, at least {least:g}")
    return value


def require(seen: Seen, memory: list[float], clients: int, places: int) -> None:
    """Raise WrongResult for what a server must not do under load."""
    refused = seen.statuses[429]
    if seen.broken or set(seen.statuses) - {200, 429}:
        raise WrongResult(f"statuses {dict(seen.statuses)}, broken {seen.broken[:3]}")
    if seen.statuses[200] < min(clients, places) or (refused and clients <= places):
        raise WrongResult(f"{clients} clients at {places} places: statuses {dict(seen.statuses)}")
    if max(memory) - memory[0] > GROWTH_ALLOWED_MB:
        raise WrongResult(f"memory grew from {memory[0]:.0f} to {max(memory):.0f} MB, {GROWTH_ALLOWED_MB:.0f} allowed")


def _passed() -> None:
    """`require` has looked at the whole run before any case of it is made."""


def _case(name: str, value: float, unit: str, better: Better, peers: dict[str, float]) -> Case:
    return CountedCase(name=name, count=lambda: value, check=_passed, unit=unit, better=better, peers=peers)


def _build(options: Options) -> Iterator[Case]:
    clients = int(number("KVIST_LOAD_CLIENTS", 8 if options.quick else 200, 1))
    seconds = number("KVIST_LOAD_SECONDS", 3 if options.quick else 120, 1)
    places = int(number("KVIST_LOAD_PLACES", 4 if options.quick else 64, 1))
    with running(places) as server:
        asyncio.run(watched(server, clients, seconds / 6))
        seen, memory = asyncio.run(watched(server, clients, seconds))
    require(seen, memory, clients, places)
    label = f"{clients} clients, {places} places, {seconds:g} s"
    for name, values, scale, unit in (
        ("first token after acceptance", seen.first_s, 1.0, "s"),
        ("first token, refusals waited out", seen.waited_s, 1.0, "s"),
        ("between pieces of a stream", seen.between_s, 1e3, "ms"),
    ):
        p50, p99 = percentiles(values)
        yield _case(f"{name}, p50, {label}", p50 * scale, unit, "lower", {"p99": p99 * scale})
    whole, refused = seen.statuses[200], seen.statuses[429]
    yield _case(
        f"new tokens, {label}", seen.tokens / seen.elapsed_s, "tokens/s", "higher", {"whole streams": whole, "429": refused}
    )
    peers = {"at the start": memory[0], "most": max(memory)}
    yield _case(f"memory of the server at the end, {label}", memory[-1], "MB", "lower", peers)


BENCHMARK = Benchmark(
    name="server-load",
    summary="streaming clients on a real server process: first token, between pieces (p50, p99), tokens/s, memory",
    build=_build,
)
