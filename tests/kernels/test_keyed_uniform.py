"""Keyed uniform numbers: native code and numpy agree bit for bit, single entries equal their stream, uses do not overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.kernels.keyed_uniform import uniform_at, uniform_stream

KEYS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(seed=KEYS, position=KEYS, use=st.integers(0, 3), ids=st.lists(st.integers(0, 3000), min_size=1))
def test_single_entries_and_streams_agree_in_every_implementation(seed: int, position: int, use: int, ids: list[int]) -> None:
    stream = uniform_stream(seed, position, max(ids) + 1, use=use, impl="ref")
    assert np.array_equal(uniform_stream(seed, position, max(ids) + 1, use=use, impl="cpu"), stream)
    seeds, positions = (np.full(len(ids), key, np.uint64) for key in (seed, position))
    for impl in ("ref", "cpu"):
        assert np.array_equal(uniform_at(seeds, positions, np.array(ids), use=use, impl=impl), stream[ids])


@pytest.mark.parametrize("count", range(10))
def test_short_streams_are_prefixes(count: int) -> None:
    for impl in ("ref", "cpu"):
        assert np.array_equal(uniform_stream(3, 4, count, impl=impl), uniform_stream(3, 4, 10, impl="ref")[:count])


def test_the_numbers_are_numpys() -> None:
    generator = np.random.Generator(np.random.Philox(key=np.array([5, 6], dtype=np.uint64)))
    assert np.array_equal(uniform_stream(5, 6, 101), generator.random(101))


def test_keys_and_uses_have_streams_of_their_own() -> None:
    streams = [uniform_stream(s, p, 64, use=u) for s, p, u in itertools.product((0, 1, 2**63), (0, 1), range(4))]
    assert len(np.unique(np.concatenate(streams))) == 64 * len(streams)
    mixed = uniform_at(np.array([0, 1, 2**63], np.uint64), np.array([1, 0, 1], np.uint64), np.array([7, 0, 63]), use=2)
    assert mixed.tolist() == [uniform_stream(s, p, 64, use=2)[i] for s, p, i in ((0, 1, 7), (1, 0, 0), (2**63, 1, 63))]


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="no impl 'fast'; known: ref, cpu"):
        uniform_stream(0, 0, 1, impl="fast")
    with pytest.raises(ValueError, match="no impl 'fast'"):
        uniform_at(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.int64), impl="fast")
