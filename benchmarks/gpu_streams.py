"""`gpu-streams`: hyper-connections in one pass, the router, cache rows; torch beside them.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_streams_cases import build as made

    yield from made(options)


BENCHMARK = Benchmark(name="gpu-streams", summary="hyper-connections, router and cache rows", build=build)
