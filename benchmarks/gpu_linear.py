"""`gpu-linear`: the released FP8 projections, ways to cut them, and cuBLAS on bfloat16 beside them.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_linear_cases import build as made

    yield from made(options)


BENCHMARK = Benchmark(name="gpu-linear", summary="FP8 32x32 projections of the release", build=build)
