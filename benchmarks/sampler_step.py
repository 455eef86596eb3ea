"""`sampler-step`: the sampler's share of a step, 16 and 64 rows, the vocabularies of nano (7,168) and the release (129,280).

Logits fall with the rank as those of language models do (about 2 nats of entropy at temperature 1). The check draws every row
alone and in the batch: the same tokens. Time grows with the rows by design; the release's rows of a GPU step are copied to the
host first, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import Benchmark, Options, TimedCase, WrongResult
from kvist.engine.sampler import Mask, SamplingParams, choose
from kvist.engine.sampling.history import History

POSITION = 1000


def logits(rows: int, size: int) -> Tensor:
    """float32 [rows, size]: minus 1.6 times the logarithm of the rank, with noise, in an order of each row's own."""
    generator = torch.Generator().manual_seed(size)
    ranked = -1.6 * torch.arange(1, size + 1).float().log() + 0.3 * torch.randn(rows, size, generator=generator)
    order = torch.stack([torch.randperm(size, generator=generator) for _ in range(rows)])
    return torch.zeros(rows, size).scatter_(1, order, ranked)


def wishes(kind: str, rows: int) -> list[SamplingParams]:
    """One row's parameters each, differing in the seed."""
    options: dict[str, dict[str, float]] = {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "top-p": {"temperature": 0.8, "top_p": 0.95},
        "everything": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "logprobs": 5},
    }
    return [SamplingParams(seed=seed, **options[kind]) for seed in range(rows)]  # type: ignore[arg-type]


def state(kind: str, rows: int, size: int) -> tuple[list[History | None], list[Mask | None]]:
    """Histories of 2,000 prompt and 500 reply tokens, and masks that allow every second run of 8 ids, for `everything`."""
    if kind != "everything":
        return [None] * rows, [None] * rows
    histories: list[History | None] = []
    for row in range(rows):
        dice = np.random.default_rng(row)
        history = History(dice.integers(0, size, 2000))
        for token in dice.integers(0, size, 500).tolist():
            history.append(token)
        histories.append(history)
    mask = np.tile(np.array([0xFF, 0], np.uint8), (size + 15) // 16)
    return histories, [mask] * rows


def case(kind: str, rows: int, size: int) -> TimedCase:
    """A batch drawn together, against the same rows one call each."""
    x_RV, params, positions = logits(rows, size), wishes(kind, rows), [POSITION + row for row in range(rows)]
    histories, masks = state(kind, rows, size)

    def together() -> list[int]:
        return [choice.token for choice in choose(x_RV, params, positions, histories, masks)]

    def alone() -> list[int]:
        parts: Iterator[slice] = (slice(row, row + 1) for row in range(rows))
        return [choose(x_RV[p], params[p], positions[p], histories[p], masks[p])[0].token for p in parts]

    def check() -> None:
        if together() != alone():
            raise WrongResult(f"{kind}, {rows} rows of {size}: a row's token depends on its batch")

    variants: dict[str, Callable[[], object]] = {"together": together, "one by one": alone}
    return TimedCase(name=f"{kind}, {rows} rows of {size}", variants=variants, subject="together", check=check)


def build(options: Options) -> Iterator[TimedCase]:
    """Every kind at every size; quick: the small vocabulary only."""
    for size in (7168,) if options.quick else (7168, 129280):
        for rows in (16, 64):
            for kind in ("greedy", "temperature", "top-p", "everything"):
                yield case(kind, rows, size)


BENCHMARK = Benchmark(
    name="sampler-step", summary="tokens of a step from logits: greedy, sampled, with everything on", build=build
)
