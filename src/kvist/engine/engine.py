"""The serving core: requests in, events out, one ragged step at a time.

Owns the order of a step (plan, place, run, choose, commit, publish, draft) and the end of every request. Each part knows its
own business only: scheduler, pages, runner, sampler, speculation. Must not know HTTP or files. docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from kvist.cache.identity import numerics_string, root
from kvist.cache.tiers import Tiers
from kvist.engine.acceptance import Wanted, choices
from kvist.engine.budget import EngineConfig, MemoryPlan, plan_memory
from kvist.engine.drafter import BlockDrafter, Drafter, proposals
from kvist.engine.errors import EmptyPrompt, NonFiniteLogits, RequestTooLong
from kvist.engine.executor import device_needs, executor
from kvist.engine.metrics import Metrics
from kvist.engine.page_bytes import page_bytes
from kvist.engine.pages import Pages
from kvist.engine.replay import check_replay
from kvist.engine.reply import Reply
from kvist.engine.request import Event, FinishedEvent, Job, Request, State, TokenEvent
from kvist.engine.runner import StepResult
from kvist.engine.sampler import Choice
from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import GrammarError
from kvist.engine.sampling.params import SamplingParams
from kvist.engine.scheduler import Closed, Extended, Opened, Piece, Scheduler, StepPlan, overdue
from kvist.engine.speculation import AdaptivePolicy, FixedPolicy, VerifyPolicy
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.text.tokenizer import Tokenizer

LOG = logging.getLogger(__name__)


def numerics_name(numerics: Numerics) -> str:
    """The numerics as they enter every page's identity."""
    return numerics_string(
        dtype=str(numerics.dtype).removeprefix("torch."),
        impl=numerics.impl,
        deterministic=numerics.deterministic,
        quantise=numerics.quantise,
    )


def store_model(numerics: Numerics, fingerprint: bytes, page_tokens: int) -> bytes:
    """What `PageStore.open` wants as `model` (16 bytes) for an engine with these numerics and pages."""
    return root(fingerprint, numerics_name(numerics), b"", page_tokens)


class Engine:
    """Many requests on one model.

    Memory is planned and allocated here; `plan` says what fits. `fingerprint` names the weights (needed for pages that
    outlive the process; without it pages are this engine's own). `tokenizer` is needed for text and stop strings. Raises
    BudgetTooSmall, ValueError. One thread at a time; `AsyncEngine` serves many clients.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        fingerprint: bytes | None = None,
        tiers: Tiers | None = None,
        drafter: Drafter | None = None,
        policy: VerifyPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.config, self.tokenizer, self.clock = model, config, tokenizer, clock
        self.plan: MemoryPlan = plan_memory(
            model.config, config, dtype_bytes=model.numerics.dtype.itemsize,
            more=device_needs(model, config, tiers=tiers is not None),
        )  # fmt: skip
        size = self.plan.layout.page_tokens
        if tiers is not None and tiers.store is not None and fingerprint is None:
            raise ValueError("pages on disk outlive the process, so the model must be named: give its fingerprint")
        self.memory, self.runner = executor(model, config, self.plan)
        self.pages = Pages(
            model.plan,
            pages=self.plan.pages,
            page_tokens=size,
            fingerprint=os.urandom(32) if fingerprint is None else fingerprint,
            numerics=numerics_name(model.numerics),
            replay=config.replay,
            tiers=tiers,
            content=None if tiers is None else page_bytes(self.memory.bytes_PB, tiers),
        )
        self.scheduler = Scheduler(
            model.plan,
            self.pages,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            step_cost=config.step_cost,
            mixed_cost=config.mixed_cost,
            replay=config.replay,
        )
        drafts = config.drafts(model.config)
        self.drafter = drafter or BlockDrafter(self.runner, drafts, draw=config.acceptance == "rejection")
        fixed = drafts == 0 or isinstance(config.speculation, int)
        self.policy = policy or (FixedPolicy(drafts) if fixed else AdaptivePolicy(drafts, config.max_running))
        self.jobs: dict[int, Job] = {}
        self.metrics = Metrics()
        self._outbox: dict[int, deque[Event]] = {}
        self._ended: list[Event] = []
        self._number = 0
        self._grammars: GrammarVocabulary | None = None
        self._compiling = threading.Lock()

    # ---- requests

    def check(self, request: Request) -> None:
        """Raise what is wrong with a request before any work: EmptyPrompt, RequestTooLong, ValueError."""
        length, limit = len(request.prompt), self.plan.context
        if not length:
            raise EmptyPrompt("the prompt has no tokens; give at least one")
        if length + request.max_tokens > limit:
            raise RequestTooLong(
                f"{length} prompt tokens and {request.max_tokens} new ones exceed the longest request of {limit} tokens "
                f"(context {self.model.config.max_seq_len}, cache of {self.plan.tokens} tokens); shorten one of them"
            )
        self.model.check_ids(torch.as_tensor(request.prompt, dtype=torch.int64))
        size = self.model.config.vocab_size
        request.sampling.check_vocabulary(size)
        if bad := [token for token in request.stop_ids if not 0 <= token < size]:
            raise ValueError(f"stop_ids names token id {bad[0]}, the vocabulary is 0..{size - 1}; leave it out")
        if request.replay is not None:
            check_replay(self.model.plan, request.replay)
        if request.sampling.n != 1:
            raise ValueError(f"a job is one reply, n is {request.sampling.n}; `generate` makes the copies")
        if request.images and self.model.vision is None:
            raise ValueError(f"{len(request.images)} images, but this model has no vision; leave them out")
        end = 0
        for image in sorted(request.images, key=lambda image: image.start):
            if image.start < end or image.start + image.tokens > length:
                raise ValueError(f"image span {image.start}..{image.start + image.tokens} overlaps another or the prompt's end")
            end = image.start + image.tokens

    def prepare(self, request: Request) -> Job:
        """Check a request and do what needs no engine: buffers, and compiling a grammar, which may take seconds. Any thread."""
        self.check(request)
        constraint = None
        if request.grammar is not None:
            constraint = Constraint(self._vocabulary(), request.grammar, start_after=request.grammar_after)
        job = Job(-1, request, self.clock())
        job.reply = Reply(request, job.tokens.ids, self.model.config.eos_token_id, self.tokenizer, constraint)
        return job

    def submit(self, job: Job) -> int:
        """Queue a prepared request; its number. Raises QueueFull."""
        self.scheduler.require_room()
        self.pages.enter(job)
        assert job.chain is not None
        job.progress.digests, job.progress.replay_length = job.chain.digests, job.replay_length
        # Not before: a refused request must not carry the number that the next one gets.
        job.id = self._number
        self.scheduler.add(job)
        self._number += 1
        self.jobs[job.id] = job
        # Addresses are known from the ids, so what must be fetched can begin before a slot is free.
        ids, text = (torch.from_numpy(line).to(self.runner.device) for line in (job.tokens.ids, job.tokens.text))
        self.model.prefetch_engram(self.model.engram_ids(ids, text))
        self.metrics.requests += 1
        return job.id

    def add(self, request: Request) -> int:
        """Queue a request; its number. Raises what `check` raises, errors of its grammar, and QueueFull."""
        return self.submit(self.prepare(request))

    def _vocabulary(self) -> GrammarVocabulary:
        if self.tokenizer is None:
            raise ValueError("a grammar needs the vocabulary's spelling; make the engine with the model's tokenizer")
        with self._compiling:
            if self._grammars is None:
                self._grammars = GrammarVocabulary(self.tokenizer, [self.model.config.eos_token_id])
        return self._grammars

    def abort(self, number: int) -> None:
        """End a request at any moment; one that has ended already, or never was, changes nothing."""
        job = self.jobs.get(number)
        if job is not None:
            self._end(job, "cancelled")

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or has events to deliver."""
        return self.scheduler.idle and not self._ended

    def generate(self, request: Request) -> Iterator[Event]:
        """Run a request (its `n` copies) to the end, yielding its events; other requests go on meanwhile.

        Leaving the iterator early aborts it.
        """
        numbers = []
        try:
            for sampling in request.sampling.copies():
                numbers.append(self.add(_with_sampling(request, sampling)))
                self._outbox[numbers[-1]] = deque()
            open_ones = set(numbers)
            while open_ones:
                for number in numbers:
                    while self._outbox[number]:
                        event = self._outbox[number].popleft()
                        if isinstance(event, FinishedEvent):
                            open_ones.discard(number)
                        yield event
                if open_ones:
                    self.step()
        finally:
            for number in numbers:
                self._outbox.pop(number, None)
                self.abort(number)

    # ---- the step

    def step(self) -> list[Event]:
        """One step of everything that runs; the events of all requests (also kept for `generate`)."""
        with self.runner.guard():
            events = self._step()
        for event in events:
            if event.id in self._outbox:
                self._outbox[event.id].append(event)
        return events

    def take_ended(self) -> list[Event]:
        """Ends that have come without a step (`abort`), so that nobody waits for the next one to hear of them."""
        ended, self._ended = self._ended, []
        return ended

    def _step(self) -> list[Event]:
        self._set_verify()
        plan = self.scheduler.plan(self.clock())
        for job in plan.expired:
            self._finished(job, "error", error=overdue(job))
        self.metrics.preemptions += len(plan.preempted)
        self._place(plan)
        events: list[Event] = []
        pieces = self._fetched(plan.pieces)
        if pieces:
            began = time.perf_counter()
            try:
                result = self.runner.run(pieces)
            except Exception as error:  # noqa: BLE001  # every request of the step is told; the engine goes on
                for piece in pieces:
                    self._end(piece.job, "error", error=error, keep=False)
            else:
                events = self._commit(pieces, result)
                made = sum(len(event.tokens) for event in events if isinstance(event, TokenEvent))
                self._measure(pieces, made, time.perf_counter() - began)
                self._draft([piece.job for piece in pieces])
        return [*events, *self.take_ended()]

    def _fetched(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces whose images and table rows can be had; the jobs of the others end."""
        failed = self.runner.check(pieces)
        for number, error in failed.items():
            self._end(pieces[number].job, "error", error=error)
        return [piece for number, piece in enumerate(pieces) if number not in failed]

    def _set_verify(self) -> None:
        """How many drafts each job verifies: the policy's wish, what the reply may still hold, what its grammar allows."""
        jobs = [job for job in self.scheduler.running.values() if job.drafts and job.state is State.DECODE]
        for job, length in zip(jobs, self.policy.lengths([job.survival for job in jobs]), strict=True):
            left = job.request.max_tokens - job.new_tokens
            job.verify = max(0, min(length, len(job.drafts), left - 1))
            allowed = self._allowed(job, job.verify)
            if allowed is not None and self.config.acceptance == "rejection":
                # A draft that is left out because of what it is would favour the others; forbidden, it is rejected anyway.
                allowed += 1
            job.verify = min(job.verify, allowed or 0)

    def _allowed(self, job: Job, drafts: int) -> int | None:
        """Drafts in order that the job's grammar allows; None (and the job ends) if it runs into a limit."""
        try:
            return job.reply.allowed(job.drafts[:drafts])
        except GrammarError as error:
            self._end(job, "error", error=error)
            return None

    def _place(self, plan: StepPlan) -> None:
        """Apply the scheduler's placement changes to the memory, in their order."""
        for change in plan.placement:
            if isinstance(change, Closed):
                self.memory.close(change.slot)
            elif isinstance(change, Extended):
                self.memory.extend(change.slot, change.pages)
            else:
                self._open(change)

    def _open(self, change: Opened) -> None:
        if change.copy is not None:
            self.memory.copy_page(*change.copy)
            self.pages.copied(change.job, change.copy[0])
        self.memory.open(change.slot, change.pages, change.tokens)
        change.job.progress.started(self.clock())
        self.metrics.cached_tokens += change.tokens
        if change.job.span is not None:
            self.metrics.replayed_tokens += change.job.span.replayed

    def _commit(self, pieces: Sequence[Piece], result: StepResult) -> list[Event]:
        """Choose tokens from the wanted rows, move jobs on, publish what is certain."""
        wanted: list[Wanted] = []
        owners: list[Piece] = []
        at = 0
        for piece, count, finite in zip(pieces, result.counts, result.finite, strict=True):
            first, at, job = at, at + count, piece.job
            if not finite:
                error = NonFiniteLogits(f"positions {piece.start}..{piece.stop - 1} are not finite")
                self._end(job, "error", error=error, keep=False)
                continue
            if job.state is State.PREFILL:
                if not self._prefilled(piece, result.logits_WV[first:at]):
                    continue
                first = at - 1
            if self._allowed(job, piece.drafts) is not None:
                wanted.append(Wanted(job, first, piece.drafts))
                owners.append(piece)
        found = choices(wanted, result.logits_WV, rejection=self.config.acceptance == "rejection")
        return [event for piece, chosen in zip(owners, found, strict=True) for event in self._accept(piece, chosen)]

    def _prefilled(self, piece: Piece, logits_WV: torch.Tensor) -> bool:
        """Move a prefill on; whether its next token is to be chosen now."""
        job, top = piece.job, piece.job.request.prompt_logprobs
        self.scheduler.computed(piece)
        self.metrics.prefill_rows += piece.stop - piece.start
        job.progress.prefilled(piece.stop - piece.start, piece.decoded, len(job.pages))
        if top is not None:
            prompt = job.tokens.ids[: job.prompt_length]
            try:
                job.reply.score(piece.start, logits_WV.float().cpu().numpy(), prompt, top)
            except NonFiniteLogits as error:
                self._end(job, "error", error=error, keep=False)
                return False
        self._advance(job)
        return len(logits_WV) > 0 and piece.stop == len(job)

    def _advance(self, job: Job) -> None:
        """Publish what became certain; where another request was first, read its page from now on."""
        adopted = self.pages.advance(job)
        for number, page in adopted:
            assert job.slot is not None
            self.memory.exchange(job.slot, number, page)
        self.metrics.adopted_pages += len(adopted)

    def _accept(self, piece: Piece, choices: Sequence[Choice]) -> list[Event]:
        """Take the chosen tokens as long as each draft before them was chosen too; the event of what is new."""
        job, reply = piece.job, piece.job.reply
        before = len(job)
        assert piece.stop == before + piece.drafts
        tokens, text, details, accepted = [], [], [], 0
        error: Exception | None = None
        for depth, choice in enumerate(choices):
            if choice.error is not None:
                error = choice.error
                break
            tokens.append(choice.token)
            details.append(choice.logprobs)
            job.tokens.append(choice.token)
            try:
                text.append(reply.feed(choice.token))
            except GrammarError as limit:
                error = limit
                break
            if reply.reason is not None or depth >= piece.drafts or choice.token != job.drafts[depth]:
                break
            accepted += 1
        job.computed = before + accepted
        if piece.drafts:
            self._count_drafts(job, piece.drafts, accepted)
        job.drop_drafts()
        if error is not None:
            self._end(job, "error", error=error, keep=False)
            return []
        self._advance(job)
        job.usage.completion_tokens += len(tokens)
        self.metrics.generated_tokens += len(tokens)
        job.progress.produced(self.clock(), len(job.pages))
        if reply.reason is not None:
            text.append(reply.finish())
        wants = job.request.sampling.logprobs is not None
        event = TokenEvent(
            id=job.id,
            tokens=tuple(tokens),
            text="".join(text),
            logprobs=tuple(details) if wants else None,
            client=job.request.client,
        )
        if reply.reason is not None:
            self._end(job, reply.reason)
        return [event]

    def _count_drafts(self, job: Job, drafts: int, accepted: int) -> None:
        job.usage.drafted_tokens += drafts
        job.usage.accepted_tokens += accepted
        self.metrics.drafted_tokens += drafts
        self.metrics.accepted_tokens += accepted
        self.policy.saw_acceptance(job.survival[:drafts], accepted)

    def _measure(self, pieces: Sequence[Piece], tokens: int, seconds: float) -> None:
        self.metrics.steps += 1
        self.metrics.step_seconds += seconds
        if all(piece.decode_from == piece.start == piece.publish_from for piece in pieces):
            self.policy.saw_step(len(pieces), sum(piece.stop - piece.start for piece in pieces), tokens, seconds)

    def _draft(self, jobs: Sequence[Job]) -> None:
        """Propose tokens behind the newest one of each job that decodes and may use them."""
        able = [
            job
            for job in jobs
            if job.state is State.DECODE and job.request.speculate and job.request.max_tokens - job.new_tokens > 1
        ]
        if not able or not self.policy.wants_drafts(len(able)):
            return
        began = time.perf_counter()
        try:
            made = proposals(self.drafter, able, self.model.config.vocab_size)
        except Exception as error:  # drafts only save time: this step's are given up, counted and said once
            self.metrics.draft_failures += 1
            if self.metrics.draft_failures == 1:
                LOG.error("drafting failed; requests go on without drafts (more failures are only counted)", exc_info=error)
            return
        for job, proposal in zip(able, made, strict=True):
            job.drafts, job.survival, job.draft_probs = proposal.tokens, proposal.survival, proposal.probs
        self.policy.saw_drafting(len(able), time.perf_counter() - began)

    # ---- ends

    def _end(self, job: Job, reason: str, *, error: Exception | None = None, keep: bool = True) -> None:
        """End a job that has not ended: free its slot and pages; what it published goes too unless `keep`."""
        if job.state is State.FINISHED:
            return
        if isinstance(error, NonFiniteLogits) and self.runner.unread is not None:
            error = self.runner.unread  # not the model's numbers: an expert that could not be read
        if not keep:
            self.pages.withdraw(job)
        if isinstance(error, NonFiniteLogits):
            self.pages.distrust(job)
        self.scheduler.finish(job, keep=keep)
        self._finished(job, reason, error=error)

    def _finished(self, job: Job, reason: str, *, error: Exception | None = None) -> None:
        del self.jobs[job.id]
        job.progress.ended(reason, self.clock())
        self.metrics.ended[reason] = self.metrics.ended.get(reason, 0) + 1
        scores = None if job.request.prompt_logprobs is None else tuple(job.reply.prompt_logprobs)
        self._ended.append(
            FinishedEvent(
                id=job.id,
                reason=reason,
                usage=job.usage,
                error=error,
                stop=job.reply.stop,
                prompt_logprobs=scores,
                client=job.request.client,
            )
        )


def _with_sampling(request: Request, sampling: SamplingParams) -> Request:
    return dataclasses.replace(request, sampling=sampling)
