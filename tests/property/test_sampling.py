"""Filters and draws against a naive float64 oracle, and the promise that a row's token does not depend on its batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine.sampler import Choice, SamplingParams, choose, gumbel_noise, sample
from kvist.engine.sampling.filters import distribution
from kvist.engine.sampling.history import Ahead, History

TOP_P = st.one_of(st.just(1.0), st.floats(0.01, 1))
WISHES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    top_p=TOP_P,
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(0, 2**64 - 1),
)
# few distinct values, so that ties are common; -90 puts ids far outside every head
VALUES = st.lists(st.sampled_from([-90.0, -12.0, -3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 7.0]), min_size=1, max_size=60)


def naive(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that stay, from the filters' definition by plain loops over float64."""
    scaled = [float(x) / params.temperature for x in logits]
    weights = [float(np.exp(s - max(scaled))) for s in scaled]
    order = sorted((i for i in range(len(scaled)) if weights[i] > 0), key=lambda i: (-scaled[i], i))
    total = float(np.sum(np.array(weights)))
    if params.top_k:
        order = order[: params.top_k]
        total = float(np.cumsum([weights[i] for i in order])[-1])
    kept, before = [], 0.0
    for i in order:
        if before < params.top_p * total or params.top_p == 1:
            kept.append(i)
        before += weights[i]
    return sorted(i for i in kept if weights[i] >= params.min_p or i == order[0])


@settings(deadline=None, max_examples=400)
@given(values=VALUES, params=WISHES)
def test_filters_keep_what_the_definition_keeps(values: list[float], params: SamplingParams) -> None:
    logits = np.array(values, np.float32)
    probs = distribution(logits, params)
    kept = naive(logits, params)
    if params.top_k or params.top_p < 1 or params.min_p:
        assert np.flatnonzero(probs).tolist() == kept
    weights = np.exp((logits[kept].astype(np.float64) - logits[kept].max()) / params.temperature)
    assert np.allclose(probs[kept], weights / weights.sum(), rtol=1e-12)


@settings(deadline=None, max_examples=400)
@given(values=VALUES, params=WISHES, position=st.integers(0, 2**40))
def test_the_draw_is_the_argmax_of_all_noisy_survivors(values: list[float], params: SamplingParams, position: int) -> None:
    logits = np.array(values, np.float32)
    noise = gumbel_noise(params.seed, position, len(logits)).double().numpy()
    kept = naive(logits, params)
    best = max(kept, key=lambda i: (float(logits[i]) / params.temperature + noise[i], -i))
    assert sample(torch.from_numpy(logits), params, position) == best


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
def test_flat_and_peaked_rows_of_many_ids(spread: float) -> None:
    dice = np.random.default_rng(3)
    for top_k, top_p, min_p in (
        (0, 0.9, 0.0),
        (0, 0.2, 0.001),
        (700, 1.0, 0.0),
        (1500, 0.5, 0.0),
        (3, 0.99, 0.2),
        (9000, 0.7, 0.0),
    ):
        logits = (dice.standard_normal(4000) * spread).astype(np.float32)
        logits[dice.integers(0, 4000, 50)] = -np.inf
        params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
        assert np.flatnonzero(distribution(logits, params)).tolist() == naive(logits, params)


@pytest.mark.parametrize("size", [7168, 129280])
def test_pruned_draws_equal_full_ones_on_wide_rows(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for seed, spread in enumerate((0.0, 0.3, 3.0, 12.0)):
        logits = torch.randn(size, generator=generator) * spread
        for top_p in (1.0, 0.9999, 0.6):
            params = SamplingParams(temperature=1.0, seed=seed, top_p=top_p)
            probs = torch.from_numpy(distribution(logits.numpy(), params))
            noisy = torch.where(probs > 0, logits.double(), -torch.inf) + gumbel_noise(seed, 77, size).double()
            assert sample(logits, params, 77) == int(noisy.argmax())


def random_rows(dice: random.Random, count: int, size: int) -> list[tuple]:
    rows = []
    for _ in range(count):
        spread = dice.choice([0.0, 1.0, 4.0, 20.0])
        logits = torch.randn(size, generator=torch.Generator().manual_seed(dice.randrange(2**40))) * spread
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=dice.choice([0, 0, 1, 40]),
            top_p=dice.choice([1.0, 1.0, 0.95, 0.5]),
            min_p=dice.choice([0.0, 0.0, 0.05]),
            repetition_penalty=dice.choice([1.0, 1.3]),
            presence_penalty=dice.choice([0.0, 0.7]),
            frequency_penalty=dice.choice([0.0, -0.2]),
            logit_bias=dice.choice([{}, {3: -100.0, size - 1: 2.5}]),
            seed=dice.randrange(2**64),
            logprobs=dice.choice([None, 0, 3]),
        )
        history: History | Ahead = History([dice.randrange(size) for _ in range(20)])
        for _ in range(5):
            history.append(dice.randrange(size))
        if dice.random() < 0.5:
            history = history.ahead([dice.randrange(size) for _ in range(3)])
        mask = None
        if dice.random() < 0.3:
            mask = np.array([dice.randrange(256) for _ in range((size + 7) // 8)], np.uint8)
            mask[0] |= 1
        if dice.random() < 0.1:
            logits[dice.randrange(size)] = float("nan")
        rows.append((logits, params, dice.randrange(10**6), history, mask))
    return rows


def together(rows: list[tuple]) -> list[Choice]:
    logits, params, positions, histories, masks = zip(*rows, strict=True)
    return choose(torch.stack(logits), params, positions, histories, masks)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [65, 7168])
def test_a_row_gets_the_same_token_in_every_batch(seed: int, size: int) -> None:
    dice = random.Random(seed)
    rows = random_rows(dice, 64 if size < 1000 else 40, size)
    alone = [together([row])[0] for row in rows]
    assert {choice.error is None for choice in alone} == {True, False}
    for _ in range(3):
        order = dice.sample(range(len(rows)), dice.randrange(1, len(rows) + 1))
        for at, choice in zip(order, together([rows[i] for i in order]), strict=True):
            assert choice[:2] == alone[at][:2]
            assert str(choice.error) == str(alone[at].error)


def test_batches_do_not_change_their_input() -> None:
    rows = random_rows(random.Random(9), 20, 300)
    before = [row[0].clone() for row in rows]
    stacked = torch.stack([row[0] for row in rows])
    choose(stacked, *[list(part) for part in list(zip(*rows, strict=True))[1:]])
    assert torch.equal(stacked, torch.stack(before)) or bool(torch.isnan(stacked).any())
    assert torch.equal(torch.nan_to_num(stacked), torch.nan_to_num(torch.stack(before)))
