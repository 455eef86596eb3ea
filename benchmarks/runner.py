"""Runs one benchmark: every case's correctness check first, then its variants interleaved, then the table and the rows.

Owns the order of measurement. A red check ends the run; cases before it, each behind a check of its own, have their rows. Knows
nothing of what the variants compute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase
from benchmarks.rows import Machine, Row, make_row


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of every round of one variant."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value that is reported."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: a large one says that the machine was not quiet."""
        return (max(self.seconds) - min(self.seconds)) / self.median if self.median else 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the printed table."""

    case: str
    variant: str
    value: float
    unit: str
    spread: float | None
    gigabytes_per_s: float | None
    gigaflops_per_s: float | None
    percent: float | None


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Warm each variant once, then time `rounds` rounds; each starts with another variant, so drift hits all."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least 1")
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        variants[name]()
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            _wait_for_device()
            start = time.perf_counter()
            variants[name]()
            _wait_for_device()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(seconds=tuple(values)) for name, values in seconds.items()}


def measure(
    benchmark: Benchmark,
    options: Options,
    machine: Machine,
    command: str,
    keep: Callable[[Row], object] = lambda row: None,
) -> tuple[list[Line], list[Row]]:
    """All cases of a benchmark; `keep` gets each row as it is measured, so that a run that is cut loses one case.

    Raises `WrongResult` (from a check) before anything of that case is timed.
    """
    lines: list[Line] = []
    rows: list[Row] = []
    for case in benchmark.build(options):
        case.check()
        new_lines, row = _measure_case(benchmark.name, case, options, machine, command)
        lines += new_lines
        rows.append(row)
        keep(row)
    if not rows:
        raise ValueError(f"benchmark {benchmark.name} yielded no case")
    return lines, rows


def _measure_case(bench: str, case: Case, options: Options, machine: Machine, command: str) -> tuple[list[Line], Row]:
    if isinstance(case, CountedCase):
        value, peers = float(case.count()), dict(case.peers or {})
        row = make_row(machine, bench, case.name, value, case.unit, case.better, floor=case.floor, peers=peers, command=command)
        line = Line(
            case=case.name, variant="", value=value, unit=case.unit, spread=None, gigabytes_per_s=None,
            gigaflops_per_s=None, percent=row.percent_of_floor,
        )  # fmt: skip
        return [line], row
    timings = interleave(case.variants, options.rounds)
    values = {name: case.value(timing.median) for name, timing in timings.items()}
    peers = {name: value for name, value in values.items() if name != case.subject}
    floor = case.floor if case.floor_variant is None else values[case.floor_variant]
    row = make_row(
        machine, bench, case.name, values[case.subject], case.unit, case.better, floor=floor, peers=peers,
        command=command,
    )  # fmt: skip
    return [_timed_line(case, name, timing, row) for name, timing in timings.items()], row


def _timed_line(case: TimedCase, name: str, timing: Timing, row: Row) -> Line:
    return Line(
        case=case.name,
        variant=name,
        value=case.value(timing.median),
        unit=case.unit,
        spread=timing.spread,
        gigabytes_per_s=None if case.moved_bytes is None else case.moved_bytes * case.calls / timing.median / 1e9,
        gigaflops_per_s=None if case.flops is None else case.flops * case.calls / timing.median / 1e9,
        percent=row.percent_of_floor if name == case.subject else None,
    )


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
