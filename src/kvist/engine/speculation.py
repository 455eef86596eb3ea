"""How many drafts to verify: expected tokens against measured time, so that speculation is never slower than plain decode.

Owns the cost table and the choice. Pure numbers: must not know models, requests or tensors. Report 2.4.3 (confidence head);
the greedy choice over all requests' survival and the trials are our own.

A step over n rows takes t(n) seconds, measured and interpolated. A draft survives with the product of its and its predecessors'
confidences, each corrected by what was seen to be accepted. Verifying the k likeliest drafts of r requests yields r + sum of
their survivals tokens for t(r + k) seconds; k grows while that quotient does, or would with what drafts do on average.
Whether to draft at all is not left to a model: the tokens a second of whole cycles (drafting and verifying) are compared with
r / t(r), by batch size. Where they fall short, plain decode runs, and short trials follow now and then, since texts change.

The bound: what a trial has cost over plain decode of the same tokens is a debt, and the next trial waits until plain steps
have paid it at a rate of `RISK`. So at each batch size all trials but the last cost at most that share of plain decode's time
and `RARELY` of its steps; beside them a step does nothing for drafts but keep what their windows would be computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

RISK = 1 / 200
"""Share of plain decode's time that trials may cost."""
RARELY = 1 / 100
"""Share of steps that may belong to trials, however little they cost."""
SKIPS = 1
"""Trials in a row that are left out because measured times and acceptance promise nothing."""
TRIAL, HOPEFUL = 96, 0.95
"""Cycles of a trial, and the predicted gain from which one is worth it."""
FEWEST, SCATTER = 3, 0.8
"""Tokens of a request and cycle scatter by about half of their mean: after n judged requests a trial may be `SCATTER` / sqrt(n)
short of what pays before it ends early, from `FEWEST` cycles on. A drafter that is never right is seen in three cycles; one that
gains an eighth mostly passes, as it would not if its first dozen cycles decided."""
DEAREST = 10.0
"""Plain steps that a trial may lose before it must be faster than plain decode."""
TURNED = 12
"""Cycles that an end behind a whole trial counts for: texts changed, nothing was tried in vain."""
PLAIN_EVERY = 128
"""Cycles between two plain steps, which keep t(r) measured."""
BLEND = 0.2
SLOW_BLEND = 1 / 96
MARGIN = 1.02
"""Cycles must be this much faster than plain decode: measured times scatter."""


class VerifyPolicy(Protocol):
    """Decides on drafting and verifying."""

    def wants_drafts(self, requests: int) -> bool:
        """Whether to propose drafts for this many requests now."""
        ...

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        """Drafts to verify of each request, given its drafts' survival."""
        ...

    def saw_step(self, requests: int, rows: int, tokens: int, seconds: float) -> None:
        """A step of decode and verify rows only took this long and gave so many tokens."""
        ...

    def saw_drafting(self, requests: int, seconds: float) -> None:
        """Proposing for this many requests took this long."""
        ...

    def saw_acceptance(self, survival: Sequence[float], accepted: int) -> None:
        """Of drafts with these survivals, all verified, the first `accepted` were accepted."""
        ...


class FixedPolicy:
    """Always verifies the same number of drafts (0: never drafts)."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def wants_drafts(self, requests: int) -> bool:
        """See `VerifyPolicy`."""
        return self.drafts > 0 and requests > 0

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        """See `VerifyPolicy`."""
        return [min(self.drafts, len(depths)) for depths in survival]

    def saw_step(self, requests: int, rows: int, tokens: int, seconds: float) -> None:
        """Nothing to learn."""

    def saw_drafting(self, requests: int, seconds: float) -> None:
        """Nothing to learn."""

    def saw_acceptance(self, survival: Sequence[float], accepted: int) -> None:
        """Nothing to learn."""


class CostTable:
    """Seconds by size: a running mean at every size seen, straight lines between, the last slope beyond."""

    def __init__(self, most: int) -> None:
        self.seconds = [0.0] * (most + 1)
        self.seen = [0] * (most + 1)
        self._line: list[float] = []

    def add(self, size: int, seconds: float) -> None:
        """One measurement. The first at a size is thrown away: it pays for caches and allocations."""
        size = min(size, len(self.seen) - 1)
        self.seen[size] += 1
        if self.seen[size] == 2:
            self.seconds[size] = seconds
        elif self.seen[size] > 2:
            # A machine that does something else for a moment must not move the table far.
            bounded = min(seconds, 2 * self.seconds[size])
            self.seconds[size] += BLEND * (bounded - self.seconds[size])
        self._line = []

    def measured(self, size: int) -> bool:
        """Whether there is a value for exactly this size."""
        return self.seen[min(size, len(self.seen) - 1)] > 1

    def at(self, size: int) -> float | None:
        """Seconds expected at a size; None before anything is known."""
        size = min(size, len(self.seen) - 1)
        if self.seen[size] > 1:
            return self.seconds[size]
        return self.line[size] if self.line else None

    @property
    def line(self) -> list[float]:
        """Seconds expected at every size; empty before anything is known."""
        if self._line:
            return self._line
        known = [size for size, times in enumerate(self.seen) if times > 1]
        if not known:
            return []
        sizes, low, high = np.arange(len(self.seen)), known[0], known[-1]
        values = np.interp(sizes, known, [self.seconds[size] for size in known])
        if len(known) > 1:
            slope = max(0.0, (self.seconds[high] - self.seconds[low]) / (high - low))
            values[high:] = self.seconds[high] + slope * (sizes[high:] - high)
        else:
            values[:low] *= sizes[:low] / low
        self._line = values.tolist()
        return self._line


@dataclass
class _Record:
    """What speculation has been worth at one batch size: its speed over plain decode's, and where the trials stand.

    `debt`: plain steps' worth of time that trials have cost and plain decode has not paid yet; `last`: of the last trial.
    """

    gain: float = 1.0
    cycles: int = 0
    on: bool = True
    debt: float = 0.0
    last: float = 0.0
    skipped: int = 0
    since_plain: int = 0

    def cycle(self, gain: float, lost: float, requests: int) -> None:
        """A cycle of so many requests was this much faster than plain decode and took `lost` plain steps' time more (less if
        negative) for the same tokens; decide whether that is enough."""
        self.cycles += 1
        self.debt = max(0.0, self.debt + lost)
        # The first cycle also pays for filling the windows.
        counted = self.cycles - 1
        if counted:
            self.gain += max(SLOW_BLEND, 1 / counted) * (gain - self.gain)
        lucky = SCATTER / (counted * requests) ** 0.5 if FEWEST <= counted < TRIAL and self.debt < DEAREST else 0.0
        if counted >= FEWEST and self.gain < MARGIN - lucky:
            self.on, self.skipped = False, 0
            tried = self.cycles if counted < TRIAL else TURNED
            self.debt = self.last = max(self.debt, tried / RARELY * RISK)

    def wait(self) -> bool:
        """One more plain step; whether it has paid what trials have cost."""
        self.debt -= RISK
        return self.debt <= 0.0

    def begin(self, promise: float) -> bool:
        """A trial may begin; whether it does. One that promises nothing is left out, and then made anyway."""
        if promise < HOPEFUL and self.skipped < SKIPS:
            self.skipped += 1
            self.debt = self.last
            return False
        self.on, self.cycles, self.gain, self.debt = True, 0, 1.0, 0.0
        return True


class AdaptivePolicy:
    """The policy of the module's docstring. `most`: drafts of a request at most; `requests`: requests at most."""

    def __init__(self, most: int, requests: int) -> None:
        self.most = most
        self.steps, self.drafting = CostTable(requests * (1 + most)), CostTable(requests)
        self.seen = np.full(most, 0.7)
        self.claimed = np.full(most, 0.7)
        self.records: dict[int, _Record] = {}
        self._drafted: tuple[int, float] | None = None

    def _record(self, requests: int) -> _Record:
        return self.records.setdefault(requests.bit_length(), _Record())

    def wants_drafts(self, requests: int) -> bool:
        """Plain first until its time is known; then whatever has been faster at this batch size, with trials in between."""
        if not self.most or not requests or not self.steps.measured(requests):
            return False
        record = self._record(requests)
        if not record.on:
            return record.wait() and record.begin(self._promise(requests))
        record.since_plain = (record.since_plain + 1) % PLAIN_EVERY
        return record.since_plain > 0

    def _promise(self, requests: int) -> float:
        """The gain that measured times and acceptance predict for the best common verify length."""
        plain, drafting = self.steps.at(requests), self.drafting.at(requests)
        if plain is None or drafting is None:
            return HOPEFUL
        best, tokens, survives = 0.0, 1.0, 1.0
        for depth in range(self.most):
            survives *= float(self.seen[depth])
            tokens += survives
            seconds = self.steps.at(requests * (2 + depth))
            if seconds is not None:
                best = max(best, tokens * plain / (seconds + drafting))
        return best

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        """Drafts in order of survival while the expected tokens a second grow, now or with what may follow. Survival falls with
        depth, so prefixes result."""
        lengths, requests, reached = [0] * len(survival), len(survival), [1.0] * len(survival)
        if not requests:
            return lengths
        entries = [
            (value, depth, row)
            for row, line in enumerate(survival)
            for depth, value in enumerate(self._corrected(line[: self.most]))
        ]
        entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        # Stops at the first draft that does not pay: its place then depends on drafts before it only, as rejection needs.
        tokens, best, line = float(requests), 0.0, self.steps.line
        for count in range(len(entries) + 1):
            if count:
                value, depth, row = entries[count - 1]
                tokens, reached[row], lengths[row] = tokens + value, value, depth + 1
            rate = tokens / max(line[min(requests + count, len(line) - 1)], 1e-9) if line else 0.0
            if line and rate <= best and self._later(lengths, reached, tokens) <= best:
                if count:
                    lengths[row] = depth
                break
            best = max(best, rate)
        if entries and not any(lengths) and self._record(requests).cycles < TRIAL:
            # A trial must see a draft judged, or a wrong correction could never be put right.
            lengths[entries[0][2]] = 1
        return lengths

    def _later(self, lengths: Sequence[int], reached: Sequence[float], tokens: float) -> float:
        """The best tokens a second of verifying more than `lengths`, should the drafts behind them do as drafts do on average.

        One draft more may mean a step of another kind, which only several pay for. What they claim themselves must not be asked.
        """
        further = [value * np.cumprod(self.seen[length:]) for length, value in zip(lengths, reached, strict=True)]
        values = np.sort(np.concatenate(further))[::-1]
        rows, line = len(lengths) + sum(lengths), self.steps.line
        sizes = np.minimum(rows + 1 + np.arange(len(values)), len(line) - 1)
        return float(np.max((tokens + np.cumsum(values)) / np.maximum(np.array(line)[sizes], 1e-9), initial=0.0))

    def _corrected(self, survival: Sequence[float]) -> list[float]:
        """Survival with every confidence scaled by what its depth has been worth."""
        corrected, before, product = [], 1.0, 1.0
        for depth, value in enumerate(survival):
            own = value / before if before > 0 else 0.0
            product *= min(0.98, own * float(self.seen[depth] / max(self.claimed[depth], 1e-6)))
            before = value
            corrected.append(product)
        return corrected

    def saw_step(self, requests: int, rows: int, tokens: int, seconds: float) -> None:
        """See `VerifyPolicy`."""
        self.steps.add(rows, seconds)
        plain = self.steps.at(requests)
        if self._drafted is not None and self._drafted[0] == requests and plain is not None:
            # Of a moment in which the machine does something else, no more is charged than the tables would allow.
            usual = (self.steps.at(rows) or seconds) + (self.drafting.at(requests) or self._drafted[1])
            spent = min(seconds + self._drafted[1], 3 * usual)
            self._record(requests).cycle((tokens / requests) * plain / spent, spent / plain - tokens / requests, requests)
        self._drafted = None

    def saw_drafting(self, requests: int, seconds: float) -> None:
        """See `VerifyPolicy`."""
        self._drafted = (requests, seconds)
        self.drafting.add(requests, seconds)

    def saw_acceptance(self, survival: Sequence[float], accepted: int) -> None:
        """Compare each judged draft with its confidence; drafts behind the first rejected one say nothing."""
        before = 1.0
        for depth, value in enumerate(survival[: min(accepted + 1, self.most)]):
            own = value / before if before > 0 else 0.0
            before = value
            self.seen[depth] += BLEND / 4 * (float(depth < accepted) - self.seen[depth])
            self.claimed[depth] += BLEND / 4 * (own - self.claimed[depth])
