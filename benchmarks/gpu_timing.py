"""Times one GPU operator as a server would run it: captured in a CUDA graph, its weights rotated so that the L2 cache holds none.

Owns capture, replay and how many copies of a weight make the cache useless. Knows no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from benchmarks.cases import WrongResult

Item = TypeVar("Item")

HBM_BYTES_PER_S = 4.26e12
"""Read bandwidth measured on one H200 (docs/performance.md); floors are bytes over it."""
BF16_FLOPS_PER_S = 781e12
"""cuBLAS bfloat16 8192^3 on the same card: the ceiling of exact products."""
COLD_BYTES = 512 << 20
"""Bytes that a rotation must touch before it returns to its first copy: several times the 60 MB of L2."""
MOST_COPIES = 96
RUN_US = 6000


def copies_for(nbytes: int) -> int:
    """How many copies of something of `nbytes` are used in turn."""
    return max(2, min(MOST_COPIES, -(-COLD_BYTES // max(1, nbytes))))


def calls_for(floor: float) -> int:
    """Calls in one graph, so that a replay lasts milliseconds and its own launch does not count; `floor` in us a call."""
    return max(8, min(512, int(RUN_US / (2 * floor + 4))))


class _Replay:
    """A captured graph with all that its kernels read: a graph holds addresses, not tensors."""

    def __init__(self, graph: torch.cuda.CUDAGraph, *read: object) -> None:
        self._graph, self._read = graph, read

    def __call__(self) -> None:
        self._graph.replay()


def graphed(run: Callable[[Item], object], items: Sequence[Item], calls: int) -> Callable[[], None]:
    """A replay of `calls` runs over `items` in turn, all in one graph. Each item runs once before capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for item in items:
            run(item)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(items[call % len(items)])
    return _Replay(graph, run, items)


def floor_us(nbytes: float, flops: float = 0.0) -> float:
    """Microseconds that bytes or products cost at the measured ceilings, whichever is more."""
    return 1e6 * max(nbytes / HBM_BYTES_PER_S, flops / BF16_FLOPS_PER_S)


def require_near(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Raise `WrongResult` unless got is finite, of want's shape, and within `bound` of it, relative to its norm."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        raise WrongResult(f"{name}: shape {list(got.shape)} for {list(want.shape)}, or not finite")
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
    if not error < bound:
        raise WrongResult(f"{name}: relative error {error:.2e}, at most {bound:.0e}")


def require_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise `WrongResult` unless both are the same bits."""
    if not torch.equal(got, want):
        raise WrongResult(f"{name}: {int((got != want).sum())} of {want.numel()} elements differ")
