"""`gpu-experts`: FP4 experts at released widths, 128 of them, top 6, with Humming and cuBLAS beside them.

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

    yield from cases(options, sweep=False)


BENCHMARK = Benchmark(name="gpu-experts", summary="FP4 experts, gate+up to the sum, at released widths", build=build)
