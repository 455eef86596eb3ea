"""Uniform random numbers keyed by (seed, position, use): the same key meets the same numbers, whatever else is asked for.

Implementations: `ref` (numpy), `cpu` (native), equal bit for bit. The stream is Philox 4x64-10 (Salmon et al., SC 2011,
doi:10.1145/2063384.2063405) as numpy's generator gives it, key (seed, position), counter starting at (0, 0, 0, use).
"""

from __future__ import annotations

from kvist.kernels.keyed_uniform import cpu, ref
from kvist.kernels.keyed_uniform.ref import Floats, Ids, Words

__all__ = ["Floats", "Ids", "Words", "uniform_at", "uniform_stream"]


def uniform_stream(seed: int, position: int, count: int, *, use: int = 0, impl: str = "cpu") -> Floats:
    """float64 [count] in [0, 1) with 53 random bits each; a prefix of every longer stream. seed, position in 0..2^64-1.
    Raises ValueError for an unknown `impl`."""
    if impl == "ref":
        return ref.uniform_stream(seed, position, count, use)
    if impl == "cpu":
        return cpu.uniform_stream(seed, position, count, use)
    raise ValueError(f"keyed_uniform has no impl {impl!r}; known: ref, cpu")


def uniform_at(seeds_C: Words, positions_C: Words, ids_C: Ids, *, use: int = 0, impl: str = "cpu") -> Floats:
    """float64 [C]: entry `ids_C[i]` of the stream keyed by (`seeds_C[i]`, `positions_C[i]`), without what lies before it.
    Raises ValueError for an unknown `impl`."""
    if impl == "ref":
        return ref.uniform_at(seeds_C, positions_C, ids_C, use)
    if impl == "cpu":
        return cpu.uniform_at(seeds_C, positions_C, ids_C, use)
    raise ValueError(f"keyed_uniform has no impl {impl!r}; known: ref, cpu")
