"""`gpu-row`: one row through both halves of a layer of released widths, by the launches made for it and by operators for any.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_row_cases import build as made

    yield from made(options)


BENCHMARK = Benchmark(name="gpu-row", summary="one row: experts' half and projections of a layer", build=build)
