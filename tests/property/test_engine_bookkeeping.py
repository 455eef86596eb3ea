"""Pool, prefix index, host and disk tiers and scheduler under random traces: no leak, no page taken for another, right replies.

No model: tokens follow from a script, and pages carry a digest of all that each position was computed from and its provenance.
A trace lives on one folder through several engines; between and beneath them the disk fails, fills up and changes bytes.
Writer and readers are real threads, so a seed fixes what is asked, not when pages reach the disk: it must hold for any timing.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvist.cache.page_file import FILE_NAME, HEAD_BYTES
from kvist.cache.page_index import FILE_NAME as INDEX_NAME
from kvist.cache.record import HEADER_BYTES
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import store_model
from kvist.engine.errors import DeadlineExceeded, QueueFull
from kvist.engine.request import FinishedEvent, Job, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from kvist.engine.scheduler import Opened, Piece
from kvist.page_layout import PageLayout
from tests.engine_fakes import MODEL, Scripted, follow
from tests.fault.faulty_files import FaultyFiles

STEPS = 400
FINGERPRINT = bytes(32)
NOTES = 64
"""Where in a page the notes begin: behind the marks of `Scripted`."""
NOTE = np.dtype([("origin", "<u4"), ("replay", "<u4")])


@pytest.fixture(autouse=True)
def _short_grudges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk and unreadable pages are tried again within a trace's time."""
    monkeypatch.setattr("kvist.cache.store.FULL_S", 0.1)
    monkeypatch.setattr("kvist.cache.store.NEGATIVE_S", 0.1)


class Noting(Scripted):
    """Notes at every position what it was computed from, and under which replay; whoever opens a hit reads the notes."""

    def __init__(self, config: EngineConfig, **parts: object) -> None:
        super().__init__(config, **parts)
        self.given: dict[int, int] = {}

    def accepted(self, job: Job) -> int:
        """The length of the bounded replay that a request accepts and gives; 0 is exact."""
        replay = self.engine.config.replay if job.request.replay is None else job.request.replay
        return {"exact": 0, "bounded": MODEL.plan.window}.get(replay, replay)  # type: ignore[call-overload, no-any-return]

    def notes(self, job: Job) -> np.ndarray:
        """The notes of all positions that the job's pages hold."""
        size = self.engine.pages.page_tokens
        held = self.engine.memory.bytes_PB[job.pages, NOTES : NOTES + size * NOTE.itemsize].numpy()
        return np.ascontiguousarray(held).view(NOTE).reshape(-1)

    def open(self, change: Opened) -> None:
        super().open(change)
        job, span = change.job, change.job.span
        if job.slot != change.slot:
            return
        assert span is not None
        held = self.notes(job)[: change.tokens]
        for position, origin in enumerate(held["origin"].tolist()):
            assert origin == origin_of(job, job.tokens.ids, position), f"position {position} is another text's or tenant's"
        kinds, own = set(held["replay"].tolist()), self.accepted(job)
        assert kinds <= {0, own}, f"a request that accepts replays of {own} was given rows after replays of {kinds}"
        covered = span.start <= max(0, span.hit - MODEL.plan.exact_encoder_replay)
        self.given[job.id] = 0 if covered and kinds <= {0} else own
        assert covered or own, "an exact request replays too little"

    def run(self, pieces: Sequence[Piece]):  # type: ignore[no-untyped-def]
        size, pages = self.engine.pages.page_tokens, self.engine.memory.bytes_PB.numpy()
        for piece in pieces:
            job = piece.job
            tokens = np.array([*job.tokens.ids.tolist(), *job.drafts])
            for position in range(max(piece.start, piece.publish_from), piece.stop):
                at = NOTES + position % size * NOTE.itemsize
                note = np.array((origin_of(job, tokens, position), self.given[job.id]), dtype=NOTE)
                pages[job.pages[position // size], at : at + NOTE.itemsize] = np.frombuffer(note.tobytes(), dtype=np.uint8)
        return super().run(pieces)


def origin_of(job: Job, tokens: np.ndarray, position: int) -> int:
    """A digest of the tenant and every token up to a position."""
    return zlib.crc32(tokens[: position + 1].tobytes(), zlib.crc32(job.request.salt))


class Trace:
    """One seed's folder and the engines that live on it one after another."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.size = self.rng.choice((2, 4, 8))
        self.trunks = [[self.rng.randrange(4, 256) for _ in range(80)] for _ in range(3)]
        self.seen: Counter[str] = Counter()
        self.past: list[list[int]] = []

    def run(self, steps: int) -> Counter[str]:
        """So many steps with arrivals, over at least two lives, and as many more as it takes to end each."""
        left = steps
        while left:
            share = min(left, self.rng.randrange(steps // 4, steps // 2))
            life = Life(self)
            for _ in range(share):
                life.act(arriving=True)
            life.end()
            left -= share
            if self.rng.random() < 0.7:
                self.damage()
        return self.seen

    def place(self) -> int:
        """A byte of a record that means something: of its header, its marks or its notes."""
        return self.rng.randrange(HEADER_BYTES + NOTES + self.size * NOTE.itemsize)

    def damage(self) -> None:
        """Bytes of the closed store change: bits, exchanged pages, a cut page file, a cut or missing index."""
        kind = self.rng.choice(("bits", "bits", "exchanged", "cut", "cut index", "no index"))
        path, index = self.folder / FILE_NAME, self.folder / INDEX_NAME
        data = bytearray(path.read_bytes())
        slot = int.from_bytes(data[16:20], "little")
        count = (len(data) - HEAD_BYTES) // slot
        if kind == "bits":
            for _ in range(min(4, count)):
                data[HEAD_BYTES + self.rng.randrange(count) * slot + self.place()] ^= 1 << self.rng.randrange(8)
        elif kind == "exchanged" and count > 1:
            a, b = (HEAD_BYTES + number * slot for number in self.rng.sample(range(count), 2))
            data[a : a + slot], data[b : b + slot] = data[b : b + slot], data[a : a + slot]
        elif kind == "cut":
            del data[HEAD_BYTES + self.rng.randrange(count * slot + 1) :]
        elif kind == "cut index":
            os.truncate(index, self.rng.randrange(index.stat().st_size))
        elif kind == "no index":
            index.unlink()
        path.write_bytes(data)
        self.seen[kind] += 1


class Life:
    """An engine on the trace's folder, from start to end."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rng = trace, trace.rng
        rng, size = self.rng, trace.size
        self.now = 0.0
        self.files = FaultyFiles()
        page_bytes = PageLayout.of(MODEL.config, size).page_bytes
        self.store = PageStore.open(
            trace.folder,
            model=store_model(MODEL.numerics, FINGERPRINT, size),
            page_bytes=page_bytes,
            page_tokens=size,
            budget_bytes=rng.choice((64 << 10, 512 << 10, 4 << 20)),
            files=self.files,
        )
        self.tiers = Tiers(
            host_bytes=rng.choice((0, 0, 40, 400)) * page_bytes,
            store=self.store,
            queue_bytes=rng.choice((4, 1000)) * page_bytes,
        )
        config = EngineConfig(
            page_tokens=size,
            pages=-(-80 // size) + rng.randrange(0, 40),
            max_running=rng.randrange(1, 8),
            max_waiting=rng.randrange(3, 20),
            step_cost=rng.choice((2, 8, 64)),
            mixed_cost=rng.choice((2, 8)),
            replay=rng.choice(("bounded", "exact", 11)),
            speculation=rng.choice(("off", "adaptive", 5)),
        )
        self.fake = Noting(config, drafter=self.propose, clock=lambda: self.now, tiers=self.tiers, fingerprint=FINGERPRINT)
        self.engine = self.fake.engine
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedEvent] = {}
        self.fd = os.open(trace.folder / FILE_NAME, os.O_RDWR)

    def propose(self, jobs: Sequence[Job]) -> list[Proposal]:
        proposals = []
        for job in jobs:
            known = follow(job.tokens.ids.tolist(), 5)
            right = self.rng.randrange(6)
            proposals.append(Proposal([t if i < right else 4 for i, t in enumerate(known)], [0.9**i for i in range(1, 6)]))
        return proposals

    def request(self) -> Request:
        rng = self.rng
        length = rng.randrange(1, 60)
        shared = rng.randrange(0, length + 1)
        prompt = rng.choice(self.trace.trunks)[:shared] + [rng.randrange(4, 256) for _ in range(length - shared)]
        if self.tokens and rng.random() < 0.3:
            number = rng.choice(list(self.tokens))
            prompt = (list(self.requests[number].prompt) + self.tokens[number])[:60]
        elif self.trace.past and rng.random() < 0.4:
            prompt = rng.choice(self.trace.past)[:60]
        return Request(
            prompt=prompt,
            max_tokens=rng.randrange(1, 20),
            ignore_end=True,
            priority=rng.choice((0, 0, 0, 1, 2)),
            tenant=rng.choice("abc"),
            salt=rng.choice((b"", b"", b"x")),
            deadline_s=rng.choice((None, None, None, 6.0)),
            replay=rng.choice((None, None, "exact", "bounded", 11)),
            sampling=SamplingParams(temperature=rng.choice((0.0, 0.7)), seed=rng.randrange(9)),
        )

    def act(self, arriving: bool) -> None:
        """What happens around one step, the step, and the counts after it."""
        rng = self.rng
        if arriving and rng.random() < 0.3:
            request = self.request()
            try:
                number = self.engine.add(request)
            except QueueFull:
                self.trace.seen["refused"] += 1
            else:
                self.requests[number], self.tokens[number] = request, []
        if self.requests and rng.random() < 0.02:
            self.engine.abort(rng.choice(list(self.requests)))
        running = list(self.engine.scheduler.running.values())
        if running and rng.random() < 0.02:
            self.engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.01:
            self.fake.poison.add(rng.choice(running).id)
        self.disturb()
        self.now += 0.1
        for event in self.engine.step():
            if isinstance(event, TokenEvent):
                self.tokens[event.id] += event.tokens
            else:
                assert event.id not in self.ends, "ended twice"
                self.ends[event.id] = event
        self.count()

    def disturb(self) -> None:
        """The disk beneath a living engine: errors, no room for a while, bits that change; now and then it is waited for."""
        rng = self.rng
        if rng.random() < 0.02:
            self.tiers.flush()
        if rng.random() < 0.01:
            self.files.read_errors = rng.randrange(1, 4)
        if rng.random() < 0.005:
            self.files.write_errors = 1
        if rng.random() < 0.01:
            self.files.room = rng.choice((0, 5000, None, None))
        slot = self.store.geometry.slot_bytes
        if rng.random() < 0.04 and (count := (os.fstat(self.fd).st_size - HEAD_BYTES) // slot):
            at = HEAD_BYTES + rng.randrange(count) * slot + self.trace.place()
            os.pwrite(self.fd, bytes([os.pread(self.fd, 1, at)[0] ^ 1 << rng.randrange(8)]), at)
            self.trace.seen["flipped"] += 1

    def count(self) -> None:
        """free + owned + cached = total, counted anew from references, and every budget kept."""
        pool = self.engine.pages.pool
        pool.check()
        assert pool.free + pool.owned + pool.cached == pool.total
        held = {page for job in self.engine.scheduler.running.values() for page in job.pages}
        assert pool.owned == len(held), "pages are owned by nobody, or held without being owned"
        if self.rng.random() < 0.05:
            self.engine.pages.index.check()
        assert self.tiers.host.used_bytes <= self.tiers.host.budget_bytes
        assert self.tiers.queued_bytes <= self.tiers.queue_bytes

    def end(self) -> None:
        """Run everything to its end, judge every reply, close the tiers."""
        for _ in range(4000):
            if self.engine.idle:
                break
            self.act(arriving=False)
        self.engine.step()
        pool = self.engine.pages.pool
        assert pool.owned == 0, "pages leak"
        self.engine.pages.index.check()
        assert len(self.engine.scheduler.slots) == self.engine.config.max_running
        assert not self.engine.memory.opened, "a slot stays open"
        assert self.ends.keys() == self.requests.keys(), "a request got no end"
        for number, end in self.ends.items():
            self.judge(number, end)
        self.trace.seen["preempted"] += self.engine.metrics.preemptions
        self.trace.past = [[*self.requests[number].prompt, *reply] for number, reply in self.tokens.items()][-40:]
        while pool.cached:
            assert self.engine.pages.index.evict_one() is not None, "a cached page cannot be evicted"
        assert pool.free == pool.total, "pages leak"
        self.shut()

    def judge(self, number: int, end: FinishedEvent) -> None:
        request, reply = self.requests[number], self.tokens[number]
        assert reply == follow(request.prompt, len(reply)), f"request {number} got a wrong token"
        assert end.usage.completion_tokens == len(reply)
        assert 0 <= end.usage.accepted_tokens <= end.usage.drafted_tokens
        assert end.usage.cached_tokens <= len(request.prompt) + len(reply)
        if end.reason == "length":
            assert len(reply) == request.max_tokens
        elif end.reason == "error":
            assert number in self.fake.poison or isinstance(end.error, DeadlineExceeded), end.error
        else:
            assert end.reason == "cancelled"
        seen = self.trace.seen
        seen.update(end.usage.cached)
        seen[end.reason] += 1
        seen["accepted"] += end.usage.accepted_tokens
        seen["late"] += isinstance(end.error, DeadlineExceeded)

    def shut(self) -> None:
        """End in peace, or with pages given up."""
        store = self.store
        self.tiers.close(self.rng.choice((30.0, 30.0, 0.0)))
        os.close(self.fd)
        counters = self.tiers.counters
        asked = counters.host_hits + counters.disk_hits + counters.slow + counters.misses
        self.trace.seen.update(
            {
                "asked of tiers": asked,
                "read errors": store.counters.read_errors,
                "write errors": store.counters.write_errors,
                "full": store.counters.full,
                "damaged": sum(store.counters.corrupt.values()),
                "index made again": store.counters.index_rebuilds,
                "evicted from disk": store.counters.evicted,
            }
        )


@pytest.mark.parametrize("seed", range(3))
def test_traces(seed: int, tmp_path: Path) -> None:
    Trace(seed, tmp_path).run(STEPS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_long_traces(seed: int, tmp_path: Path) -> None:
    seen = Trace(seed, tmp_path).run(2000)
    assert seen["device"] > 0
    assert seen["asked of tiers"] > 0


EVERYTHING = (
    "device", "host", "disk", "length", "error", "cancelled", "accepted", "late", "refused", "preempted", "flipped", "damaged",
    "read errors", "full",
)  # fmt: skip


def test_traces_see_everything(tmp_path: Path) -> None:
    """Hits from every tier, preemptions, refusals, poison, deadlines, accepted drafts and each kind of damage occur."""
    seen: Counter[str] = Counter()
    for seed in (3, 4, 5, 6):
        seen += Trace(seed, tmp_path / str(seed)).run(250)
    assert not [name for name in EVERYTHING if not seen[name]], seen
