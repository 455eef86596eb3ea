"""Median wall time of a callable. Must not know what it measures; reports and records belong to the benchmarks."""

import statistics
import time
from collections.abc import Callable

import torch


def median_time_us(fn: Callable[[], object], *, repeats: int = 20, warmup: int = 3, device: str = "cpu") -> float:
    """Median time of one call in microseconds, after `warmup` untimed calls; waits for `device` when it is a GPU.

    Raises ValueError if repeats is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; a median needs at least 1")
    is_gpu = torch.device(device).type == "cuda"
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(repeats):
        if is_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        fn()
        if is_gpu:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)
