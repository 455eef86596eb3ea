"""`restore-cost`: bringing a prefix back from disk, and its first token, against computing it again.

nano: 16K tokens through store, host memory, pool and replay to the first token, beside recomputing them. Released dimensions:
128K tokens are real pages (117 MB, random bytes) that travel the same way up to the replay's input; the model itself does not
run here, so what recomputing would take is arithmetic and says so. $KVIST_BENCH_DIR names the disk. All restored bytes are
compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.agent_trace import FINGERPRINT, PAGE, open_store
from benchmarks.cases import Benchmark, Case, CountedCase, Options, WrongResult
from benchmarks.nano_model import nano, prompt, weights_label
from benchmarks.page_disk import BATCH, Payloads, drop_page_cache, scratch
from kvist.cache.identity import EXACT, root
from kvist.cache.paged_memory import PagedMemory
from kvist.cache.prefix import PrefixQuery
from kvist.cache.record import Page
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.page_bytes import HostPages
from kvist.engine.pages import Pages
from kvist.engine.request import FinishedEvent, Job, Request
from kvist.engine.scheduler import Opened, Scheduler
from kvist.model.numerics import Numerics
from kvist.page_layout import PageLayout
from kvist.plan.flops import FlopModel
from kvist.presets import preset

NANO_TOKENS, RELEASED_TOKENS, SUFFIX = 16 * 1024, 128 * 1024, 64
HOST_BYTES = 512 << 20
H200_BF16, SHARE = 989e12, 0.4
"""Dense BF16 operations a second of one H200 (its data sheet), and the share of them that the arithmetic grants."""


@dataclass
class Times:
    """Seconds of each way, a round an entry; `moved` is the part of "disk" spent on bringing pages up."""

    disk: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)


def start(tokens: int, tiers: Tiers | None) -> Engine:
    """nano with an empty device cache."""
    config = EngineConfig(pages=tokens // PAGE + 16, page_tokens=PAGE, max_running=1, step_cost=1024, speculation="off")
    return Engine(nano("cpu"), config, fingerprint=FINGERPRINT, tiers=tiers)


def first_token(made: Engine, ids: list[int]) -> tuple[float, FinishedEvent]:
    """Seconds from a request's arrival to its first token."""
    began = time.perf_counter()
    events = list(made.generate(Request(prompt=ids, max_tokens=1, ignore_end=True)))
    assert isinstance(events[-1], FinishedEvent)
    return time.perf_counter() - began, events[-1]


def held(made: Engine, ids: list[int]) -> torch.Tensor:
    """The bytes of the whole pages that the device has of these tokens, [pages, page bytes]."""
    job = Job(0, Request(prompt=ids, max_tokens=1), 0.0)
    made.pages.enter(job)
    assert job.chain is not None
    found = made.pages.index.match(PrefixQuery(job.chain, job.replay_length, tiers=False))
    made.pages.release(found.retained)
    return made.memory.bytes_PB[found.pages].clone()


def clocked(work: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """The same work, its seconds noted."""

    def run(*arguments: object) -> Any:
        began = time.perf_counter()
        result = work(*arguments)
        into.append(time.perf_counter() - began)
        return result

    return run


def nano_times(tokens: int, rounds: int, folder: Path) -> Times:
    """Every round computes, restores from disk in a fresh engine, and restores from host memory. Raises `WrongResult`."""
    ids, times = prompt(tokens + SUFFIX).tolist(), Times()
    tiers = Tiers(host_bytes=0, store=open_store(folder))
    first_token(start(tokens, tiers), ids)
    tiers.close()
    for _ in range(rounds):
        cold = start(tokens, None)
        times.again.append(first_token(cold, ids)[0])
        drop_page_cache(folder)
        tiers = Tiers(host_bytes=HOST_BYTES, store=open_store(folder))
        warm, moved = start(tokens, tiers), list[float]()
        for name in ("enter", "lookup", "restore"):
            setattr(warm.pages, name, clocked(getattr(warm.pages, name), moved))
        for way in (times.disk, times.host):
            seconds, end = first_token(warm, ids)
            way.append(seconds)
            if way is times.disk:
                times.moved.append(sum(moved))
            if end.usage.cached_tokens != tokens or end.usage.replayed_tokens != warm.model.plan.window:
                raise WrongResult(f"{end.usage}: {tokens} tokens are stored")
            if not torch.equal(held(warm, ids), held(cold, ids)):
                raise WrongResult("restored pages are not what was computed")
            while warm.pages.index.evict_one() is not None:
                pass
        tiers.close()
    return times


class Released:
    """Pages of released dimensions on a disk, and everything between it and a replay but the model."""

    def __init__(self, tokens: int, folder: Path) -> None:
        self.config, self.folder, self.tokens = preset("v41-flash"), folder, tokens
        self.layout = PageLayout.of(self.config)
        self.count = tokens // self.layout.page_tokens
        self.memory = PagedMemory(self.config, Numerics(dtype=torch.bfloat16), pages=self.count + 8, slots=1, verify_rows=6)
        self.payloads = Payloads(self.layout.page_bytes)
        self.request = Request(prompt=prompt(tokens + SUFFIX).tolist(), max_tokens=1)

    def open(self) -> PageStore:
        """The store of a model that has this page layout."""
        size = self.layout.page_tokens
        model = root(FINGERPRINT, "bench", b"", size)
        return PageStore.open(self.folder, model=model, page_bytes=self.layout.page_bytes, page_tokens=size)

    def book(self, tiers: Tiers | None) -> Pages:
        """Pages with nothing on the device."""
        return Pages(
            self.config.plan,
            pages=self.count + 8,
            page_tokens=self.layout.page_tokens,
            fingerprint=FINGERPRINT,
            numerics="bench",
            tiers=tiers,
            content=HostPages(self.memory.bytes_PB),
        )

    def fill(self) -> None:
        """Store every page of the prompt."""
        job = Job(0, self.request, 0.0)
        self.book(None).enter(job)
        assert job.chain is not None
        identities = [job.chain.identity(number) for number in range(self.count)]
        pages = [
            Page(digest, self.payloads.page(number).payload, self.layout.page_tokens, EXACT, parent)
            for number, (digest, parent) in enumerate(identities)
        ]
        store = self.open()
        if sum(store.put(pages[at : at + BATCH]) for at in range(0, self.count, BATCH)) != self.count:
            raise WrongResult(f"{store.counters}")
        store.close()

    def restore(self, tiers: Tiers) -> float:
        """Seconds from the request's arrival to the replay's input: ids, positions and a slot that reads restored pages."""
        book = self.book(tiers)
        scheduler = Scheduler(self.config.plan, book, max_running=1, max_waiting=1, step_cost=1 << 14, mixed_cost=1 << 14)
        job = Job(0, self.request, 0.0)
        began = time.perf_counter()
        book.enter(job)
        scheduler.add(job)
        step = scheduler.plan(0.0)
        for change in step.placement:
            if isinstance(change, Opened):
                self.memory.open(change.slot, change.pages, change.tokens)
        (piece,) = step.pieces
        ids, _ = job.tokens.window(piece.start, piece.stop, ())
        taken = time.perf_counter() - began
        window = self.config.plan.window
        if piece.start != self.tokens - window or len(ids) != window + SUFFIX:
            raise WrongResult(f"rows {piece.start}..{piece.stop - 1} would run: {job.usage}")
        for number, page in enumerate(job.pages[: self.count]):
            self.payloads.require(number, bytes(self.memory.page_view(page).numpy()))
        self.memory.close(0)
        return taken


def released_times(tokens: int, rounds: int, folder: Path) -> tuple[Times, int]:
    """Disk and host rounds, and the bytes that each moved."""
    made, times = Released(tokens, folder), Times()
    made.fill()
    for _ in range(rounds):
        drop_page_cache(folder)
        tiers = Tiers(host_bytes=HOST_BYTES, store=made.open())
        times.disk.append(made.restore(tiers))
        times.host.append(made.restore(tiers))
        tiers.close()
    return times, made.count * made.layout.page_bytes


def recompute_seconds(tokens: int) -> float:
    """Arithmetic, not a measurement: prefill's operations (FP8 at twice, FP4 at four times BF16's rate) on one H200."""
    return FlopModel(preset("v41-flash")).prefill(tokens).weighted * tokens / (H200_BF16 * SHARE)


def _ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _compared() -> None:
    """All bytes were compared while they were measured."""


def _case(name: str, value: float, unit: str, peers: dict[str, float], *, higher: bool = False) -> Case:
    better = "higher" if higher else "lower"
    return CountedCase(name=name, count=lambda: value, check=_compared, unit=unit, better=better, peers=peers)  # type: ignore[arg-type]


def _build(options: Options) -> Iterator[Case]:
    tokens, released = (2048, 8192) if options.quick else (NANO_TOKENS, RELEASED_TOKENS)
    with scratch() as folder:
        (folder / "nano").mkdir()
        times = nano_times(tokens, options.rounds, folder / "nano")
        yield _case(
            f"prefix of {tokens:,} tokens from disk and its first token, nano, {weights_label()}",
            _ms(times.disk), "ms", {"computed again": _ms(times.again), "from host memory": _ms(times.host)},
        )  # fmt: skip
        size = tokens // PAGE * PageLayout.of(nano("cpu").config, PAGE).page_bytes
        yield _case(
            f"store to host memory to pool, {size / 1e6:.1f} MB of nano's pages, page cache dropped",
            size / statistics.median(times.moved) / 1e9, "GB/s", {}, higher=True,
        )  # fmt: skip
        (folder / "released").mkdir()
        times, size = released_times(released, options.rounds, folder / "released")
        name = f"prefix of {released:,} tokens ({size / 1e6:.0f} MB) of released dimensions"
        yield _case(
            f"{name} from disk to its replay's input", _ms(times.disk), "ms",
            {
                "from host memory": _ms(times.host),
                f"computed again, arithmetic: {SHARE:.0%} of an H200": 1e3 * recompute_seconds(released),
            },
        )  # fmt: skip
        yield _case(f"{name}, store to pool", size / statistics.median(times.disk) / 1e9, "GB/s", {}, higher=True)


BENCHMARK = Benchmark(
    name="restore-cost",
    summary="a stored prefix and its first token against computing it again: nano measured, released dimensions up to the replay",
    build=_build,
)
