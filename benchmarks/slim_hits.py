"""A prefix hit of `v41-flash-slim`, from request to first token through the engine's parts (imported only where Triton is).

Queue, scheduler, prefix index, tiers, pages and the card's executor are an engine's own; there is no `Transformer`, whose
weights would not fit twice, so the token is the best id and no reply is made of it. Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.cases import WrongResult
from benchmarks.page_disk import BATCH, drop_page_cache, scratch
from benchmarks.slim import Case
from benchmarks.slim_cases import random_state
from benchmarks.slim_pages import SUFFIX
from benchmarks.slim_prefill import random_ids
from kvist.cache.identity import EXACT, root
from kvist.cache.record import Page
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.card.serving import CardExecutor, CardMemory
from kvist.engine.card.weights import CardWeights
from kvist.engine.page_bytes import CardPages
from kvist.engine.pages import Pages
from kvist.engine.request import Job, Request
from kvist.engine.scheduler import Opened, Scheduler

ROUNDS, DISK_ROUNDS = 7, 7
FINGERPRINT, NUMERICS = bytes(32), "bench"
PHASES = ("queue and hash", "find and bring", "place", "replay to the token")


class Hit:
    """A request whose prompt but for `SUFFIX` tokens lies in lower tiers, on a card that holds none of it."""

    def __init__(self, weights: CardWeights, case: Case) -> None:
        config = weights.config
        self.plan, self.size, self.tokens = config.plan, config.plan.page_tokens, case.context
        # A page more than the prompt needs, for its token.
        state = random_state(config, Case(batch=1, context=case.context + 2 * self.size, distinct=1), weights.embed.device)
        self.count = case.context // self.size
        self.host_PB = state.rows.bytes_PB[: self.count].cpu()
        self.runner, self.memory = CardExecutor(weights, state, drafts=False), CardMemory(state)
        self.request = Request(prompt=random_ids(weights, case.context + SUFFIX, 1).tolist(), max_tokens=1)

    def book(self, tiers: Tiers, card: CardPages) -> Pages:
        """Pages with nothing on the device."""
        return Pages(
            self.plan, pages=len(self.memory.bytes_PB), page_tokens=self.size, fingerprint=FINGERPRINT, numerics=NUMERICS,
            tiers=tiers, content=card,
        )  # fmt: skip

    def published(self, tiers: Tiers, card: CardPages) -> list[Page]:
        """Every whole page of the prompt under its name."""
        job = Job(0, self.request, 0.0)
        self.book(tiers, card).enter(job)
        assert job.chain is not None
        names = [job.chain.identity(number) for number in range(self.count)]
        rows = (row.numpy().data for row in self.host_PB)
        return [Page(digest, row, self.size, EXACT, parent) for (digest, parent), row in zip(names, rows, strict=True)]

    def first_token(self, tiers: Tiers, card: CardPages) -> list[float]:
        """Milliseconds of `PHASES`. Raises `WrongResult` unless all pages came and are right."""
        book, job, marks = self.book(tiers, card), Job(0, self.request, 0.0), list[float]()
        scheduler = Scheduler(self.plan, book, max_running=1, max_waiting=1, step_cost=1 << 14, mixed_cost=1 << 14)

        def mark() -> None:
            marks.append(time.perf_counter())

        torch.cuda.synchronize()
        mark()
        book.enter(job)
        scheduler.add(job)
        mark()
        step = scheduler.plan(0.0)
        mark()
        for change in step.placement:
            if isinstance(change, Opened):
                self.memory.open(change.slot, change.pages, change.tokens)
        mark()
        result = self.runner.run(step.pieces)
        result.logits_WV.argmax(1).tolist()
        mark()
        if step.pieces[0].start != self.tokens - self.plan.window or not all(result.finite):
            raise WrongResult(f"rows from {step.pieces[0].start} on were run, finite: {result.finite}; {tiers.counters}")
        if not torch.equal(self.memory.bytes_PB[job.pages[: self.count]].cpu(), self.host_PB):
            raise WrongResult("restored pages are not what was stored")
        self.memory.close(0)
        return [1e3 * (b - a) for a, b in pairwise(marks)]


def measure_hit(weights: CardWeights, case: Case, said: Callable[[str], None]) -> tuple[float, dict[str, float], str]:
    """Milliseconds from a request to its first token, its pages in host memory; from disk and by phases; what to report."""
    hit = Hit(weights, case)
    with closing(Tiers(host_bytes=2 * hit.host_PB.nbytes, store=None)) as tiers:
        card = CardPages.of(hit.memory.bytes_PB, tiers)
        for page in hit.published(tiers, card):
            tiers.offer(page)
        hit.first_token(tiers, card)
        host = _medians([hit.first_token(tiers, card) for _ in range(ROUNDS)])
        said(f"from host memory: {_text(host)}")
    with scratch() as folder:
        disk = _medians(_from_disk(hit, folder))
    peers = {"from disk": sum(disk.values())} | {f"of it {name}": taken for name, taken in host.items()}
    return sum(host.values()), peers, f"from host memory {_text(host)}; from disk {_text(disk)}"


def _from_disk(hit: Hit, folder: Path) -> list[list[float]]:
    """Rounds with a fresh process's tiers: nothing in memory, nothing in the page cache."""
    found, model = list[list[float]](), root(FINGERPRINT, NUMERICS, b"", hit.size)
    for number in range(DISK_ROUNDS + 1):
        store = PageStore.open(folder, model=model, page_bytes=hit.host_PB.shape[1], page_tokens=hit.size)
        with closing(Tiers(host_bytes=2 * hit.host_PB.nbytes, store=store)) as tiers:
            card = CardPages.of(hit.memory.bytes_PB, tiers)
            if not number:
                pages = hit.published(tiers, card)
                if sum(store.put(pages[at : at + BATCH]) for at in range(0, len(pages), BATCH)) != len(pages):
                    raise WrongResult(f"not all pages were stored: {store.counters}")
                continue
            # A server's memory has been used before.
            card.mover.memory.take(hit.count)
            drop_page_cache(folder)
            found.append(hit.first_token(tiers, card))
    return found


def _medians(rounds: list[list[float]]) -> dict[str, float]:
    return {name: statistics.median(line) for name, line in zip(PHASES, zip(*rounds, strict=True), strict=True)}


def _text(phases: dict[str, float]) -> str:
    return f"{sum(phases.values()):.1f} ms ({', '.join(f'{name} {taken:.1f}' for name, taken in phases.items())})"
