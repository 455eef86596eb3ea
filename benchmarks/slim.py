"""`kvist bench v41-flash-slim`: decode steps of the released widths with 128 experts a layer, random weights, on one card.

Owns the cases, what fits, which are done, and the report; the runner is `kvist.engine.card`. Every figure carries the words
of `LABEL`: it is a proxy, and stands beside no published figure without them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from benchmarks.gpu_timing import HBM_BYTES_PER_S
from benchmarks.rows import RESULTS, Machine, Row, append, load, make_row
from kvist.config import ModelConfig
from kvist.engine.card import cost
from kvist.presets import preset

BENCH = "v41-flash-slim"
LABEL = "128 of 384 experts, random weights, one card"
CONTEXTS = (8192, 131072, 524288, 1048576)
BATCHES = (1, 4, 16, 64)
PARTS = ("decode",)
FEW_CONTEXTS = 8
"""Distinct contexts of a batch whose own ones would not fit; the requests share them, and the case says so."""
SPARE_BYTES = 6e9
"""Device memory left to libraries, graphs and what a step makes."""
WARM_STEPS, TIMED_STEPS = 4, 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode measurement; `distinct` contexts of the batch have pages of their own."""

    batch: int
    context: int
    distinct: int
    overlap: bool = False

    @property
    def name(self) -> str:
        """The case as rows name it."""
        shared = "" if self.distinct == self.batch else f" ({self.distinct} distinct contexts shared by the rows)"
        beside = ", shared expert beside routed" if self.overlap else ""
        return f"decode, {self.batch} x {self.context:,} tokens{shared}{beside}; {LABEL}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a command asked for; `None`: the default list (8K and 128K, batch 1), `every`: all contexts and batches."""

    only: str | None = None
    context: int | None = None
    batch: int | None = None
    every: bool = False
    budget_minutes: float = 8.5
    engram_gb: float | None = None
    again: bool = False
    overlap: bool = False


def needed_bytes(config: ModelConfig, case: Case) -> float:
    """Device memory of a case."""
    return cost.weight_bytes(config) + cost.state_bytes(config, case.batch, case.context, case.distinct) + SPARE_BYTES


def cases_of(config: ModelConfig, wanted: Wanted, device_bytes: float) -> list[Case]:
    """The cases in order, cheapest first. Raises ValueError for a part that is not built, or sizes out of range."""
    if wanted.only is not None and wanted.only not in PARTS:
        raise ValueError(f"--only {wanted.only!r} is not built; measured so far: {', '.join(PARTS)}")
    contexts: tuple[int, ...] = CONTEXTS if wanted.every else (8192, 131072)
    batches: tuple[int, ...] = BATCHES if wanted.every else (1,)
    if wanted.context is not None:
        least = 2 * (WARM_STEPS + TIMED_STEPS)
        if not least <= wanted.context <= config.max_seq_len:
            raise ValueError(f"--context is {wanted.context}; from {least} to {config.max_seq_len} tokens")
        contexts = (wanted.context,)
    if wanted.batch is not None:
        if not 1 <= wanted.batch <= BATCHES[-1]:
            raise ValueError(f"--batch is {wanted.batch}; from 1 to {BATCHES[-1]} requests")
        batches = (wanted.batch,)
    cases = []
    for batch in batches:
        for context in contexts:
            case = Case(batch=batch, context=context, distinct=batch, overlap=wanted.overlap)
            if needed_bytes(config, case) > device_bytes and batch > FEW_CONTEXTS:
                case = replace(case, distinct=FEW_CONTEXTS)
            cases.append(case)
    return cases


def run(wanted: Wanted, command: str, console: Console) -> list[Row]:
    """Check, measure what is not measured yet at this commit, keep the rows. Raises GpuUnavailable, ValueError, WrongResult."""
    import torch

    from kvist.kernels.device import GpuUnavailable, interpreted, require_gpu

    config = preset(BENCH)
    need = needed_bytes(config, Case(batch=1, context=CONTEXTS[0], distinct=1))
    cases_of(config, wanted, need)
    where = f"{BENCH} needs one CUDA card of compute capability 9.0 or newer with {need / 1e9:.0f} GB of memory"
    if interpreted():
        raise GpuUnavailable(f"{where}; TRITON_INTERPRET=1 runs kernels without one, which measures nothing")
    try:
        require_gpu()
    except GpuUnavailable as error:
        raise GpuUnavailable(f"{where}: {error}. `kvist plan {BENCH}` runs anywhere") from error
    torch.cuda.set_device(0)
    free, _ = torch.cuda.mem_get_info()
    cases = cases_of(config, wanted, free)
    _show_plan(config, cases, free, console)
    machine = Machine.here()
    done = set() if wanted.again else _done(machine)
    todo = [case for case in cases if needed_bytes(config, case) <= free and case.name not in done]
    for case in cases:
        if case.name in done:
            console.print(f"measured at this commit already: {case.name}", highlight=False)
    if not todo:
        return []
    stop = time.monotonic() + 60 * wanted.budget_minutes
    rows = []
    for row in _measure(config, todo, wanted, stop, machine, command, console):
        append([row], machine.key)
        rows.append(row)
    left = len(todo) - len(rows)
    if left:
        console.print(
            f"{left} cases left when the budget of {wanted.budget_minutes} minutes ended; the same command goes on there"
        )
    return rows


def _done(machine: Machine) -> set[str]:
    """Cases that this commit has been measured with on such a card; a changed tree, or one without history, never was."""
    if machine.commit.endswith(("-dirty", "unknown")) or not RESULTS.exists():
        return set()
    return {row.case for key, row in load() if key == machine.key and row.bench == BENCH and row.commit == machine.commit}


def _show_plan(config: ModelConfig, cases: list[Case], free: float, console: Console) -> None:
    console.print(f"{BENCH}: {LABEL}; {free / 1e9:.1f} GB of device memory free", highlight=False)
    for case in cases:
        moved, need = cost.step_bytes(config, case.batch, case.context), needed_bytes(config, case)
        fits = "" if need <= free else ", DOES NOT FIT"
        console.print(
            f"  {case.name}: {moved / 1e9:.2f} GB a step, floor {1e3 * moved / HBM_BYTES_PER_S:.2f} ms "
            f"({case.batch * HBM_BYTES_PER_S / moved:,.0f} tokens/s); holds {need / 1e9:.1f} GB{fits}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _measure(
    config: ModelConfig, cases: list[Case], wanted: Wanted, stop: float, machine: Machine, command: str, console: Console
) -> Iterator[Row]:
    """Rows as they are measured, until the budget ends."""
    import torch

    from benchmarks.slim_cases import gate, measure, table_rows
    from kvist.engine.card.random_weights import random_weights

    device, start = torch.device("cuda"), time.monotonic()

    def said(what: str) -> None:
        console.print(f"[{time.monotonic() - start:6.1f} s] {what}", highlight=False, markup=False, soft_wrap=True)

    gate(device, said)
    rows = table_rows(config, wanted.engram_gb)
    weights = random_weights(config, table_rows=rows, device=device)
    torch.cuda.synchronize()
    said(f"weights drawn: {torch.cuda.memory_allocated() / 1e9:.1f} GB on the card; Engram tables: {rows:,} rows")
    for case in cases:
        if time.monotonic() > stop:
            return
        times_ms, counts = measure(weights, case, said)
        value = statistics.median(times_ms)
        floor = 1e3 * cost.step_bytes(config, case.batch, case.context) / HBM_BYTES_PER_S
        launches = ", ".join(f"{role} {count}" for role, count in counts.items())
        spread = f"of {len(times_ms)}: {min(times_ms):.3f} to {max(times_ms):.3f}"
        said(
            f"{case.name}: {value:.3f} ms a step ({spread}), floor {floor:.3f} ({100 * floor / value:.1f} %), "
            f"{1e3 * case.batch / value:,.1f} tokens/s ({LABEL}); launches: {launches}"
        )
        yield make_row(machine, BENCH, case.name, value, "ms", "lower", floor=floor, peers={}, command=command)
