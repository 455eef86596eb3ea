"""The sampler: filters keep what they promise, noise depends on (seed, position) only, frequencies follow the softmax."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine.sampler import SamplingParams, filter_logits, gumbel_noise, sample


def test_greedy_takes_the_lower_id_of_equal_logits() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert all(sample(logits, SamplingParams(), position) == 1 for position in range(5))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    params = SamplingParams(temperature=1.0, seed=3)
    counts = torch.bincount(torch.tensor([sample(logits, params, p) for p in range(4000)]), minlength=3) / 4000
    assert float((counts - torch.softmax(logits, 0)).abs().max()) < 0.03


def test_noise_is_keyed_by_seed_and_position() -> None:
    assert torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(1, 2, 50))
    assert not torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(1, 3, 50))
    assert not torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(2, 2, 50))
    assert torch.equal(gumbel_noise(1, 2, 50)[:20], gumbel_noise(1, 2, 20))


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-8, 8), min_size=1, max_size=20),
    k=st.integers(0, 20),
    p=st.floats(0.05, 1),
    m=st.floats(0, 1),
)
def test_filters(values: list[float], k: int, p: float, m: float) -> None:
    logits = torch.tensor(values)
    kept = torch.isfinite(filter_logits(logits, SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)))
    probs = torch.softmax(logits.double(), 0)
    assert kept[int(logits.argmax())]
    assert not k or int(kept.sum()) <= k
    # whoever is kept has no better one that is not
    worst = probs[kept].min()
    assert bool((probs[~kept] <= worst).all())
    if m and not k and p == 1:
        assert bool((probs[kept] >= m * probs.max() - 1e-12).all())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for p, count in ((0.4, 1), (0.5, 1), (0.6, 2), (0.81, 3), (1.0, 4)):
        assert int(torch.isfinite(filter_logits(logits, SamplingParams(temperature=1.0, top_p=p))).sum()) == count
