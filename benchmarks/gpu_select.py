"""`gpu-select`: index scores, exact top-512 and candidate blocks over MXFP4 keys, DeepGEMM and torch.topk beside them.

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

    yield from cases(options, sweep=False)


BENCHMARK = Benchmark(name="gpu-select", summary="index scores with exact top-512 over MXFP4 pages", build=build)
