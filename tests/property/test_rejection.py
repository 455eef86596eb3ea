"""Acceptance rules: rejection sampling follows the model's distribution exactly, the default rule changes no token at all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine.errors import NonFiniteLogits
from kvist.engine.sampler import SamplingParams, choose, sample
from kvist.engine.sampling.filters import distribution
from kvist.engine.sampling.history import History
from kvist.engine.sampling.rejection import propose, residual, verify

SIZE, LENGTH, DRAWS = 8, 3, 20_000
DICE = np.random.default_rng(7)
# row i: logits behind token i; the last row: at the start
TARGET = (DICE.standard_normal((SIZE + 1, SIZE)) * 1.2).astype(np.float32)
DRAFTER = (TARGET + DICE.standard_normal((SIZE + 1, SIZE))).astype(np.float32)


def params(seed: int, **options: float) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": seed, **options})  # type: ignore[arg-type]


def speculated(seed: int, drawn: bool, options: dict[str, float], depth: int = 2) -> tuple[list[int], int]:
    """A reply of LENGTH tokens by drafting and verifying, and how many of its tokens were accepted drafts."""
    wish, tokens, accepted = params(seed, **options), [SIZE], 0
    while len(tokens) <= LENGTH:
        position = len(tokens)
        drafts, probs = [], []
        while len(drafts) < min(depth, LENGTH - position + 1):
            row = DRAFTER[(drafts or tokens)[-1]]
            token, prob = propose(row, wish, position + len(drafts)) if drawn else (int(row.argmax()), np.zeros(0))
            drafts.append(token)
            probs.append(prob)
        rows = TARGET[[tokens[-1], *drafts]]
        verdict = verify(rows, drafts, probs if drawn else None, wish, position)
        tokens += [*drafts[: verdict.accepted], verdict.token]
        accepted += verdict.accepted
    return tokens[1 : LENGTH + 1], accepted


def joint(options: dict[str, float]) -> np.ndarray:
    """The law of LENGTH tokens [SIZE]*LENGTH, from the chain rule over the model's distributions."""
    behind = np.array([distribution(row, params(0, **options)) for row in TARGET])
    law = np.zeros([SIZE] * LENGTH)
    for word in itertools.product(range(SIZE), repeat=LENGTH):
        law[word] = np.prod([behind[a][b] for a, b in zip((SIZE, *word), word, strict=False)])
    return law


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p of Pearson's test; cells with an expectation below 5 are pooled; a cell of probability 0 must be empty."""
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    big = expected >= 5
    seen = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    seen, wanted = (seen[wanted > 0], wanted[wanted > 0])
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2)))


@pytest.mark.parametrize(("drawn", "options", "draws"), [(True, {}, DRAWS), (False, {}, DRAWS), (True, {"top_p": 0.8}, 1000)])
def test_joint_distribution_of_three_tokens(drawn: bool, options: dict[str, float], draws: int) -> None:
    counts = np.zeros([SIZE] * LENGTH)
    accepted = 0
    for seed in range(draws):
        word, drafts = speculated(seed, drawn, options)
        counts[tuple(word)] += 1
        accepted += drafts
    law = joint(options)
    assert abs(law.sum() - 1) < 1e-12
    assert 0.1 * draws < accepted < 1.9 * draws  # both accepted and rejected drafts were seen often
    p = chi_square_p(counts, law)
    assert p > 0.001, p
    if draws == DRAWS:  # the test has power: a law that is off by a tenth fails
        wrong = 0.9 * law + 0.1 * np.roll(law, 1, axis=0)
        assert chi_square_p(counts, wrong) < 0.001


@settings(deadline=None, max_examples=300)
@given(
    target=st.lists(st.floats(-9, 9), min_size=2, max_size=12),
    shift=st.lists(st.floats(-9, 9), min_size=12, max_size=12),
    top_p=st.floats(0.05, 1),
    drawn=st.booleans(),
)
def test_accepting_and_drawing_the_rest_add_up_to_the_target(
    target: list[float], shift: list[float], top_p: float, drawn: bool
) -> None:
    wish = params(0, top_p=top_p)
    probs = distribution(np.array(target, np.float32), wish)
    drafter = distribution(np.array([a + b for a, b in zip(target, shift, strict=False)], np.float32), wish)
    total = np.zeros(len(probs))
    for draft in range(len(probs)):
        chance = drafter[draft] if drawn else float(draft == int(drafter.argmax()))
        if not chance:
            continue
        kept = min(1.0, probs[draft] / (drafter[draft] if drawn else 1.0))
        total[draft] += chance * kept
        if kept < 1:
            total += chance * (1 - kept) * residual(probs, draft, drafter if drawn else None)
    assert np.allclose(total, probs, atol=1e-9)


def test_greedy_requests_accept_the_best_token_only() -> None:
    rows = TARGET[:3]
    best = rows.argmax(1).tolist()
    wish = SamplingParams(temperature=0.0)
    assert verify(rows, best[:2], None, wish, 5) == (2, best[2], None)
    assert verify(rows, [best[0], (best[1] + 1) % SIZE], None, wish, 5)[:2] == (1, best[1])
    assert verify(rows, [(best[0] + 1) % SIZE, best[1]], None, wish, 5)[:2] == (0, best[0])


def test_a_bad_row_counts_only_when_it_is_reached() -> None:
    rows = TARGET[:3].copy()
    rows[2] = np.nan
    best = rows.argmax(1).tolist()
    rejected = verify(rows, [(best[0] + 1) % SIZE, 0], None, SamplingParams(), 5)
    assert rejected == (0, best[0], None)
    reached = verify(rows, best[:2], None, SamplingParams(), 5)
    assert reached.accepted == 2 and isinstance(reached.error, NonFiniteLogits)


def test_masks_and_penalties_hold_for_drafts_too() -> None:
    mask = np.packbits(np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8), bitorder="little")
    history = History([])
    for seed in range(200):
        wish = params(seed, temperature=1.0, presence_penalty=100.0)
        verdict = verify(np.zeros((2, SIZE), np.float32), [1], None, wish, 3, history=history, masks=[mask, mask])
        # a draft that was accepted makes its own repetition all but impossible, as in plain decoding
        assert verdict.token == 0 and len(history) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_default_rule_gives_the_tokens_of_plain_decoding(temperature: float) -> None:
    for seed in range(300):
        wish = params(seed, temperature=temperature, top_p=0.9)
        plain = [SIZE]
        while len(plain) <= 6:
            plain.append(sample(torch.from_numpy(TARGET[plain[-1]]), wish, len(plain)))
        tokens = [SIZE]
        while len(tokens) <= 6:
            drafts = np.random.default_rng([seed, len(tokens)]).integers(0, SIZE, 3).tolist()
            drafts[0] = int(DRAFTER[tokens[-1]].argmax())
            rows = torch.from_numpy(TARGET[[tokens[-1], *drafts]])
            found = choose(rows, [wish] * 4, [len(tokens) + i for i in range(4)])
            for choice, draft in zip(found, [*drafts, None], strict=True):
                tokens.append(choice.token)
                if choice.token != draft:
                    break
        assert tokens[:7] == plain
