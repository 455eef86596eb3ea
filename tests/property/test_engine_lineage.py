"""Random lives of an engine with every mode at once, judged to the bit: where each row came from and what followed from it.

In one batch: exact, bounded and integer replay, two tenants with the same prompts, pictures, speculation that is right for a
while, scores of prompts; between steps: cancellation, preemption, numbers that are not finite; between lives: a restart on a
store of which pages were flipped and exchanged. Pools hold hardly more than one request.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from kvist.cache.identity import image_content
from kvist.cache.page_file import HEAD_BYTES
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.config import VisionConfig, replace
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine, store_model
from kvist.engine.errors import NonFiniteLogits
from kvist.engine.request import ImageInput, Job, Request
from kvist.engine.runner import StepResult
from kvist.engine.sampler import SamplingParams
from kvist.engine.speculation import FixedPolicy
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout
from kvist.presets import preset
from tests.equivalence.conftest import toy
from tests.equivalence.lineage import Computed, Witness

LONGEST, MOST = 36, 7
REPLAYS = (None, "exact", "exact", "bounded", 8, 11)


@cache
def seeing() -> Transformer:
    """The toy with a vision tower, whose prompts may hold pictures."""
    vision = VisionConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    return random_model(replace(preset("tiny"), vision=vision, image_token_id=2), Numerics(deterministic=True), 0)


def picture(start: int, tokens: int, seed: int) -> ImageInput:
    values = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))
    return ImageInput(start=start, tokens=tokens, content=image_content(values.numpy()), embed=lambda: values)


class Life:
    """One seed's engine, from start to a restart."""

    def __init__(self, rng: random.Random, model: Transformer, size: int, folder: Path, trunks: list[Request]) -> None:
        self.rng, self.model, self.trunks = rng, model, trunks
        self.store = PageStore.open(
            folder,
            model=store_model(model.numerics, bytes(32), size),
            page_bytes=PageLayout.of(model.config, size).page_bytes,
            page_tokens=size,
            budget_bytes=4 << 20,
        )
        self.tiers = Tiers(host_bytes=rng.choice((0, 1 << 20)), store=self.store)
        config = EngineConfig(
            page_tokens=size,
            pages=-(-(LONGEST + MOST) // size) + rng.randrange(0, 12),
            max_running=rng.randrange(2, 6),
            step_cost=rng.choice((5, 16, 200)),
            mixed_cost=rng.choice((5, 50)),
            replay=rng.choice(("bounded", "exact", 11)),
            speculation=rng.choice(("off", 1, 4)),
            feature_bytes=rng.choice((1, 1 << 20)),
        )
        self.width = config.drafts(model.config)
        own = rng.random() < 0.4
        engine = Engine(
            model, config, fingerprint=bytes(32), tiers=self.tiers, policy=FixedPolicy(self.width),
            drafter=None if own else self.propose,
        )  # fmt: skip
        self.witness = Witness(engine)
        self.run, engine.runner.run = engine.runner.run, self.spoil  # type: ignore[method-assign]
        self.poison: set[int] = set()
        self.cancelled: set[int] = set()
        self.events: Counter[str] = Counter()

    def propose(self, jobs: Sequence[Job]) -> list[Proposal]:
        """What an earlier reply to the same tokens went on with, as far as there is one, else anything."""
        made = []
        for job in jobs:
            ids, tokens = job.tokens.ids.tolist(), []
            for other in self.witness.outcomes.values():
                past = [*other.request.prompt, *other.tokens]
                if past[: len(ids)] == ids and len(past) > len(ids) + len(tokens):
                    tokens = past[len(ids) : len(ids) + self.rng.randrange(self.width + 1)]
            tokens = (tokens + [self.rng.randrange(4, 256) for _ in range(self.width)])[: self.width]
            made.append(Proposal(tokens, [0.9] * self.width))
        return made

    def spoil(self, pieces):  # type: ignore[no-untyped-def]
        """Numbers of poisoned requests that are not finite, in logits or in the rows themselves."""
        result = self.run(pieces)
        logits, finite, at = result.logits_WV.clone(), list(result.finite), 0
        for place, (piece, count) in enumerate(zip(pieces, result.counts, strict=True)):
            if piece.job.id in self.poison:
                logits[at : at + count, 9] = float("nan")
                finite[place] = bool(count) and finite[place]
            at += count
        return StepResult(logits, result.counts, finite)

    def request(self) -> Request:
        rng = self.rng
        trunk = rng.choice(self.trunks)
        length = rng.randrange(LONGEST // 2, LONGEST) if rng.random() < 0.8 else rng.randrange(1, LONGEST)
        shared = rng.randrange(length // 2, length + 1) if rng.random() < 0.9 else 0
        prompt = list(trunk.prompt[:shared]) + [rng.randrange(4, 256) for _ in range(length - shared)]
        images = tuple(image for image in trunk.images if image.start + image.tokens <= shared)
        done = [o for o in self.witness.outcomes.values() if o.end is not None and o.tokens]
        if done and rng.random() < 0.25:
            return dataclasses.replace(rng.choice(done).request, replay=rng.choice(REPLAYS), max_tokens=MOST)
        if done and rng.random() < 0.4:
            before = rng.choice(done)
            prompt, images = [*before.request.prompt, *before.tokens, rng.randrange(4, 256)], before.request.images
            if len(prompt) > LONGEST:
                prompt, images = prompt[:LONGEST], tuple(i for i in images if i.start + i.tokens <= LONGEST)
        return Request(
            prompt=prompt,
            images=images,
            max_tokens=rng.randrange(1, MOST),
            ignore_end=True,
            priority=rng.choice((0, 0, 0, 1)),
            tenant=rng.choice("ab"),
            salt=rng.choice((b"", b"", b"", b"x")),
            replay=rng.choice(REPLAYS),
            prompt_logprobs=0 if rng.random() < 0.03 else None,
            sampling=SamplingParams(temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(2)),
        )

    def act(self, arriving: bool) -> None:
        rng, engine = self.rng, self.witness.engine
        # Two or three at a time: who comes later then finds what the earlier ones have left.
        busy = len(engine.scheduler.running) + engine.scheduler.waiting
        while arriving and rng.random() < (0.7 if busy < 2 else 0.1):
            self.witness.add(self.request())
            busy += 1
        if self.witness.outcomes and rng.random() < 0.04:
            number = rng.choice(list(self.witness.outcomes))
            self.cancelled.add(number)
            engine.abort(number)
        running = list(engine.scheduler.running.values())
        if running and rng.random() < 0.06:
            engine.scheduler.preempt(rng.choice(running))
        if running and rng.random() < 0.015:
            self.poison.add(rng.choice(running).id)
        self.witness.step()
        pool = engine.pages.pool
        pool.check()
        assert pool.owned == len({page for job in engine.scheduler.running.values() for page in job.pages})

    def end(self, known: list[Computed]) -> None:
        """Everything ended, nothing leaked, every token judged."""
        engine = self.witness.engine
        engine.pages.index.check()
        assert engine.pages.pool.owned == 0
        assert len(engine.scheduler.slots) == engine.config.max_running
        self.witness.judge(known)
        for number, outcome in self.witness.outcomes.items():
            end = outcome.end
            assert end is not None
            if end.reason == "error":
                assert number in self.poison
                assert isinstance(end.error, NonFiniteLogits), end.error
            else:
                assert end.reason == "length" or number in self.cancelled
                assert end.reason != "length" or len(outcome.tokens) == outcome.request.max_tokens
            self.count(outcome.request, end.usage, end.reason)
        assert self.tiers.close()

    def count(self, request: Request, usage, reason: str) -> None:  # type: ignore[no-untyped-def]
        for tier, tokens in usage.cached.items():
            self.events[tier] += tokens
        self.events[reason] += 1
        self.events["accepted"] += usage.accepted_tokens
        self.events["rejected"] += usage.drafted_tokens - usage.accepted_tokens
        self.events["preempted"] += usage.preemptions
        self.events["inside a page"] += usage.cached_tokens % self.witness.size > 0
        self.events["images"] += bool(request.images) and usage.cached_tokens > 0


def damage(rng: random.Random, folder: Path) -> None:
    """Flip bits of some page records and exchange two of them."""
    path = next(folder.rglob("pages.kv"))
    data = bytearray(path.read_bytes())
    slot = int.from_bytes(data[16:20], "little")
    count = (len(data) - HEAD_BYTES) // slot
    for _ in range(min(2, count)):
        data[HEAD_BYTES + rng.randrange(count) * slot + rng.randrange(300)] ^= 1 << rng.randrange(8)
    if count > 1:
        a, b = (HEAD_BYTES + number * slot for number in rng.sample(range(count), 2))
        data[a : a + slot], data[b : b + slot] = data[b : b + slot], data[a : a + slot]
    path.write_bytes(bytes(data))


def live(seed: int, folder: Path, steps: int, lives: int = 2) -> Counter[str]:
    """Lives of one store; what happened in them."""
    rng = random.Random(seed)
    model = seeing() if seed % 3 == 0 else toy(seed % 2, True)
    size, known, events = rng.choice((2, 4, 8, 8)), [], Counter[str]()
    prompts = [[rng.randrange(4, 256) for _ in range(LONGEST)] for _ in range(2)]
    if model.vision is None:
        trunks = [Request(prompt=prompt) for prompt in prompts]
    else:
        # The same ids twice, and only the first picture is another one.
        prompt, last = prompts[0], picture(19, 9, 7)
        prompt[3:12], prompt[19:28] = [2] * 9, [2] * 9
        trunks = [Request(prompt=prompt, images=(picture(3, 9, seed), last)) for seed in range(2)]
    for _ in range(lives):
        life = Life(rng, model, size, folder, trunks)
        for _ in range(steps):
            life.act(arriving=True)
        for _ in range(3000):
            if life.witness.engine.idle:
                break
            life.act(arriving=False)
        life.end(known)
        events += life.events
        damage(rng, folder)
    return events


EVERYTHING = (
    "device", "disk", "length", "cancelled", "error", "accepted", "rejected", "preempted", "inside a page", "images",
)  # fmt: skip


def test_lives(tmp_path: Path) -> None:
    """A few lives, and over them all of it occurs, or the judge's silence would say little."""
    events: Counter[str] = Counter()
    for seed in (0, 1):
        events += live(seed, tmp_path / str(seed), 25)
    assert not [name for name in EVERYTHING if not events[name]], events


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 124))
def test_more_lives(seed: int, tmp_path: Path) -> None:
    live(seed, tmp_path, 60)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(200, 205))
def test_long_lives(seed: int, tmp_path: Path) -> None:
    """The issue's count with a model: 2,000 steps x 5 seeds."""
    live(seed, tmp_path, 1000)
