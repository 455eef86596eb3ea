"""Verify steps and speculative decode of `v41-flash-slim` on a card (imported only where Triton is): timed, in one process.

Acceptance is simulated, since weights are noise: `RATE` a draft, `TOKENS_A_STEP` tokens a verify step of a whole block. Knows
no list of cases and keeps no rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.cases import WrongResult
from benchmarks.slim import Case
from benchmarks.slim_cases import random_state
from kvist.engine.card.device_model import Batch, DeviceModel
from kvist.engine.card.speculate import Cycle, Luck, Speculation
from kvist.engine.card.weights import CardWeights
from kvist.engine.speculation import AdaptivePolicy, FixedPolicy, VerifyPolicy

RATE = 0.7775
TOKENS_A_STEP = 3.5
MOST_ROWS = 7
REPLAYS = 24


@dataclass(frozen=True, kw_only=True)
class Speculative:
    """Milliseconds a token of one request: plain decode, and speculation with the engine's policy; and what the policy did."""

    plain_ms: float
    speculative_ms: float
    tokens_a_cycle: float
    rows_a_request: float
    drafting_ms: float


def measure_verify(
    weights: CardWeights, case: Case, said: Callable[[str], None], counts: Sequence[int] = range(1, MOST_ROWS + 1)
) -> dict[int, float]:
    """Milliseconds of a step by rows a request, at the case's batch and context. Raises `WrongResult`."""
    state = random_state(weights.config, case, weights.embed.device, rows=MOST_ROWS)
    model = DeviceModel(weights, state)
    found = {}
    for rows in counts:
        held = model.buffers(case.batch, rows)
        tokens = tuple(
            (1000 + 37 * run + 101 * at) % weights.config.vocab_size for run in range(case.batch) for at in range(rows)
        )
        positions = (case.context - MOST_ROWS,) * case.batch
        slots = tuple(range(case.batch))
        held.fill(Batch(tokens=tokens, positions=positions, slots=slots, lengths=(rows,) * case.batch), state.spare)
        step = model.runner(held, case.context, advance=False)
        found[rows] = _replays(step)
        if not bool(torch.isfinite(held.logits_MV).all()):
            raise WrongResult(f"{case.name}, {rows} rows: logits are not finite")
        said(f"verify {case.batch} x {rows} rows at {case.context:,}: {found[rows]:.3f} ms")
    return found


def _replays(step: Callable[[], object]) -> float:
    for _ in range(3):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def measure_speculation(weights: CardWeights, case: Case, said: Callable[[str], None], *, tokens: int = 400) -> Speculative:
    """Loops of about `tokens` tokens a request that end before the case's context: plain, then with the policy."""
    device = weights.embed.device
    state = random_state(weights.config, case, device, rows=MOST_ROWS)
    model = DeviceModel(weights, state)
    block = weights.config.dspark_block_size
    luck = Luck((RATE,) * block, device)
    runs: dict[str, VerifyPolicy] = {"plain": FixedPolicy(0), "speculative": AdaptivePolicy(block, case.batch)}
    found: dict[str, tuple[float, list[Cycle]]] = {}
    # One set of graphs serves both: a policy is the host's affair.
    both = Speculation(model, runs["plain"], case.batch, reach=case.context, luck=luck)
    both.prepare()
    for name, policy in runs.items():
        both.policy = policy
        first = case.context - tokens - 2 * block - 8
        starts = [1000 + 37 * run for run in range(case.batch)]
        both.begin(starts, [first] * case.batch, list(range(case.batch)), filled=False)
        cycles: list[Cycle] = []
        wanted, start = tokens * case.batch, time.perf_counter()
        while sum(cycle.tokens for cycle in cycles) < wanted and max(both.positions) < case.context - block - 2:
            cycles.append(both.cycle())
        gained = sum(cycle.tokens for cycle in cycles) / case.batch
        found[name] = (1e3 * (time.perf_counter() - start) / gained, cycles)
        said(
            f"{name} {case.batch} x {case.context:,}: {found[name][0]:.3f} ms a token, {len(cycles)} cycles, {gained:.0f} tokens"
        )
    cycles = found["speculative"][1]
    drafted = [cycle for cycle in cycles if cycle.drafting]
    return Speculative(
        plain_ms=found["plain"][0], speculative_ms=found["speculative"][0],
        tokens_a_cycle=sum(cycle.tokens for cycle in cycles) / len(cycles) / case.batch,
        rows_a_request=sum(cycle.rows for cycle in cycles) / len(cycles) / case.batch,
        drafting_ms=1e3 * statistics.median(cycle.drafting for cycle in drafted) if drafted else 0.0,
    )  # fmt: skip
