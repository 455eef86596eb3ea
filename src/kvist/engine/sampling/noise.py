"""Random numbers keyed by (seed, position): the same key meets the same numbers whatever shares the batch.

Owns the Philox 4x64-10 stream (Salmon et al., SC 2011, doi:10.1145/2063384.2063405) in two speeds with the same values: the
whole stream from numpy's generator, single entries by their counter. Must not know logits.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

# The stream of a key is 2^256 blocks long; each use of a position starts at its own word 3 of the counter.
CHOICE, ACCEPT, RESIDUAL, DRAFT = range(4)

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def uniform_stream(seed: int, position: int, size: int, use: int = CHOICE) -> Floats:
    """float64 [size] in [0, 1) with 53 random bits each; a prefix of every longer stream of the same key and use."""
    key = np.array([seed, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, use])).random(size)


def uniform_at(seeds_C: Words, positions_C: Words, ids_C: Ids, use: int = CHOICE) -> Floats:
    """float64 [C]: entry `ids_C[i]` of the stream keyed by (`seeds_C[i]`, `positions_C[i]`), without what lies before it."""
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
    lane_C = ids_C & 3
    word_C = np.choose(lane_C, words)
    return (word_C >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(a_C: Words, b: np.uint64) -> tuple[Words, Words]:
    """High and low 64 bits of the 128-bit products, from 32-bit halves."""
    a_low, a_high, b_low, b_high = a_C & _LOW, a_C >> _HALF, b & _LOW, b >> _HALF
    low, cross = a_low * b_low, a_high * b_low
    middle = (low >> _HALF) + (cross & _LOW) + a_low * b_high
    return a_high * b_high + (cross >> _HALF) + (middle >> _HALF), a_C * b


def gumbel(uniform: Floats) -> Floats:
    """Standard Gumbel noise of uniform numbers, rounded to float32 and held as float64."""
    noise = -np.log(-np.log(np.clip(uniform, 1e-300, 1 - 1e-16)))
    return noise.astype(np.float32).astype(np.float64)


def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """float32 [size] Gumbel noise that depends on (seed, position) only."""
    return torch.from_numpy(gumbel(uniform_stream(seed, position, size)).astype(np.float32))
