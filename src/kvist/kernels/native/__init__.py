"""Native CPU operators: plain C built on first use, called through ctypes. See `build.py`, `calls.py` and `packed.py`.

Owns the shared library and packed copies of weights. Must not know layers, caches or requests.
"""

from kvist.kernels.native.build import NativeBuildError, library
from kvist.kernels.native.calls import (
    at_most_threads,
    empty,
    f32,
    format_code,
    i64,
    native_or_none,
    one_torch_thread,
    reference_runs,
    refuse_gradients,
    threads,
)
from kvist.kernels.native.packed import Packed, pack, pack_fp4, packed, packed_fp4_bytes

__all__ = [
    "NativeBuildError",
    "Packed",
    "at_most_threads",
    "empty",
    "f32",
    "format_code",
    "i64",
    "library",
    "native_or_none",
    "one_torch_thread",
    "pack",
    "pack_fp4",
    "packed",
    "packed_fp4_bytes",
    "reference_runs",
    "refuse_gradients",
    "threads",
]
