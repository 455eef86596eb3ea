"""What a benchmark consists of: cases that carry their own correctness check, their variants and their limit.

Owns the two case types and the arithmetic from seconds to a row's value. Knows nothing of how runs are timed or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]


class WrongResult(Exception):
    """A variant computes something else than its reference; nothing of the benchmark is reported."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line passes to a benchmark: timed rounds a variant, and whether to use reduced sizes."""

    rounds: int = 5
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """One workload run by several interchangeable variants; the median time of `subject` becomes the row's value.

    `variants` maps a name to one complete run; all must do the same work. `check` raises `WrongResult` if a variant
    disagrees with the reference. `work` with unit `tokens/s`, `rows/s`, ... is divided by the time; without it the
    value is the time itself in microseconds. `floor` is the physical limit in the unit of the value; `floor_variant` names a
    variant whose value is the limit instead, timed in the same rounds, where the limit changes with who else uses the machine.
    `moved_bytes` and `flops` are those of one run and fill the table's rate columns. A run that consists of `calls` equal
    calls (a replayed graph) reports one call: value, floor, work, bytes and operations are those of a call.
    """

    name: str
    variants: Mapping[str, Callable[[], object]]
    subject: str
    check: Callable[[], None]
    work: float | None = None
    unit: str = "us"
    floor: float | None = None
    floor_variant: str | None = None
    moved_bytes: float | None = None
    flops: float | None = None
    calls: int = 1

    def __post_init__(self) -> None:
        if self.subject not in self.variants:
            raise ValueError(f"case {self.name}: subject {self.subject!r} is not among {sorted(self.variants)}")
        if self.floor_variant is not None and (self.floor is not None or self.floor_variant not in self.variants):
            raise ValueError(
                f"case {self.name}: the limit is a number or one of {sorted(self.variants)}, got {self.floor_variant!r}"
            )
        if (self.work is None) != (self.unit == "us"):
            raise ValueError(f"case {self.name}: a rate needs work and a unit, a time (us) neither; got {self.unit!r}")

    @property
    def better(self) -> Better:
        """Rates grow, times shrink."""
        return "lower" if self.work is None else "higher"

    def value(self, seconds: float) -> float:
        """The row's value for a run of `seconds`: microseconds, or work a second."""
        each = seconds / self.calls
        return each * 1e6 if self.work is None else self.work / each


@dataclass(frozen=True, kw_only=True)
class CountedCase:
    """A quantity that is read or counted, not timed: kernels a token, peak bytes, an acceptance length.

    `count` returns the value; `check` raises `WrongResult`; `peers` holds the same quantity of other systems.
    """

    name: str
    count: Callable[[], float]
    check: Callable[[], None]
    unit: str
    better: Better
    floor: float | None = None
    peers: Mapping[str, float] | None = None


Case = TimedCase | CountedCase


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named set of cases. `build` prepares inputs and yields them one after another, so that memory is released."""

    name: str
    summary: str
    build: Callable[[Options], Iterable[Case]]


def percent_of_floor(value: float, floor: float | None, better: Better) -> float | None:
    """How near the limit a value comes, in percent; 100 is the limit whichever direction is better."""
    if floor is None or value <= 0 or floor <= 0:
        return None
    return 100.0 * (value / floor if better == "higher" else floor / value)
