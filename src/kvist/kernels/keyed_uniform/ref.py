"""Keyed uniform numbers in numpy: whole streams from its generator, single entries by their counter. The meaning.

Must not know what the numbers are for. Shapes: C entries.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def uniform_stream(seed: int, position: int, count: int, use: int) -> Floats:
    """See the package's function."""
    key = np.array([seed, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, use])).random(count)


def uniform_at(seeds_C: Words, positions_C: Words, ids_C: Ids, use: int) -> Floats:
    """See the package's function."""
    block_C = (ids_C >> 2).astype(np.uint64) + np.uint64(1)  # numpy counts up before the first block
    zero_C = np.zeros_like(block_C)
    words = [block_C, zero_C, zero_C, np.full_like(block_C, use)]
    keys = [seeds_C, positions_C]
    for index in range(_ROUNDS):
        if index:
            keys = [key + step for key, step in zip(keys, _WEYL, strict=True)]
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    word_C = np.choose(ids_C & 3, words)
    return (word_C >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(a_C: Words, b: np.uint64) -> tuple[Words, Words]:
    """High and low 64 bits of the 128-bit products, from 32-bit halves."""
    a_low, a_high, b_low, b_high = a_C & _LOW, a_C >> _HALF, b & _LOW, b >> _HALF
    low, cross = a_low * b_low, a_high * b_low
    middle = (low >> _HALF) + (cross & _LOW) + a_low * b_high
    return a_high * b_high + (cross >> _HALF) + (middle >> _HALF), a_C * b
