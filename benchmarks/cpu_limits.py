"""What this machine can do at most, measured where it is asked: memory read and nothing else, integer dot products of registers.

With as many threads as operators use. Must not know operators.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kvist.kernels.native import native_or_none, threads

ROUNDS = 7
OPERATIONS = 2 * 64 * 1024


def memory() -> Tensor:
    """512 MB that no cache holds: different positive floats, as int32."""
    return torch.randint(1 << 23, 2**31 - (1 << 24), (1 << 27,), dtype=torch.int32)


def read_all(data: Tensor) -> None:
    """Read every byte once."""
    native = native_or_none()
    assert native is not None, "there is nothing native to measure without a C compiler"
    native.kvist_read_memory(data.data_ptr(), data.nbytes, threads())


def read_bytes(data: Tensor, nbytes: float) -> None:
    """Read that many bytes, the data over and over."""
    whole, rest = divmod(int(nbytes), data.nbytes)
    for _ in range(whole):
        read_all(data)
    read_all(data[: rest // data.itemsize])


def sum_bytes(data: Tensor, nbytes: float) -> None:
    """The same by torch's sum, as the limits of `nano-decode-b1` are measured."""
    values = data.view(torch.float32)
    whole, rest = divmod(int(nbytes), data.nbytes)
    for _ in range(whole):
        values.sum()
    values[: rest // data.itemsize].sum()


def dot_rate(count: int = 2048) -> float:
    """int8 operations a second; 0 where the processor has no such instruction."""
    native = native_or_none()
    assert native is not None, "there is nothing native to measure without a C compiler"
    if not native.kvist_integer_dots(1, 1):
        return 0.0
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        native.kvist_integer_dots(count, threads())
        times.append(time.perf_counter() - start)
    return count * OPERATIONS / min(times)
