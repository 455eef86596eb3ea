"""Prefill and bounded replay of `v41-flash-slim` on a card (imported only where Triton is): gate, random prompts, times.

Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from benchmarks.cases import WrongResult
from benchmarks.slim import CHUNK, Case
from benchmarks.slim_cases import random_state
from kvist.engine.card import cost
from kvist.engine.card.check import released_heads_config
from kvist.engine.card.check_prefill import PrefillBeside
from kvist.engine.card.device_model import DeviceModel
from kvist.engine.card.passes import Ints, Prompt
from kvist.engine.card.prefill import Prefill
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights
from kvist.engine.replay import replay_span

LONG_MS = 3000
"""Prompts that take longer run once; others several times."""
ROUNDS = 5
REPLAYS = 5


def prefill_gate(device: torch.device, said: Callable[[str], None]) -> None:
    """Prefill in chunks, hits and resuming beside the reference, decode behind them, at the released heads."""
    contexts, hits = (620, 131), (390, 64)
    both = PrefillBeside(released_heads_config(), contexts, 1, chunk=300, page_tokens=None, device=device)
    found = [both.compare(both.cold(hits)), both.compare(both.resumed(contexts, hits)), both.compare(both.hits(contexts, hits))]
    for one in found:
        if one.faults():
            raise WrongResult(f"prefill is off: {one.faults()} ({one})")
    (step,) = both.run()
    if not statistics.median(step.layers) < 0.03:
        raise WrongResult(f"decode behind a prefill is off: layers {step.layers}")
    said(f"prefill's gate passed: {found[-1]}")


def random_ids(weights: CardWeights, count: int, seed: int) -> Ints:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(4, weights.config.vocab_size - 1, count, dtype=np.int64)


def measure_prefill(weights: CardWeights, case: Case, chunk: int | None, said: Callable[[str], None]) -> tuple[float, str]:
    """Milliseconds from a prompt of the case's context to the logits behind it, and what to report."""
    config, device = weights.config, weights.embed.device
    size = config.plan.page_tokens
    count = -(-case.context // size)
    state = CardState(config, slots=1, pages=count, most_tokens=count * size, device=device)
    state.open(0, torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist())
    prefill = Prefill(DeviceModel(weights, state), chunk=chunk or CHUNK)
    ids = random_ids(weights, case.context, 1)

    span = replay_span(config.plan, case.context, 0, "bounded")

    def run(first: int = 0) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits_RV, _ = prefill.run([Prompt.replayed(0, ids, dataclasses.replace(span, start=first))])
        torch.cuda.synchronize()
        taken = 1e3 * (time.perf_counter() - start)
        if not bool(torch.isfinite(logits_RV).all()):
            raise WrongResult(f"{case.name}: logits are not finite")
        return taken

    # The first passes and the last two as they will be: every kernel is built.
    run(max(0, -(-case.context // prefill.chunk) - 2) * prefill.chunk)
    for _ in itertools.islice(prefill.passes([Prompt.replayed(0, ids, span)]), 2):
        pass
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = [run()]
    said(f"timed: {times[0]:,.1f} ms")
    while times[0] < LONG_MS and len(times) < ROUNDS:
        times.append(run())
    beside, value = torch.cuda.max_memory_allocated() - held, statistics.median(times)
    text = (
        f"{value:,.1f} ms (of {len(times)}: {min(times):,.1f} to {max(times):,.1f}), {1e3 * case.context / value:,.0f} tokens/s "
        f"in passes of {prefill.chunk}; memory beside weights: state {state.nbytes / 1e9:.2f} GB, passes {beside / 1e9:.2f} GB "
        f"(counted {cost.pass_bytes(config, prefill.chunk) / 1e9:.2f})"
    )
    return value, text


def hit_prompts(weights: CardWeights, case: Case) -> tuple[list[Prompt], list[Prompt]]:
    """Hits whose windows are rebuilt, and the same hits with windows in the rings."""
    plan, total = weights.config.plan, case.context + case.suffix
    ids = [random_ids(weights, total, slot) for slot in range(case.batch)]
    span = replay_span(plan, total, case.context, "bounded")
    replayed = [Prompt.replayed(slot, ids[slot], span) for slot in range(case.batch)]
    return replayed, [Prompt.resumed(slot, ids[slot], case.context, plan.window) for slot in range(case.batch)]


def measure_replay(weights: CardWeights, case: Case, said: Callable[[str], None]) -> tuple[float, float, str]:
    """Milliseconds of one pass over all hits: replayed, and resumed with stored windows; what to report."""
    whole = dataclasses.replace(case, context=case.context + case.suffix)
    state = random_state(weights.config, whole, weights.embed.device)
    rows, _ = cost.replay_rows(weights.config, case.batch, case.suffix)
    prefill = Prefill(DeviceModel(weights, state), chunk=max(rows))
    both = dict(zip(("replayed", "stored"), hit_prompts(weights, case), strict=True))
    made = {}
    for name, prompts in both.items():
        made[name] = prefill.captured(prompts)
        said(f"captured: {name}")
    times = _interleaved({name: partial(again, both[name]) for name, (again, _) in made.items()})
    for name, (_, logits_RV) in made.items():
        if not bool(torch.isfinite(logits_RV).all()):
            raise WrongResult(f"{case.name}, {name}: logits are not finite")
    plain = _interleaved({name: partial(prefill.run, prompts) for name, prompts in both.items()})
    value, stored = times["replayed"], times["stored"]
    text = (
        f"{value:.2f} ms, with stored windows {stored:.2f}: {value / stored:.2f}x; without graphs {plain['replayed']:.2f} and "
        f"{plain['stored']:.2f}; rows of both halves {cost.replay_rows(weights.config, case.batch, case.suffix)}"
    )
    return value, stored, text


def _interleaved(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each, from one call's begin to the next one's, in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        variant()
    for _ in range(REPLAYS):
        for name, variant in variants.items():
            torch.cuda.synchronize()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            variant()
            marks[1].record()
            torch.cuda.synchronize()
            times[name] += [a.elapsed_time(b) for a, b in pairwise(marks)]
    return {name: statistics.median(line) for name, line in times.items()}
