"""Keyed uniform numbers by the native library; without a compiler the reference runs, with the same values.

Must not know what the numbers are for.
"""

from __future__ import annotations

import numpy as np

from kvist.kernels.keyed_uniform import ref
from kvist.kernels.keyed_uniform.ref import Floats, Ids, Words
from kvist.kernels.native import native_or_none


def uniform_stream(seed: int, position: int, count: int, use: int) -> Floats:
    """See the package's function."""
    native = native_or_none()
    if native is None:
        return ref.uniform_stream(seed, position, count, use)
    out = np.empty(count)
    native.kvist_uniform(seed, position, use, count, out.ctypes.data)  # ctypes passes 64-bit keys as they are, above 2^63 too
    return out


def uniform_at(seeds_C: Words, positions_C: Words, ids_C: Ids, use: int) -> Floats:
    """See the package's function."""
    native = native_or_none()
    if native is None:
        return ref.uniform_at(seeds_C, positions_C, ids_C, use)
    seeds, positions, ids = (np.ascontiguousarray(part) for part in (seeds_C, positions_C, ids_C))
    out = np.empty(len(ids))
    native.kvist_uniform_at(seeds.ctypes.data, positions.ctypes.data, ids.ctypes.data, use, len(ids), out.ctypes.data)
    return out
