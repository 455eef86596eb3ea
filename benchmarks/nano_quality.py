"""What nano says: greedy draft acceptance and sampled words, end to end on the packed file, on works it has not seen.

Needs the tokenised corpus under `data/tokens` (`python -m kvist.train.corpus`). Verification is greedy, so that drafting never
changes the text: plain decode gives the tokens, and a draft counts as far as it agrees with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from benchmarks.cases import Benchmark, Case, CountedCase, Options, WrongResult
from benchmarks.nano_model import nano, weights_label
from benchmarks.rows import ROOT
from kvist.engine.sampler import SamplingParams, sample
from kvist.engine.session import Sequence, Session
from kvist.text.tokenizer import Tokenizer
from kvist.train.sampling import Corpus

TIERS = ("prose", "docs", "code")
PROMPT_TOKENS, PROMPTS, NEW_TOKENS = 200, 6, 64
CONTINUATIONS, CONTINUATION_TOKENS, CONTINUATION_PROMPT = 20, 120, 64
WORD = re.compile(r"[A-Za-z]+")


@cache
def corpus(split: str) -> Corpus:
    """Token ids of one split. ValueError with the way to build them if they are not there."""
    return Corpus(ROOT / "data" / "tokens", split)


def prompts(tier: str, count: int, length: int) -> list[torch.Tensor]:
    """Evenly spread pieces of the held-out tier, each after a begin token."""
    ids = corpus("heldout").ids[tier]
    starts = np.linspace(1, len(ids) - length - 1, count + 2).astype(int)[1:-1]
    begin = nano("cpu").config.bos_token_id
    return [torch.tensor([begin, *ids[s : s + length - 1].tolist()]) for s in starts]


def accepted_runs(prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Drafts accepted by each verification of one greedy continuation."""
    session, runs = Session(nano("cpu")), list[int]()
    with session.slot() as slot:
        sequence = Sequence(slot, prompt)
        token = int(session.prefill([sequence])[0].argmax())
        proposed: list[int] = []
        for _ in range(new_tokens):
            if not proposed:
                proposed = session.draft([sequence], [token]).tokens_RB[0].tolist()
                runs.append(0)
            sequence.append(token)
            token = int(session.decode([sequence])[0].argmax())
            if proposed[0] == token:
                runs[-1] += 1
                proposed = proposed[1:]
            else:
                proposed = []
    return runs


def tokens_a_verification(tier: str, count: int) -> float:
    """Mean tokens that one verification emits: accepted drafts and its own token."""
    runs = [run for prompt in prompts(tier, count, PROMPT_TOKENS) for run in accepted_runs(prompt, NEW_TOKENS)]
    return 1 + sum(runs) / len(runs)


@cache
def known_words() -> frozenset[str]:
    """All alphabetic words of the training text, lower case."""
    tokenizer, words = Tokenizer(ROOT / "models" / "nano"), set[str]()
    for tier in TIERS:
        ids, offsets = corpus("train").ids[tier], corpus("train").offsets[tier]
        for first, stop in pairwise(offsets):
            words.update(word.lower() for word in WORD.findall(tokenizer.decode(ids[first:stop].tolist())))
    return frozenset(words)


def continuation(prompt: torch.Tensor, seed: int) -> str:
    """Text sampled at temperature 0.8."""
    session, tokenizer, ids = Session(nano("cpu")), Tokenizer(ROOT / "models" / "nano"), list[int]()
    params = SamplingParams(temperature=0.8, seed=seed)
    with session.slot() as slot:
        sequence = Sequence(slot, prompt)
        logits = session.prefill([sequence])
        while len(ids) < CONTINUATION_TOKENS:
            ids.append(sample(logits[0], params, len(sequence)))
            if ids[-1] == session.model.config.eos_token_id:
                break
            sequence.append(ids[-1])
            logits = session.decode([sequence])
    return tokenizer.decode(ids)


def known_share() -> float:
    """Percent of the sampled words that occur in the training text. The first and last word may be cut and do not count."""
    pieces = [prompt for tier in TIERS for prompt in prompts(tier, 7, CONTINUATION_PROMPT)][:CONTINUATIONS]
    words = [w.lower() for seed, p in enumerate(pieces) for w in WORD.findall(continuation(p, seed))[1:-1]]
    known = known_words()
    print(f"{len(words)} words; unknown: {' '.join(sorted({w for w in words if w not in known}))}")
    return 100 * sum(word in known for word in words) / len(words)


def _trained() -> None:
    if weights_label() != "trained":
        raise WrongResult("models/nano holds no trained weights")


def _build(options: Options) -> Iterator[Case]:
    count = 2 if options.quick else PROMPTS
    for tier in TIERS:
        yield CountedCase(
            name=f"greedy drafts, {tier}",
            count=lambda tier=tier: tokens_a_verification(tier, count),  # type: ignore[misc]
            check=_trained,
            unit="tokens a verification",
            better="higher",
        )
    if not options.quick:
        yield CountedCase(name="sampled words known from training", count=known_share, check=_trained, unit="%", better="higher")


BENCHMARK = Benchmark(
    name="nano-quality",
    summary="nano on held-out works: tokens a greedy verification, share of sampled words that the training text has",
    build=_build,
)
