"""One decode case of `v41-flash-slim` on the card (imported only where Triton is): gate, random state, timed replays.

Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

from benchmarks.cases import WrongResult
from benchmarks.slim import TIMED_STEPS, WARM_STEPS, Case
from kvist.config import ModelConfig
from kvist.engine.card.check import Beside, released_heads_config
from kvist.engine.card.device_model import Batch, DeviceModel
from kvist.engine.card.launches import count_launches
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights

WORST_LAYER, WORST_LOGITS, NEAR_TIE = 0.2, 0.5, 0.2


def gate(device: torch.device, said: Callable[[str], None]) -> None:
    """The card's decode beside the reference, at the released heads: raises `WrongResult` beyond the bounds of the test.

    Logits are judged where the reference's own stand when it is moved a little (`Beside.spread`), as in the test.
    """
    both = Beside(released_heads_config(), (130, 67), 2, page_tokens=None, device=device)
    layers, judged = 0.0, []
    for number in range(both.steps):
        spread, step = both.spread(number), both.step(number)
        layers = max(layers, *step.layers)
        judged += step.judged(spread, NEAR_TIE)
    worst = max(judged, default=0.0)
    if not (layers < WORST_LAYER and worst < WORST_LOGITS):
        raise WrongResult(f"decode is off: layers by {layers:.3f}, logits by {judged}")
    said(f"gate passed: layers within {layers:.3f}, logits of {len(judged)} rows within {worst:.3f} of the reference")


def table_rows(config: ModelConfig, engram_gb: float | None) -> int:
    """Rows of each Engram table: a power of two (pinned memory comes in such), a quarter of what the host has free at most."""
    if not config.engram_layer_ids:
        return 0
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = free / 4 if engram_gb is None else engram_gb * 1e9
    width = config.engram_head_dim + config.engram_head_dim // 32
    rows = int(room / len(config.engram_layer_ids) / width)
    if rows < 1024:
        raise ValueError(f"Engram tables of {room / 1e9:.3f} GB hold {rows} rows each; at least 1,024 are wanted")
    return min(1 << (rows.bit_length() - 1), min(config.engram_num_embeddings))


def random_state(config: ModelConfig, case: Case, device: torch.device, rows: int = 1) -> CardState:
    """Requests in the midst of contexts of random rows; the last page is a request's own, the others may be shared.

    `rows`: the most of a request that a step takes back.
    """
    size = config.plan.page_tokens
    each = -(-case.context // size)
    pages = case.distinct * each + case.batch
    state = CardState(config, slots=case.batch, pages=pages, most_tokens=each * size, device=device, rows=rows)
    source = torch.Generator(device).manual_seed(1)
    pool = state.rows.bytes_PB
    pool.random_(0, 256, generator=source)
    for planes in state.rows.sources.values():
        # E4M3 scales of 1/4 to 2, E8M0 scales of 2^-3 to 1.
        planes.main_scales.random_(0x28, 0x40, generator=source)
        planes.key_scales.random_(124, 128, generator=source)
    state.codes.random_(0, 256, generator=source).bitwise_and_(0xBF)
    state.scales.random_(124, 128, generator=source)
    if state.history.shape[1] and config.engram_layer_ids:
        state.history.random_(0, config.engram_compressed_vocab_size, generator=source)
    order = torch.randperm(case.distinct * each, generator=torch.Generator().manual_seed(2)).view(case.distinct, each)
    own = case.distinct * each
    for slot in range(case.batch):
        history = state.history[slot].clone()
        state.open(slot, [*order[slot % case.distinct, : each - 1].tolist(), own + slot])
        state.history[slot] = history
    return state


def measure(weights: CardWeights, case: Case, said: Callable[[str], None]) -> tuple[list[float], dict[str, int]]:
    """Milliseconds of each timed step of a greedy loop that ends at the case's context, and launches by role.

    Raises `WrongResult` for logits that are not finite.
    """
    config, device = weights.config, weights.embed.device
    state = random_state(config, case, device)
    model = DeviceModel(weights, state)
    held = model.buffers(case.batch)
    first = case.context - WARM_STEPS - TIMED_STEPS
    rows = range(case.batch)
    tokens = tuple(1000 + 37 * slot for slot in rows)
    begin = Batch(tokens=tokens, positions=(first,) * case.batch, slots=tuple(rows))
    held.fill(begin, state.spare)
    step = model.runner(held, case.context, advance=True)
    said(f"captured: batch {case.batch} (bucket {held.size}), {case.context:,} tokens; state {state.nbytes / 1e9:.2f} GB")
    for _ in range(WARM_STEPS):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    if not bool(torch.isfinite(held.logits_MV[: case.batch]).all()):
        raise WrongResult(f"{case.name}: logits are not finite")
    if held.positions_M[: case.batch].tolist() != [case.context] * case.batch:
        raise WrongResult(f"{case.name}: positions stand at {held.positions_M.tolist()}, not at {case.context}")
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    said(f"timed: {statistics.median(times):.3f} ms a step")
    held.fill(begin, state.spare)  # the loop ended where the table of pages ends
    return times, count_launches(model, held, case.context)
