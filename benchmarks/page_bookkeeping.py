"""Memory that pool and prefix index spend on a cached page, as the allocator counts it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

from benchmarks.cases import Benchmark, Case, CountedCase, Options
from benchmarks.prefix_trace import FULL, SMALL, FilledIndex, Size

ALLOWED_BYTES = 256.0


class _Measured:
    """Fills an index under the allocator's eyes, once."""

    def __init__(self, size: Size) -> None:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        self.filled = FilledIndex(size)
        gc.collect()
        self.nbytes = tracemalloc.get_traced_memory()[0] - before - self.filled.lengths.nbytes
        tracemalloc.stop()

    def bytes_per_page(self) -> float:
        """Everything that stays, divided by the pages that are cached."""
        return self.nbytes / self.filled.pool.cached


def _build(options: Options) -> Iterator[Case]:
    size = SMALL if options.quick else FULL
    measured = _Measured(size)
    yield CountedCase(
        name=f"{measured.filled.pool.cached:,} pages, {size.prefixes:,} prefixes, {size.tokens // 10**6}M tokens",
        count=measured.bytes_per_page,
        check=measured.filled.check,
        unit="bytes/page",
        better="lower",
        peers={"allowed": ALLOWED_BYTES},
    )


BENCHMARK = Benchmark(
    name="page-bookkeeping",
    summary="pool and prefix index: bytes of bookkeeping a cached page, 100M tokens in pages of 128",
    build=_build,
)
