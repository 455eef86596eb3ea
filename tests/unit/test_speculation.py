"""The choice of verify lengths: in a simulated machine speculation pays where it can and never costs more than a trial."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvist.engine.speculation import FEWEST, RISK, SKIPS, TRIAL, AdaptivePolicy, CostTable, FixedPolicy, _Record


class Machine:
    """A step over n rows takes `base` + n x `row` seconds, drafting for r requests `draft` + r x `each`."""

    def __init__(self, base: float, row: float, draft: float, each: float, accept: float, claims: float, seed: int = 0) -> None:
        self.base, self.row, self.draft, self.each = base, row, draft, each
        self.accept, self.claims, self.rng = accept, claims, random.Random(seed)
        self.steps = self.cycles = 0

    def run(self, policy: AdaptivePolicy | FixedPolicy, requests: int, tokens: int) -> float:
        """Seconds to decode this many tokens. A draft is accepted with `accept`; the confidence head claims `claims`."""
        seconds, made = 0.0, 0
        drafts: list[list[float]] = [[] for _ in range(requests)]
        while made < tokens:
            lengths = policy.lengths([line for line in drafts if line]) if any(drafts) else []
            lengths = lengths or [0] * requests
            rows = requests + sum(lengths)
            step = (self.base + rows * self.row) * self.rng.uniform(0.95, 1.1)
            seconds += step
            self.steps += 1
            before = made
            for line, length in zip(drafts, lengths, strict=True):
                accepted = 0
                while accepted < length and self.rng.random() < self.accept:
                    accepted += 1
                if length:
                    policy.saw_acceptance(line[:length], accepted)
                made += 1 + accepted
            policy.saw_step(requests, rows, made - before, step)
            drafts = [[] for _ in range(requests)]
            if policy.wants_drafts(requests):
                self.cycles += 1
                cost = (self.draft + requests * self.each) * self.rng.uniform(0.95, 1.1)
                policy.saw_drafting(requests, cost)
                seconds += cost
                drafts = [[self.claims ** (depth + 1) for depth in range(5)] for _ in range(requests)]
        return seconds


@pytest.mark.parametrize("requests", [1, 4, 16])
@pytest.mark.parametrize("accept", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("claims", [0.3, 0.9])
@pytest.mark.parametrize(("base", "row"), [(10e-3, 0.1e-3), (1e-3, 2e-3)])
def test_never_slower_than_plain_decode(requests: int, accept: float, claims: float, base: float, row: float) -> None:
    """Whatever is accepted or claimed, whether rows are cheap or dear: 2,000 steps take at most 1% more than plain decode's."""
    machine = Machine(base, row, 0.3 * (base + row), 0.05 * row, accept, claims)
    plain = machine.run(FixedPolicy(0), requests, 2000 * requests)
    adaptive = machine.run(AdaptivePolicy(5, 16), requests, 2000 * requests)
    assert adaptive <= 1.01 * plain, f"{adaptive / plain:.3f} of plain"


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("accept", [0.0, 0.4])
def test_after_it_has_learned_that_drafts_do_not_pay_trials_are_rare(requests: int, accept: float) -> None:
    """Stated bound: trials cost at most `RISK` of the time, and fewer than a step in a hundred belongs to one."""
    machine = Machine(1e-3, 2e-3, 1e-3, 0.1e-3, accept, 0.7)
    policy = AdaptivePolicy(5, 16)
    machine.run(policy, requests, 500 * requests)
    machine.steps = machine.cycles = 0
    plain, adaptive = machine.run(FixedPolicy(0), requests, 6000 * requests), machine.run(policy, requests, 6000 * requests)
    assert 0 < machine.cycles < 0.01 * 6000, f"{machine.cycles} cycles in 6,000 steps"
    assert adaptive <= (1 + RISK) * 1.001 * plain, f"{adaptive / plain:.4f} of plain"


def test_a_trial_costs_what_the_next_one_must_wait_for() -> None:
    """With a scripted table: steps of 1 ms, of 3 ms with a draft, 1 ms of drafting, nothing accepted. A cycle loses 3 plain
    steps' time; after three beside the first, four cycles are twelve, and 12 / RISK plain steps follow before the next."""
    policy = AdaptivePolicy(5, 1)

    def step(rows: int, drafted: bool) -> bool:
        policy.saw_step(1, rows, 1, 3e-3 if rows > 1 else 1e-3)
        if wants := policy.wants_drafts(1):
            policy.saw_drafting(1, 1e-3)
        assert not drafted or rows > 1
        return wants

    drafts = [step(1, False) for _ in range(2)]
    assert drafts == [False, True], "plain steps are measured first, the first measurement not counted"
    while drafts[-1]:
        policy.saw_acceptance([0.9], 0)
        drafts.append(step(2, True))
    cycles = sum(drafts)
    assert cycles == FEWEST + 1 == 4
    waited = 1
    while not step(1, False):
        waited += 1
    assert waited == pytest.approx((SKIPS + 1) * 3 * cycles / RISK, abs=2), "one is left out since nothing speaks for it"


def test_a_change_of_texts_is_noticed() -> None:
    """Drafts that were of no use for 4,000 steps become right: within a few thousand tokens it drafts, and gains."""
    machine, policy = Machine(10e-3, 0.1e-3, 2e-3, 0.1e-3, 0.0, 0.8), AdaptivePolicy(5, 4)
    machine.run(policy, 1, 4000)
    machine.accept = 0.8
    machine.run(policy, 1, 4000)
    adaptive, plain = machine.run(policy, 1, 2000), machine.run(FixedPolicy(0), 1, 2000)
    assert adaptive < 0.6 * plain


@pytest.mark.parametrize("requests", [1, 4])
def test_it_pays_where_drafts_are_good_and_rows_cheap(requests: int) -> None:
    machine = Machine(10e-3, 0.1e-3, 2e-3, 0.1e-3, 0.8, 0.8)
    plain = machine.run(FixedPolicy(0), requests, 4000)
    best = min(machine.run(FixedPolicy(k), requests, 4000) for k in range(1, 6))
    adaptive = machine.run(AdaptivePolicy(5, 16), requests, 4000)
    assert best < 0.5 * plain
    assert adaptive < 1.15 * best


def test_lengths_follow_confidence_and_are_prefixes() -> None:
    policy = AdaptivePolicy(5, 4)
    for rows in (2, 4, 8, 12):
        for _ in range(4):
            policy.saw_step(2, rows, 2, 1e-3 + rows * 0.4e-3)
    sure, unsure = [0.99, 0.98, 0.97, 0.96, 0.95], [0.2, 0.05, 0.01, 0.001, 0.0]
    lengths = policy.lengths([sure, unsure])
    assert lengths[0] == 5
    assert lengths[1] == 0
    assert policy.lengths([[], []]) == [0, 0]


def test_the_cost_table_forgets_the_first_measurement_and_outliers() -> None:
    table = CostTable(20)
    assert table.at(5) is None
    table.add(4, 9.0)
    assert table.at(4) is None, "the first pays for caches"
    for _ in range(50):
        table.add(4, 1.0)
        table.add(8, 2.0)
    table.add(8, 100.0)
    assert table.at(4) == pytest.approx(1.0)
    assert table.at(6) == pytest.approx((1.0 + table.at(8)) / 2)  # type: ignore[operator]
    assert table.at(8) < 2.5  # type: ignore[operator]
    assert table.at(12) > table.at(8)  # type: ignore[operator]


JUMP_MS = {1: 5.55, 2: 9.64, 3: 10.8, 4: 11.9, 5: 12.6, 6: 13.2}
"""A step of one row has launches of its own: two rows cost much more, every further one little."""


def jumping() -> AdaptivePolicy:
    policy = AdaptivePolicy(5, 1)
    for rows, value_ms in JUMP_MS.items():
        for _ in range(2):
            policy.saw_step(1, rows, 1, value_ms / 1e3)
    policy.seen = policy.claimed = np.full(5, 0.78)
    return policy


ONE_CARD_MS = {1: 4.62, 2: 8.63, 3: 9.91, 4: 10.37, 5: 11.85, 6: 12.85}
"""Steps measured on a card at batch 1; drafting takes 1.16. Five drafts at 3.5 tokens a cycle: 4.0 ms a token."""


def test_a_gain_of_an_eighth_survives_its_trial() -> None:
    """Tokens of a cycle scatter by half of their mean; a dozen cycles would throw such a drafter out in every second run."""
    survival, spent = np.cumprod([0.7775] * 5).tolist(), []
    for seed in range(20):
        policy, rng, seconds, tokens = AdaptivePolicy(5, 1), random.Random(seed), 0.0, 0
        for _ in range(400):
            drafted = policy.wants_drafts(1)
            if drafted:
                policy.saw_drafting(1, 1.16e-3)
            length = policy.lengths([survival])[0] if drafted else 0
            accepted = next((depth for depth in range(length) if rng.random() > 0.7775), length)
            policy.saw_step(1, 1 + length, 1 + accepted, ONE_CARD_MS[1 + length] / 1e3)
            if length:
                policy.saw_acceptance(survival[:length], accepted)
            seconds += ONE_CARD_MS[1 + length] / 1e3 + (1.16e-3 if drafted else 0.0)
            tokens += 1 + accepted
        spent.append(1e3 * seconds / tokens)
    assert np.mean(spent) < 0.93 * ONE_CARD_MS[1], f"{np.mean(spent):.2f} ms a token"
    assert max(spent) < 1.03 * ONE_CARD_MS[1], "a trial in vain costs ten plain steps of 400"


def test_one_draft_that_does_not_pay_may_lead_to_several_that_do() -> None:
    survival = np.cumprod([0.7] * 5).tolist()
    policy = jumping()
    alone = (1 + survival[0]) / JUMP_MS[2]
    assert alone < 1 / JUMP_MS[1], "one draft is worse than none"
    assert (1 + sum(survival)) / JUMP_MS[6] > 1 / JUMP_MS[1], "five are better"
    assert policy.lengths([survival]) == [5]
    policy.seen = policy.claimed = np.full(5, 0.4)
    policy.records[1] = _Record(cycles=TRIAL)  # until then one draft is judged in any case
    assert policy.lengths([np.cumprod([0.4] * 5).tolist()]) == [0], "nor is anything that drafts do on average"


@pytest.mark.parametrize("seed", range(20))
def test_what_later_drafts_claim_changes_nothing_before_them(seed: int) -> None:
    """Else a draft's being judged would hang on tokens behind it, and rejection would be biased."""
    rng = np.random.default_rng(seed)
    own = rng.uniform(0.2, 1.0, 5)
    for depth in range(1, 5):
        other = own.copy()
        other[depth:] = rng.uniform(0.0, 1.0, 5 - depth)
        (first,), (second,) = (jumping().lengths([np.cumprod(line).tolist()]) for line in (own, other))
        assert min(first, depth) == min(second, depth)
