"""Who computes what in the next step: admission, chunked prefill in a budget, decode, preemption, fairness. No torch.

Owns queues, slots and the life of jobs; pages come from a `PageBook`. It never touches tensors: a `StepPlan` lists placement
changes for the memory and pieces for the runner. Must not know sampling, text or kernels.

Latency bound: while any request decodes, the prefill part of a step costs at most `mixed_cost` encoder rows, whatever the
number and length of prompts, so the gap between two tokens of a request is at most the time of one step of
`max_running x (1 + verify)` full rows and `mixed_cost` encoder rows (and one step more after a preemption), beside copying pages
of a hit from host memory and encoding pictures.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from kvist.cache.prefix import LowerPage
from kvist.config import LayerPlan
from kvist.engine.errors import DeadlineExceeded, QueueFull
from kvist.engine.replay import Replay, replay_span
from kvist.engine.request import Job, State


class Hit(NamedTuple):
    """What the cache has of a job's tokens: whole pages (held for the caller), the page whose first tokens match, tokens in all.

    `tokens` is a multiple of the alignment. `exact`: all rows have the bits of a cold run. `tiers`: tokens by origin. `lower`:
    whole pages that would follow and that `PageBook.restore` brings back; none of the other fields count them.
    """

    pages: list[int]
    partial: int | None
    tokens: int
    exact: bool
    tiers: dict[str, int]
    lower: Sequence[LowerPage] = ()


class PageBook(Protocol):
    """Pages as the scheduler sees them."""

    page_tokens: int

    @property
    def total(self) -> int:
        """Pages in all."""
        ...

    @property
    def available(self) -> int:
        """Pages that `allocate` could give now."""
        ...

    def lookup(self, job: Job) -> Hit:
        """The longest usable prefix of the job's tokens; its pages are held until `release`. Nothing is moved or evicted."""
        ...

    def restore(self, job: Job, hit: Hit) -> Hit:
        """The hit with its `lower` pages brought back, as far as they can be had; the caller knows that the job fits."""
        ...

    def allocate(self, count: int) -> list[int]:
        """Fresh pages, cached ones evicted as needed. CacheFull if there are not that many."""
        ...

    def release(self, pages: Iterable[int]) -> None:
        """End a job's hold on pages."""
        ...

    def leave(self, job: Job, *, keep: bool) -> None:
        """The job is about to give its pages up; with `keep`, all that it has computed may be offered to others."""
        ...

    def awaits(self, job: Job, *, busy: bool) -> bool:
        """Whether the next page that the cache lacks for the job is being computed for another one right now; while others are
        `busy`, also whether pages for it are on their way from a disk."""
        ...

    def begin(self, job: Job) -> None:
        """The job begins to compute the pages of its prompt behind its hit."""
        ...


class Opened(NamedTuple):
    """A slot begins: its pages, how many leading tokens are present, a page to copy first (source, target) or None."""

    slot: int
    pages: list[int]
    tokens: int
    copy: tuple[int, int] | None
    job: Job


class Extended(NamedTuple):
    """A slot gets more pages."""

    slot: int
    pages: list[int]


class Closed(NamedTuple):
    """A slot ends."""

    slot: int


@dataclass(kw_only=True)
class Piece:
    """Consecutive positions of one job in a step. Rows from `decode_from` on run the decoder half too.

    `wanted`: first position with logits (`stop`: none). `drafts`: proposed tokens at the piece's end.
    """

    job: Job
    start: int
    stop: int
    publish_from: int
    decode_from: int
    wanted: int
    drafts: int = 0

    @property
    def decoded(self) -> int:
        """Rows that run the decoder half."""
        return max(0, self.stop - max(self.start, self.decode_from))


@dataclass(kw_only=True)
class StepPlan:
    """One step: placement changes in order, pieces, jobs that ended before it (deadlines), jobs preempted for it."""

    placement: list[Opened | Extended | Closed] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    preempted: list[Job] = field(default_factory=list)


class Queue:
    """Waiting jobs: by priority, then the tenant served least, then arrival; preempted jobs stand in front.

    Each priority has a heap of its tenants by what they had been served when they were put there. That only grows, so the
    least served one is found by putting right the top until it is: no step looks at all tenants.
    """

    def __init__(self) -> None:
        self.levels: dict[int, dict[str, deque[Job]]] = {}
        self.served: dict[str, float] = {}
        self.count = 0
        self._heaps: dict[int, list[tuple[float, int, str]]] = {}
        self._entered = 0

    def push(self, job: Job, *, front: bool = False) -> None:
        """Add a job. A tenant that comes back starts level with the least served one, not with credit for its absence."""
        level = self.levels.setdefault(job.priority, {})
        heap = self._heaps.setdefault(job.priority, [])
        tenant = job.request.tenant
        if tenant not in level:
            floor = min((self.served[self._least(heap)] for heap in self._heaps.values() if heap), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), floor)
            level[tenant] = deque()
            self._entered += 1
            heapq.heappush(heap, (self.served[tenant], self._entered, tenant))
        (level[tenant].appendleft if front else level[tenant].append)(job)
        self.count += 1

    def head(self) -> Job | None:
        """The job whose turn it is."""
        for priority in sorted(self.levels, reverse=True):
            level, heap = self.levels[priority], self._heaps[priority]
            while heap:
                tenant = self._least(heap)
                if level[tenant]:
                    return level[tenant][0]
                heapq.heappop(heap)
                del level[tenant]
            del self.levels[priority], self._heaps[priority]
        return None

    def _least(self, heap: list[tuple[float, int, str]]) -> str:
        """The least served tenant of a heap, which is then at its top."""
        while True:
            served, order, tenant = heap[0]
            if served == self.served[tenant]:
                return tenant
            heapq.heapreplace(heap, (self.served[tenant], order, tenant))

    def turns(self) -> Iterator[Job]:
        """Waiting jobs as their turns come: `head()`, then who would follow if those before were not there. Do not change the
        queue on the way."""
        head = self.head()
        if head is None:
            return
        yield head
        for priority in sorted(self.levels, reverse=True):
            level = self.levels[priority]
            for tenant in sorted(level, key=lambda name: self.served[name]):
                yield from (job for job in level[tenant] if job is not head)

    def remove(self, job: Job) -> None:
        """Take a waiting job out."""
        self.levels[job.priority][job.request.tenant].remove(job)
        self.count -= 1

    def charge(self, tenant: str, cost: float) -> None:
        """Account work to a tenant."""
        self.served[tenant] = self.served.get(tenant, 0.0) + cost

    def forget_idle(self, busy: set[str]) -> None:
        """Drop the accounts of tenants that neither wait nor run, so that they do not pile up."""
        waiting = {tenant for level in self.levels.values() for tenant in level}
        self.served = {tenant: cost for tenant, cost in self.served.items() if tenant in waiting or tenant in busy}


ACCOUNTS = 4096
SPARE_DEADLINES = 16
LOOK_AHEAD = 8
"""Waiting jobs that are looked at for one whose pages nobody else is just computing."""


class Scheduler:
    """Bookkeeping of all jobs. `plan` before a step, `computed` after it, `finish` and `preempt` at any time between."""

    def __init__(
        self,
        plan: LayerPlan,
        book: PageBook,
        *,
        max_running: int,
        max_waiting: int,
        step_cost: int,
        mixed_cost: int,
        replay: Replay = "bounded",
    ) -> None:
        self.plan_of_layers, self.book, self.replay = plan, book, replay
        self.max_running, self.max_waiting = max_running, max_waiting
        self.step_cost, self.mixed_cost = step_cost, mixed_cost
        encoder = max(1, plan.decoder_start)
        self.decoder_cost = (len(plan.layers) - plan.decoder_start) / encoder
        least = 1 + self.decoder_cost
        if min(step_cost, mixed_cost) < least:
            raise ValueError(
                f"step_cost {step_cost} and mixed_cost {mixed_cost} must allow one full row, which costs {least:.2f}"
            )
        self.queue = Queue()
        self.running: dict[int, Job] = {}
        self.slots = list(range(max_running))[::-1]
        self.deadlines: list[tuple[float, int, Job]] = []
        self.pending: list[Opened | Extended | Closed] = []
        self._order = 0
        self._refused: tuple[int, int, int] | None = None

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self.queue.count

    @property
    def idle(self) -> bool:
        """Nothing to do."""
        return not self.running and not self.queue.count

    def require_room(self) -> None:
        """Raise QueueFull if no more requests may wait: back-pressure instead of a queue without end."""
        if self.queue.count >= self.max_waiting:
            raise QueueFull(f"{self.queue.count} requests wait, the limit is {self.max_waiting}; send it again later")

    def add(self, job: Job) -> None:
        """Queue a job. Raises QueueFull."""
        self.require_room()
        self.queue.push(job)
        if job.deadline is None:
            return
        if len(self.deadlines) > 2 * (self.queue.count + len(self.running)) + SPARE_DEADLINES:
            # Jobs that ended long before their time would stay, with all their tokens.
            self.deadlines = [entry for entry in self.deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self.deadlines)
        heapq.heappush(self.deadlines, (job.deadline, job.id, job))

    def finish(self, job: Job, *, keep: bool = True) -> None:
        """End a job in any state and free what it holds; ending twice changes nothing. `keep` False offers nothing to others."""
        if job.state is State.FINISHED:
            return
        if job.state is State.WAITING:
            # At once: behind a head that waits for room, ended jobs would pile up with all their tokens.
            self.queue.remove(job)
        else:
            self._vacate(job, keep=keep)
        job.move(State.FINISHED)

    def preempt(self, job: Job) -> None:
        """Take a running job's slot and pages away; its published pages stay in the cache and it resumes from them."""
        self._vacate(job, keep=True)
        job.move(State.WAITING)
        job.drop_drafts()
        job.usage.preemptions += 1
        self.queue.push(job, front=True)

    def plan(self, now: float) -> StepPlan:
        """The next step: decode rows first, then prefills in turn, then admissions while budget and slots are left."""
        step = StepPlan()
        while self.deadlines and self.deadlines[0][0] <= now:
            job = heapq.heappop(self.deadlines)[2]
            if job.state is not State.FINISHED:
                self.finish(job)
                step.expired.append(job)
        self._decodes(step)
        budget = float(self.mixed_cost if step.pieces else self.step_cost)
        turn = [job for job in self.running.values() if job.state is State.PREFILL]
        while budget >= 1 + self.decoder_cost and (prefill := self._next(step, turn)) is not None:
            budget -= self._prefill(step, prefill, budget)
        step.placement, self.pending = self.pending, []
        if len(self.queue.served) > ACCOUNTS:
            self.queue.forget_idle({job.request.tenant for job in self.running.values()})
        return step

    def computed(self, piece: Piece) -> None:
        """A piece has run: move the job on (a finished prefill starts to decode; the engine sets `computed` of decodes)."""
        job = piece.job
        if job.state is State.PREFILL:
            job.computed = piece.stop
            assert job.span is not None
            if job.computed == job.span.total:
                job.move(State.DECODE)

    def cost(self, piece: Piece) -> float:
        """Encoder rows plus decoder rows in units of an encoder row."""
        return piece.stop - piece.start + self.decoder_cost * piece.decoded

    def _vacate(self, job: Job, *, keep: bool) -> None:
        assert job.slot is not None
        self.book.leave(job, keep=keep)
        self.pending.append(Closed(job.slot))
        self.slots.append(job.slot)
        self.book.release(job.pages)
        del self.running[job.id]
        job.slot, job.pages, job.span, job.computed = None, [], None, 0

    def _decodes(self, step: StepPlan) -> None:
        order = sorted((j for j in self.running.values() if j.state is State.DECODE), key=lambda j: (-j.priority, j.admitted))
        for job in order:
            if job.state is not State.DECODE or not self._grow(step, job):
                continue
            start = len(job) - 1
            assert job.computed == start, (job.id, job.computed, start)
            assert job.span is not None
            stop = start + 1 + job.verify
            piece = Piece(job=job, start=start, stop=stop, publish_from=start, decode_from=start, wanted=start, drafts=job.verify)
            step.pieces.append(piece)
            self.queue.charge(job.request.tenant, (1 + job.verify) * (1 + self.decoder_cost))
        # Jobs that were preempted for the sake of a later one lose their pieces.
        step.pieces = [piece for piece in step.pieces if piece.job.state is State.DECODE]

    def _rank(self, job: Job) -> tuple[int, float, int]:
        """Order of prefills: priority, then the tenant served least, then arrival."""
        return -job.priority, self.queue.served[job.request.tenant], job.id

    def _next(self, step: StepPlan, turn: list[Job]) -> Job | None:
        """The prefill that gets budget next, of those under way and the queue (whose job is admitted by that)."""
        turn[:] = [job for job in turn if job.state is State.PREFILL]
        best = min(turn, key=self._rank, default=None)
        # A job whose pages are being computed for another, or read, is admitted some steps later and then hits them; who stands
        # behind it does not wait for that.
        turns = self.queue.turns() if self._may_admit() else iter(())
        near = (job for job in islice(turns, LOOK_AHEAD) if best is None or self._rank(job) < self._rank(best))
        head = next((job for job in near if not self.book.awaits(job, busy=bool(self.running))), None)
        if head is not None and self._admit(step, head):
            return head
        if best is not None and best.state is State.PREFILL:
            turn.remove(best)
            return best
        return None

    def _may_admit(self) -> bool:
        """Whether a slot is free, or held by a job of lower priority than some that wait."""
        top = max(self.queue.levels, default=None)
        return top is not None and (bool(self.slots) or any(job.priority < top for job in self.running.values()))

    def _grow(self, step: StepPlan, job: Job) -> bool:
        """Pages for the job's next rows. Drafts give way first, then jobs of lower rank, then the job itself."""
        size = self.book.page_tokens
        while True:
            need = -(-(len(job) + job.verify) // size) - len(job.pages)
            if need <= 0:
                return True
            if need <= self.book.available:
                fresh = self.book.allocate(need)
                job.pages.extend(fresh)
                assert job.slot is not None
                self.pending.append(Extended(job.slot, fresh))
                return True
            if job.verify:
                job.verify = max(0, len(job.pages) * size - len(job))
                continue
            victim = max(self.running.values(), key=lambda j: (-j.priority, j.admitted))
            self.preempt(victim)
            step.preempted.append(victim)
            if victim is job:
                return False

    def _prefill(self, step: StepPlan, job: Job, budget: float) -> float:
        span = job.span
        assert span is not None
        start = job.computed
        plain = max(0, min(span.decode_from, span.total) - start)
        count = int(budget) if budget <= plain else plain + int((budget - plain) / (1 + self.decoder_cost))
        stop = min(span.total, start + count)
        if stop <= start:
            return 0.0
        wanted = stop
        if job.request.prompt_logprobs is not None:
            wanted = start
        elif stop == span.total:
            wanted = stop - 1
        piece = Piece(job=job, start=start, stop=stop, publish_from=span.hit, decode_from=span.decode_from, wanted=wanted)
        step.pieces.append(piece)
        cost = self.cost(piece)
        self.queue.charge(job.request.tenant, cost)
        return cost

    def _admit(self, step: StepPlan, job: Job) -> bool:
        """Start the head of the queue if a slot and pages allow; running jobs of lower priority make room for it."""
        while True:
            state = (job.id, self.book.available, len(self.running))
            if self._refused == state:
                return False
            if self.slots and self._open(job):
                return True
            lower = [other for other in self.running.values() if other.priority < job.priority]
            if not lower or not self._fits_without(job, lower):
                self._refused = state
                return False
            victim = max(lower, key=lambda j: (-j.priority, j.admitted))
            step.pieces = [piece for piece in step.pieces if piece.job is not victim]
            self.preempt(victim)
            step.preempted.append(victim)

    def _fits_without(self, job: Job, lower: Sequence[Job]) -> bool:
        """Whether there may be room for the job once all of `lower` have given way; if not, none of them should."""
        hit = self.book.lookup(job)
        self.book.release([*hit.pages, *([] if hit.partial is None else [hit.partial])])
        others = [other for other in self.running.values() if other not in lower]
        kept = {page for other in others for page in other.pages}
        need = -(-len(job) // self.book.page_tokens) - len(kept.intersection(hit.pages))
        return need + sum(other.state is State.DECODE for other in others) <= self.book.total - len(kept)

    def _open(self, job: Job) -> bool:
        hit = self.book.lookup(job)
        size = self.book.page_tokens
        # Every job that decodes may need a page soon: admitting into the last ones would preempt at once.
        spare = sum(other.state is State.DECODE for other in self.running.values())
        need = -(-len(job) // size) - len(hit.pages)
        if hit.partial is not None and need + spare > self.book.available:
            # The page to copy from is held as well; without it the job may just fit.
            self.book.release([hit.partial])
            whole = len(hit.pages) * size
            tiers = {**hit.tiers, "device": hit.tiers["device"] - (hit.tokens - whole)}
            hit = hit._replace(partial=None, tokens=whole, tiers=tiers)
        if need + spare > self.book.available:
            self.book.release(hit.pages)
            return False
        if hit.lower:
            # Not before: bringing pages back may cost others their cached ones, in vain if the job did not fit.
            hit = self.book.restore(job, hit)
            need = -(-len(job) // size) - len(hit.pages)
        fresh = self.book.allocate(need)
        self.queue.remove(job)
        job.slot = self.slots.pop()
        job.pages = [*hit.pages, *fresh]
        replay = self.replay if job.request.replay is None else job.request.replay
        job.span = replay_span(
            self.plan_of_layers, len(job), hit.tokens, replay, all_layers=job.request.prompt_logprobs is not None
        )
        job.computed = job.span.start
        job.published = hit.tokens // size
        job.exact_rows = hit.exact and job.span.exact_rows
        job.usage.cached = job.usage.cached or dict(hit.tiers)
        job.usage.replayed_tokens += job.span.replayed
        self._order += 1
        job.admitted = self._order
        job.move(State.PREFILL)
        self.running[job.id] = job
        self.book.begin(job)
        copy = None if hit.partial is None else (hit.partial, fresh[0])
        self.pending.append(Opened(job.slot, job.pages[:], hit.tokens, copy, job))
        return True


def overdue(job: Job) -> DeadlineExceeded:
    """The error of a job that ran out of time."""
    return DeadlineExceeded(
        f"request {job.id} had {job.request.deadline_s} s for {job.request.max_tokens} tokens and produced {job.new_tokens}; "
        "give it more time or send fewer requests at once"
    )
