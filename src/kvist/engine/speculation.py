"""How many drafts to verify: expected tokens against measured time, so that speculation is never slower than plain decode.

Owns the cost table and the choice. Pure numbers: must not know models, requests or tensors. Report 2.4.3 (confidence head);
the greedy choice over all requests' survival is our own.

A step over n rows takes t(n) seconds (measured, interpolated), proposing for r requests d(r). A draft at depth j of a request
survives with s_j = product of its confidences up to j, corrected by what was seen to be accepted. Verifying the k likeliest
drafts of r requests yields r + sum of their survivals tokens for t(r + k) seconds; k maximises the quotient. Drafting itself is
worth it while the best quotient, d(r) included, beats r / t(r); when it is not, plain decode runs and drafts are tried again
now and then, since texts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

PROBE_EVERY = 48
"""Plain steps between two trials while drafting does not pay (a trial costs at most about one step more)."""
PLAIN_EVERY = 64
"""Speculated steps between two plain ones, which keep t(r) measured."""
BLEND = 0.2
MARGIN = 1.02
"""Drafting must promise this much more than plain decode: measured times scatter."""


class VerifyPolicy(Protocol):
    """Decides on drafting and verifying."""

    def wants_drafts(self, requests: int) -> bool:
        """Whether to propose drafts for this many requests now."""
        ...

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        """Drafts to verify of each request, given its drafts' survival."""
        ...

    def saw_step(self, rows: int, seconds: float) -> None:
        """A step of decode and verify rows only took this long."""
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

    def saw_step(self, rows: int, seconds: float) -> None:
        """Nothing to learn."""

    def saw_drafting(self, requests: int, seconds: float) -> None:
        """Nothing to learn."""

    def saw_acceptance(self, survival: Sequence[float], accepted: int) -> None:
        """Nothing to learn."""


class CostTable:
    """Seconds by size: a running mean at every size seen, straight lines between, the last slope beyond."""

    def __init__(self, most: int) -> None:
        self.seconds = np.zeros(most + 1)
        self.seen = np.zeros(most + 1, dtype=np.int64)

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

    @property
    def known(self) -> np.ndarray:
        """Sizes with a value."""
        return np.flatnonzero(self.seen > 1)

    def at(self, size: int) -> float | None:
        """Seconds expected at a size; None before anything is known."""
        known = self.known
        if not len(known):
            return None
        low, high = int(known[0]), int(known[-1])
        if size <= high or len(known) == 1:
            return float(np.interp(size, known, self.seconds[known])) * (size / low if size < low and len(known) == 1 else 1.0)
        slope = max(0.0, (self.seconds[high] - self.seconds[low]) / (high - low))
        return float(self.seconds[high] + slope * (size - high))


class AdaptivePolicy:
    """The policy of the module's docstring. `most`: drafts of a request at most; `requests`: requests at most."""

    def __init__(self, most: int, requests: int) -> None:
        self.most = most
        self.steps, self.drafting = CostTable(requests * (1 + most)), CostTable(requests)
        self.trust = 1.0
        self.profile = np.linspace(0.8, 0.8**most, most) if most else np.zeros(0)
        self.since_probe, self.since_plain = 0, 0
        self.off_steps = 0

    def wants_drafts(self, requests: int) -> bool:
        """Plain first until its time is known; then whatever promises more tokens a second, with trials in between."""
        if not self.most or not requests:
            return False
        plain, drafting = self.steps.at(requests), self.drafting.at(requests)
        if plain is None or self.steps.seen[min(requests, len(self.steps.seen) - 1)] < 2:
            return False
        self.since_plain += 1
        if self.since_plain > PLAIN_EVERY:
            self.since_plain = 0
            return False
        if drafting is None or self._best(requests, plain, drafting) > MARGIN * requests / plain:
            self.since_probe = 0
            return True
        self.off_steps += 1
        self.since_probe += 1
        if self.since_probe > PROBE_EVERY:
            self.since_probe = 0
            return True
        return False

    def _best(self, requests: int, plain: float, drafting: float) -> float:
        best, tokens, rows = 0.0, float(requests), requests
        for survival in self.profile:
            tokens += requests * float(survival)
            rows += requests
            seconds = self.steps.at(rows)
            best = max(best, tokens / ((plain if seconds is None else seconds) + drafting))
        return best

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        """Drafts in order of survival while the expected tokens a second grow. Survival falls with depth, so prefixes result."""
        lengths, requests = [0] * len(survival), len(survival)
        entries = sorted(
            (
                (self.trust ** (depth + 1) * value, depth, row)
                for row, line in enumerate(survival)
                for depth, value in enumerate(line)
            ),
            key=lambda entry: (-entry[0], entry[1], entry[2]),
        )
        if not entries:
            return lengths
        if self.steps.at(requests) is None:
            return [min(self.most, len(line)) for line in survival]
        # Stops at the first draft that does not pay: its place then depends on drafts before it only, as rejection needs.
        tokens, rows, best, best_count = float(requests), requests, 0.0, 0
        for count in range(len(entries) + 1):
            if count:
                tokens += entries[count - 1][0]
                rows += 1
            seconds = self.steps.at(rows)
            assert seconds is not None
            if tokens / max(seconds, 1e-9) <= best:
                break
            best, best_count = tokens / max(seconds, 1e-9), count
        for _, depth, row in entries[:best_count]:
            lengths[row] = max(lengths[row], depth + 1)
        return [min(self.most, length) for length in lengths]

    def saw_step(self, rows: int, seconds: float) -> None:
        """See `VerifyPolicy`."""
        self.steps.add(rows, seconds)

    def saw_drafting(self, requests: int, seconds: float) -> None:
        """See `VerifyPolicy`."""
        self.drafting.add(requests, seconds)

    def saw_acceptance(self, survival: Sequence[float], accepted: int) -> None:
        """Correct the trust in confidences and the profile by depth."""
        if not survival:
            return
        expected = sum(self.trust ** (depth + 1) * value for depth, value in enumerate(survival))
        # Moves up when more is accepted than expected, down when less; bounded so that one text cannot fix it.
        self.trust = float(np.clip(self.trust * (1 + 0.05 * np.sign(accepted - expected)), 0.05, 1.25))
        for depth in range(min(len(survival), self.most)):
            self.profile[depth] += BLEND / 4 * (float(depth < accepted) - self.profile[depth])
