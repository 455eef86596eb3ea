"""`gpu-expert-cuts`: the experts over ways to cut a launch, to choose the defaults of `kernels/experts/gpu.py`.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_experts_cases import cases

    yield from cases(options, sweep=True)


BENCHMARK = Benchmark(name="gpu-expert-cuts", summary="tiles, warps and stages of the FP4 experts' kernels", build=build)
