"""Greedy replies of a model through the engine in different company, and how often they part from those alone and cold.

Owns the ways (batched, cut in chunks, preempted, with drafts, after a hit, after a restart), the counting and what a card is
allowed. A reply that parts is another one from there on, so each is followed to its first other token only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.engine_watch import Outcome, Watched
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.checkpoint import locate
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine, store_model
from kvist.engine.request import Request, State
from kvist.engine.sampler import SamplingParams
from kvist.engine.terminal import book_text
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout
from kvist.text.tokenizer import Tokenizer

LENGTHS = (3, 64, 65, 200, 450, 900)
"""Below, at and above a window of 64, more than the rows that one query selects, more than an exact replay reaches back."""
NEW_TOKENS = 32
FINGERPRINT = bytes(32)
RATE, MARGIN = 0.1, 2.0
"""On a card: other tokens per token until then at most, and by how many logits the reply alone may have preferred its own."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Tokens said before the first other one (or the end), over all replies; `margins`: by how much the reply alone preferred
    its own token where another was chosen, in logits.
    """

    replies: int
    tokens: int
    margins: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Other tokens per token said."""
        return len(self.margins) / self.tokens

    @property
    def worst(self) -> float:
        """The largest margin in logits, 0 where none parts."""
        return max(self.margins, default=0.0)

    @property
    def allowed(self) -> bool:
        """Whether rate and margins stay within what a card is allowed."""
        return self.rate <= RATE and self.worst < MARGIN

    def __str__(self) -> str:
        worst = f", margins at most {max(self.margins):.3f}" if self.margins else ""
        return f"{len(self.margins)} of {self.replies} replies part, one in {self.tokens} tokens x{self.rate:.4f}{worst}"


@cache
def book() -> tuple[int, ...]:
    """Token ids of the shipped book, with nano's tokenizer."""
    return tuple(Tokenizer(locate("nano")).encode(book_text()))


def prompts(bos: int, rounds: int) -> list[list[int]]:
    """Openings at different places of the book, `rounds` of each length."""
    ids = book()
    return [[bos, *ids[997 * place : 997 * place + length - 1]] for place, length in enumerate(LENGTHS * rounds)]


class Company:
    """One model, its replies alone and cold, and every other way to get them."""

    def __init__(self, model: Transformer, *, rounds: int = 1, replay: str = "exact") -> None:
        self.model, self.replay = model, replay
        self.prompts = prompts(model.config.bos_token_id, rounds)
        self.alone = self._each(self._engine())

    def _engine(self, tiers: Tiers | None = None, **changes: object) -> Engine:
        values: dict[str, object] = {
            "pages": 480, "context": 1024, "max_running": 32, "speculation": "off", "replay": self.replay, **changes,
        }  # fmt: skip
        return Engine(self.model, EngineConfig(**values), fingerprint=FINGERPRINT, tiers=tiers)  # type: ignore[arg-type]

    def _ask(
        self, engine: Engine, prompts: Sequence[list[int]], between: Callable[[Engine, int], None] | None = None
    ) -> list[Outcome]:
        watched = Watched(engine)
        greedy = SamplingParams(temperature=0.0)
        numbers = [watched.add(Request(prompt=p, max_tokens=NEW_TOKENS, sampling=greedy, ignore_end=True)) for p in prompts]
        steps = 0
        while not engine.idle:
            if between is not None:
                between(engine, steps)
            watched.step()
            steps += 1
        found = [watched.outcomes[number] for number in numbers]
        for outcome in found:
            assert outcome.end is not None
            assert outcome.end.reason == "length", outcome.end
        engine.runner.run = watched._run  # type: ignore[method-assign]
        return found

    def _each(self, engine: Engine) -> list[Outcome]:
        """One after the other. No prompt shares more than a word with another, so each is cold (a replay from 0 is exact)."""
        found = [self._ask(engine, [prompt])[0] for prompt in self.prompts]
        assert all(outcome.end is not None and outcome.end.usage.cached_tokens <= 2 for outcome in found)
        return found

    def compare(self, found: Sequence[Outcome]) -> Compared:
        """Replies against those alone."""
        tokens, margins = 0, list[float]()
        for said, alone in zip(found, self.alone, strict=True):
            pairs = enumerate(zip(said.tokens, alone.tokens, strict=True))
            at = next((i for i, (mine, own) in pairs if mine != own), None)
            tokens += NEW_TOKENS if at is None else at + 1
            if at is not None:
                logits_V = alone.logits[len(alone.request.prompt) + at]
                margins.append(float(logits_V[alone.tokens[at]] - logits_V[said.tokens[at]]))
        return Compared(replies=len(found), tokens=tokens, margins=tuple(margins))

    def again(self) -> Compared:
        """Alone and cold once more: what nothing but the machine changes."""
        return self.compare(self._each(self._engine()))

    def batched(self) -> Compared:
        """All at once."""
        return self.compare(self._ask(self._engine(), self.prompts))

    def chunked(self) -> Compared:
        """Alone, prompts in chunks of odd sizes."""
        return self.compare(self._each(self._engine(step_cost=61, mixed_cost=61)))

    def preempted(self) -> Compared:
        """All at once, each put back in turn while it decodes, to be resumed from its pages by an exact replay."""

        def put_back(engine: Engine, step: int) -> None:
            decoding = [job for job in engine.scheduler.running.values() if job.state is State.DECODE]
            if decoding and step % 9 == 8:
                engine.scheduler.preempt(decoding[step // 9 % len(decoding)])

        engine = self._engine()
        found = self._ask(engine, self.prompts, put_back)
        assert sum(outcome.end.usage.preemptions for outcome in found if outcome.end) > 5
        return self.compare(found)

    def drafted(self, speculation: str | int, *, together: bool) -> tuple[Compared, float]:
        """With the model's own drafts; also the share of them that were accepted."""
        engine = self._engine(speculation=speculation)
        found = self._ask(engine, self.prompts) if together else self._each(engine)
        usage = [outcome.end.usage for outcome in found if outcome.end]
        drafted, accepted = sum(u.drafted_tokens for u in usage), sum(u.accepted_tokens for u in usage)
        return self.compare(found), accepted / max(1, drafted)

    def hit(self) -> Compared:
        """Each a second time in the same engine: whole prompts come from its pages."""
        engine = self._engine()
        found = []
        for prompt in self.prompts:
            self._ask(engine, [prompt])
            found += self._ask(engine, [prompt])
        self._cached(found, "device")
        return self.compare(found)

    def restarted(self, folder: Path) -> Compared:
        """Each in an engine that has its pages from the disk, where another one left them."""
        for _ in range(2):
            tiers = Tiers(host_bytes=0, store=self._store(folder))
            engine = self._engine(tiers)
            found = [self._ask(engine, [prompt])[0] for prompt in self.prompts]
            assert tiers.close()
        self._cached(found, "disk")
        return self.compare(found)

    def _store(self, folder: Path) -> PageStore:
        layout = PageLayout.of(self.model.config)
        root = store_model(self.model.numerics, FINGERPRINT, layout.page_tokens)
        return PageStore.open(
            folder, model=root, page_bytes=layout.page_bytes, page_tokens=layout.page_tokens, budget_bytes=64 << 20
        )

    def _cached(self, found: Sequence[Outcome], tier: str) -> None:
        size = PageLayout.of(self.model.config).page_tokens
        for outcome, prompt in zip(found, self.prompts, strict=True):
            assert outcome.end is not None
            assert outcome.end.usage.cached.get(tier, 0) >= len(prompt) // size * size, outcome.end.usage
