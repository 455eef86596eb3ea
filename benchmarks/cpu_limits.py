"""What this machine can do at most, measured where it is asked: memory read and nothing else, integer dot products of registers.

Several runs with as many threads as operators use. Must not know operators.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvist.kernels.native import native_or_none, threads

ROUNDS = 7
OPERATIONS = 2 * 64 * 1024


def seconds_of(run: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Times of some runs."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def memory() -> Tensor:
    """512 MB that no cache holds, pages of their own."""
    return torch.randint(0, 2**31 - 1, (1 << 27,), dtype=torch.int32)


def read_all(data: Tensor) -> None:
    """Read every byte once."""
    native = native_or_none()
    assert native is not None, "there is nothing native to measure without a C compiler"
    native.kvist_read_memory(data.data_ptr(), data.nbytes, threads())


def read_times(data: Tensor, times: int) -> None:
    """Read every byte several times."""
    for _ in range(times):
        read_all(data)


def read_bandwidth(data: Tensor) -> float:
    """Bytes a second, the median, as what is measured against it: who else reads at the time changes it by a half."""
    return data.nbytes / statistics.median(seconds_of(lambda: read_all(data)))


def dot_rate(count: int = 2048) -> float:
    """int8 operations a second; 0 where the processor has no such instruction."""
    native = native_or_none()
    assert native is not None, "there is nothing native to measure without a C compiler"
    if not native.kvist_integer_dots(1, 1):
        return 0.0
    return count * OPERATIONS / min(seconds_of(lambda: native.kvist_integer_dots(count, threads())))
