"""Random traces for the engine and the judge that compares every reply with one full forward, bit for bit.

Owns how a trace is drawn (arrivals, shared prefixes, cancellations, tight memory, drafts that are right for a while). The judge
knows nothing of batches or caches: it runs the dense reference on prompt and reply and chooses tokens from its logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from benchmarks.engine_watch import Outcome as Outcome
from benchmarks.engine_watch import Watched as Watched
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.request import Job, Request
from kvist.engine.sampler import SamplingParams, sample
from kvist.engine.session import Sequence as Tokens
from kvist.engine.session import Session
from kvist.model.transformer import Transformer


class LuckyDrafter:
    """Proposes what the reference says comes next, with an error after a random number of tokens."""

    def __init__(self, model: Transformer, rng: random.Random, width: int, replies: dict[tuple[int, ...], list[int]]) -> None:
        self.rng, self.width, self.replies, self.vocabulary = rng, width, replies, model.config.vocab_size

    def __call__(self, jobs: Sequence[Job]) -> list[Proposal]:
        proposals = []
        for job in jobs:
            key = (job.request.sampling.seed, *job.tokens.ids[: job.prompt_length].tolist())
            known = self.replies.get(key, [])[job.new_tokens :]
            right = self.rng.randrange(self.width + 1)
            tokens = [
                known[i] if i < min(right, len(known)) else self.rng.randrange(4, self.vocabulary) for i in range(self.width)
            ]
            proposals.append(Proposal(tokens, [0.9] * self.width))
        return proposals


def continuation(
    model: Transformer, prompt: Sequence[int], count: int, params: SamplingParams, replay: str = "exact"
) -> list[int]:
    """A reply by the dense reference, one token at a time; the end token is a token like any other."""
    session = Session(model, replay=replay)
    tokens = Tokens(0, torch.tensor(prompt))
    logits, reply = session.prefill([tokens]), []
    while len(reply) < count:
        reply.append(sample(logits[0], params, len(tokens)))
        if len(reply) < count:
            tokens.append(reply[-1])
            logits = session.decode([tokens])
    return reply


def judge(model: Transformer, outcome: Outcome) -> None:
    """Every token and the logits behind it equal those of one full forward over prompt and reply."""
    prompt = list(outcome.request.prompt)
    full = Session(model, chunk=10_000).score(torch.tensor(prompt + outcome.tokens))
    for index, token in enumerate(outcome.tokens):
        position = len(prompt) + index
        assert torch.equal(outcome.logits[position], full[position - 1]), f"logits for position {position} differ"
        assert token == sample(full[position - 1], outcome.request.sampling, position)


def draw_config(rng: random.Random, **fixed: object) -> EngineConfig:
    """Small random budgets: pages that hold one or a few requests, steps from two rows to many."""
    size = rng.choice((4, 8, 16))
    values: dict[str, object] = {
        "page_tokens": size,
        "pages": -(-96 // size) + rng.randrange(0, 24),
        "max_running": rng.randrange(1, 6),
        "step_cost": rng.choice((2, 5, 16, 200)),
        "mixed_cost": rng.choice((2, 7, 50)),
        "replay": "exact",
        "speculation": rng.choice(("off", 1, 3, 5)),
    }
    return EngineConfig(**{**values, **fixed})  # type: ignore[arg-type]


def draw_requests(rng: random.Random, count: int, *, longest: int = 70, most: int = 14) -> list[Request]:
    """Prompts of 1 to `longest` tokens, many of which share a prefix with another."""
    trunks = [[rng.randrange(4, 256) for _ in range(longest)] for _ in range(2)]
    requests = []
    for index in range(count):
        length = rng.randrange(1, longest)
        shared = rng.randrange(0, length + 1) if rng.random() < 0.8 else 0
        prompt = rng.choice(trunks)[:shared] + [rng.randrange(4, 256) for _ in range(length - shared)]
        sampling = SamplingParams(temperature=rng.choice((0.0, 0.8, 1.5)), seed=rng.randrange(1000))
        requests.append(
            Request(
                prompt=prompt,
                max_tokens=rng.randrange(1, most),
                sampling=sampling,
                ignore_end=True,
                priority=rng.choice((0, 0, 0, 1)),
                tenant=rng.choice(("a", "b")),
                client=index,
            )
        )
    return requests
