"""`gpu-attention`: sparse attention over FP8 windows and FP4 pages at released widths, FlashMLA beside it.

Imports its cases where a GPU is asked for, so that the list of benchmarks works anywhere. Knows nothing of what they run.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import Benchmark, Options, TimedCase


def build(options: Options) -> Iterator[TimedCase]:
    """The cases. Raises GpuUnavailable where there is no GPU to run them."""
    from kvist.kernels.device import require_gpu

    require_gpu()
    from benchmarks.gpu_attention_cases import cases

    yield from cases(options, sweep=False)


BENCHMARK = Benchmark(name="gpu-attention", summary="sparse attention at released widths: decode, verify, prefill", build=build)
