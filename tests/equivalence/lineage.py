"""A judge of whole traces: every admission of every request against the replay oracle, every hit against who computed it.

Owns what is noted when a slot is opened (span, tokens, the hit's rows as they lie in the pages) and the comparison afterwards.
Each reply is cut at its admissions (a preempted request is admitted again); each part must have the oracle's logits to the bit,
and each page of a hit must hold the rows that the oracle computed for the same tenant, tokens and images before, under a
provenance that the request accepts. Replies of exact requests must be those of one full forward besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.cache.identity import EXACT
from kvist.engine.engine import Engine
from kvist.engine.replay import ReplaySpan
from kvist.engine.request import Job, Request
from kvist.engine.sampler import sample
from kvist.engine.scheduler import Opened
from kvist.engine.session import ImageSpan, Session
from kvist.model.memory import Slot
from kvist.model.stores import RowStore
from tests.equivalence.engine_traces import Watched
from tests.equivalence.replay_oracle import Oracle


@dataclass
class Admission:
    """One opening of a slot: tokens known then, what is to run, the rows of its hit, and whether the engine calls them exact."""

    job: Job
    total: int
    span: ReplaySpan
    held: Slot
    exact: bool


@dataclass
class Computed:
    """An admission as the oracle ran it: the tokens that it had in the end and the rows of those, its own from `hit` on."""

    request: Request
    ids: list[int]
    hit: int
    provenance: int
    slot: Slot
    ratios: dict[int, int]

    def gave(self, request: Request, ids: list[int], start: int, stop: int, held: Slot) -> bool:
        """Whether these rows were computed here, for the same tokens, images and tenant."""
        if self.hit >= stop or self.request.salt != request.salt or self.ids[:stop] != ids[:stop]:
            return False
        if _images(self.request, stop) != _images(request, stop):
            return False
        for source, ratio in self.ratios.items():
            rows = slice(start // ratio, stop // ratio)
            for mine, theirs in ((self.slot.main, held.main), (self.slot.keys, held.keys)):
                if rows.start == rows.stop:
                    continue
                if len(mine[source]) < rows.stop or not torch.equal(mine[source].read()[rows], theirs[source].read()[rows]):
                    return False
        return True


def _images(request: Request, stop: int) -> list[tuple[bytes, int, int]]:
    """What of a request's images stands before a position."""
    return sorted((i.content, i.start, min(i.start + i.tokens, stop)) for i in request.images if i.start < stop)


class Witness(Watched):
    """A watched engine that also notes every admission."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.model, self.size = engine.model, engine.pages.page_tokens
        self.admissions: list[Admission] = []
        self._open = engine._open
        engine._open = self._note  # type: ignore[method-assign]

    def _note(self, change: Opened) -> None:
        self._open(change)
        job, span = change.job, change.job.span
        if job.slot != change.slot or span is None:
            return
        assert (span.hit, span.total) == (change.tokens, len(job))
        self.admissions.append(Admission(job, len(job), span, self._rows(change.slot, change.tokens), job.exact_rows))

    def _rows(self, slot: int, tokens: int) -> Slot:
        held, rows, dtype = Slot(), self.engine.memory.rows, self.model.numerics.dtype
        for spec in self.model.plan.kv_sources:
            count, main, keys = tokens // spec.ratio, RowStore("main", False, dtype), RowStore("key", False, dtype)
            if count:
                main.append(rows.main(spec.index, slot, torch.arange(count), dtype).clone())
                keys.append(rows.keys(spec.index, slot, count, dtype).clone())
            held.main[spec.index], held.keys[spec.index] = main, keys
        return held

    def judge(self, known: list[Computed]) -> None:
        """Compare everything; `known` grows by what the oracle computed (give it on to the engine that follows a restart)."""
        for place, admission in enumerate(self.admissions):
            later = [other.total for other in self.admissions[place + 1 :] if other.job is admission.job]
            known.append(self._one(admission, later[0] if later else len(admission.job), known))
        for job in dict.fromkeys(admission.job for admission in self.admissions):
            if self._replay(job) == EXACT:
                self._full(job)

    def _one(self, admission: Admission, stop: int, known: list[Computed]) -> Computed:
        job, span, total = admission.job, admission.span, admission.total
        ids, own = job.tokens.ids.tolist(), self._replay(job)
        exact = span.start == 0 or span.start <= span.hit - self.model.plan.exact_encoder_replay
        for start in range(0, span.hit, self.size):
            end = min(start + self.size, span.hit)
            kinds = {made.provenance for made in known if made.gave(job.request, ids, start, end, admission.held)}
            assert kinds, f"request {job.id}: nobody has computed its positions {start}..{end - 1}"
            assert kinds & {EXACT, own}, f"request {job.id} was given rows of provenance {kinds}, it accepts {own}"
            exact = exact and EXACT in kinds
        assert exact or not admission.exact, f"request {job.id} passes approximate rows off as exact"
        found, slot = Oracle(self.model).logits(ids[:total], ids[total:stop], span, admission.held, job.request.images)
        for position, row in enumerate(found[: stop - total], total):
            got = self.outcomes[job.id].logits[position]
            assert torch.equal(got, row), f"request {job.id}: logits for position {position} are not the oracle's"
            assert ids[position] == sample(row, job.request.sampling, position)
        ratios = {spec.index: spec.ratio for spec in self.model.plan.kv_sources}
        return Computed(job.request, ids[:stop], span.hit, EXACT if exact else own, slot, ratios)

    def _replay(self, job: Job) -> int:
        """The provenance besides EXACT that a request accepts and gives, from its wish alone."""
        wish = self.engine.config.replay if job.request.replay is None else job.request.replay
        return EXACT if wish == "exact" else self.model.plan.window if wish == "bounded" else int(wish)

    def _full(self, job: Job) -> None:
        images = tuple(ImageSpan(start=image.start, embeddings_SD=image.embed()) for image in job.request.images)
        full = Session(self.model, chunk=10_000).score(torch.from_numpy(job.tokens.ids.copy()), images)
        for position in range(job.prompt_length, len(job)):
            assert torch.equal(self.outcomes[job.id].logits[position], full[position - 1]), f"request {job.id} is not exact"
