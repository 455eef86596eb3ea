"""Lookup of a prompt in the prefix index: hashing its tokens and matching them, with 100M tokens cached."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.cases import Benchmark, Case, CountedCase, Options
from benchmarks.prefix_trace import FULL, SHORTEST, SMALL, FilledIndex, prompt

ALLOWED_US = 1000.0


def _median(filled: FilledIndex, tokens: int, known: bool, count: int) -> float:
    """Microseconds of a lookup; each is of another prompt of `tokens` tokens, so that nothing is warm."""
    long_enough = [number for number, length in enumerate(filled.lengths.tolist()) if length >= tokens]
    step = max(1, len(long_enough) // count)
    times = []
    for number in long_enough[::step][:count]:
        ids = prompt(number if known else number + len(filled.lengths), tokens)
        start = time.perf_counter()
        filled.lookup(ids)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def _build(options: Options) -> Iterator[Case]:
    sizes = (SMALL,) if options.quick else (SMALL, FULL)
    count = 50 if options.quick else 500
    for size in sizes:
        filled = FilledIndex(size)
        cached = f"{size.prefixes:,} prefixes, {size.tokens // 10**6}M tokens cached"
        for name, tokens, known in (
            ("4K prompt", SHORTEST, True),
            ("4K prompt, unknown", SHORTEST, False),
            ("16K prompt", 4 * SHORTEST, True),
        ):
            yield CountedCase(
                name=f"{name}, {cached}",
                count=partial(_median, filled, tokens, known, count),
                check=filled.check,
                unit="us",
                better="lower",
                peers={"allowed": ALLOWED_US} if tokens == SHORTEST else None,
            )
        del filled


BENCHMARK = Benchmark(
    name="prefix-lookup",
    summary="prefix index: hashing and matching a prompt, by its length and by what is cached",
    build=_build,
)
