"""`engine-modes`: what `deterministic` mode costs nano's decode, and how often the default mode's tokens depend on company.

The checks: in deterministic mode with exact replay no token does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase, WrongResult
from benchmarks.engine_speed import STREAMS, decode, list_tokens, text_prompts
from benchmarks.nano_model import nano, weights_label
from benchmarks.rows import ROOT
from kvist.checkpoint import build_model
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.request import Request
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

PROMPT, TOKENS, ALONE = 24, 16, 3


@cache
def deterministic() -> Transformer:
    """nano with operators whose rows never depend on their batch."""
    numerics = Numerics(deterministic=True, impl="cpu")
    if weights_label() == "trained":
        return build_model(ROOT / "models" / "nano", numerics=numerics)
    return random_model(preset("nano"), numerics, seed=1)


def fresh(model: Transformer) -> Engine:
    """An engine with an empty cache and room for all."""
    return Engine(model, EngineConfig(pages=200, max_running=STREAMS, step_cost=1024, replay="exact", speculation="off"))


def check_deterministic(prompts: list[list[int]]) -> None:
    """Replies alone and in company are the same. Raises `WrongResult`."""
    together = list_tokens(fresh(deterministic()), prompts, 8)
    for number in range(ALONE):
        alone = list_tokens(fresh(deterministic()), [prompts[number]], 8)[0]
        if alone != together[number]:
            raise WrongResult(f"deterministic: request {number} gives {alone} alone and {together[number]} in company")


def _build(options: Options) -> Iterator[Case]:
    prompts = text_prompts(STREAMS, PROMPT)
    engines = {}
    for name, model in (("deterministic", deterministic()), ("default", nano("cpu"))):
        engines[name] = fresh(model)
        for ids in prompts:
            engines[name].add(Request(prompt=ids, max_tokens=(options.rounds + 3) * TOKENS, ignore_end=True))
        while any(len(job) == job.prompt_length for job in engines[name].jobs.values()):
            engines[name].step()
    yield TimedCase(
        name=f"decode, {STREAMS} requests, {weights_label()}",
        variants={name: (lambda made=made: decode(made, STREAMS * TOKENS)) for name, made in engines.items()},  # type: ignore[misc]
        subject="deterministic",
        check=lambda: check_deterministic(prompts),
        work=STREAMS * TOKENS,
        unit="tokens/s",
    )
    together = list_tokens(fresh(nano("cpu")), prompts, 64)
    alone = [list_tokens(fresh(nano("cpu")), [ids], 64)[0] for ids in prompts]
    first = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 64) for x, y in zip(alone, together, strict=True)
    ]
    yield CountedCase(
        name=f"default mode: greedy tokens until the first that company changed, of 64, {weights_label()}",
        count=lambda: sum(first) / len(first),
        check=lambda: None,
        unit="tokens",
        better="higher",
        floor=64,
        peers={"share of replies unchanged": sum(place == 64 for place in first) / len(first)},
    )


BENCHMARK = Benchmark(
    name="engine-modes",
    summary="cost of deterministic mode, and how often default tokens depend on company",
    build=_build,
)
