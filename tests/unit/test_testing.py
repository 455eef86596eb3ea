"""The comparison, generator and timing helpers themselves."""

import math

import pytest
import torch

from kvist.testing import bit_equal, cosine, first_difference, max_abs, median_time_us, poisoned, quantiser_rows, rel_l2


def test_bit_equal_tells_zeros_apart_and_takes_nans_as_one():
    assert not bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert bit_equal(quiet, other)
    assert not bit_equal(quiet, torch.tensor([1.0]))
    assert not bit_equal(torch.zeros(2), torch.zeros(3))
    assert not bit_equal(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert bit_equal(torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous())
    assert bit_equal(torch.tensor([-0.0], dtype=torch.bfloat16), torch.tensor([-0.0], dtype=torch.bfloat16))


def test_first_difference_names_the_place():
    assert first_difference(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])).endswith("(0, 1): 2.0, expected 3.0")
    assert first_difference(torch.ones(2), torch.ones(2)) == "equal"
    assert "float32 [2] against" in first_difference(torch.ones(2), torch.ones(3))


def test_distances():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert max_abs(a, b) == 0.5
    assert rel_l2(b, a) == pytest.approx(0.1)
    assert cosine(a, 2 * a) == pytest.approx(1.0)
    assert cosine(a, torch.tensor([-4.0, 3.0])) == pytest.approx(0.0)
    assert cosine(a, torch.zeros(2)) == 0.0
    assert rel_l2(a, torch.zeros(2)) == math.inf
    assert math.isnan(max_abs(a, torch.tensor([math.nan, 0.0])))
    assert max_abs(torch.zeros(0), torch.zeros(0)) == 0.0
    with pytest.raises(ValueError, match=r"\[2\] with \[3\]"):
        max_abs(a, torch.zeros(3))


def test_generated_rows_are_finite_repeatable_and_contain_the_difficult_kinds():
    x = quantiser_rows(20, 64, seed=1)
    assert bit_equal(x, quantiser_rows(20, 64, seed=1))
    assert not bit_equal(x, quantiser_rows(20, 64, seed=2))
    assert bool(x.isfinite().all())
    assert bool(quantiser_rows(20, 64, seed=1, dtype=torch.bfloat16).isfinite().all())
    assert quantiser_rows(0, 64, seed=1).shape == (0, 64)
    assert bool(((x == 0) & x.signbit()).any())
    assert float(x.abs().max()) > 1e20


def test_poisoned_changes_some_values_of_a_copy():
    x = torch.ones(10, 10)
    bad = poisoned(x, seed=1, fraction=0.05)
    assert int((~bad.isfinite()).sum()) == 5
    assert bool((x == 1).all())
    assert poisoned(torch.zeros(0), seed=1).shape == (0,)


def test_median_time_counts_calls():
    calls = []
    assert median_time_us(lambda: calls.append(1), repeats=5, warmup=2) > 0
    assert len(calls) == 7
    with pytest.raises(ValueError, match="repeats is 0"):
        median_time_us(lambda: None, repeats=0)
