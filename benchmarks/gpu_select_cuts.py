"""`gpu-select-cuts`: the index scan over ways to cut a launch, to choose the defaults of `index_select/gpu.py`.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_select_cases import cases

    yield from cases(options, sweep=True)


BENCHMARK = Benchmark(name="gpu-select-cuts", summary="keys a tile, shares and warps of the index scan", build=build)
