"""Cases of `gpu-attention` (imported only where Triton is): window 128 FP8 rows and 512 of 16,384 FP4 rows, 64 heads x 512.

"warm" replays one input, "rotated" several whose rows together exceed the L2 cache. A call is one layer's attention; queries are
given rotated, outputs are left rotated, as FlashMLA does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Options, TimedCase
from benchmarks.gpu_cache_peers import flash_mla_decode
from benchmarks.gpu_pages import CHANNELS, WINDOW, main_values, random_ids, random_pages, random_rings
from benchmarks.gpu_timing import calls_for, floor_us, graphed, require_equal, require_near
from kvist.kernels.device.pages import DevicePages
from kvist.kernels.sparse_attention import sparse_attention
from kvist.kernels.sparse_attention.gpu import Tiling, WindowRows, attend_packed

HEADS, K, ROWS = 64, 512, 16384
CHECKED = 3
DECODE = [(1, 1), (1, 6), (4, 1), (16, 1), (16, 6), (64, 1), (64, 6)]
"""Requests, query rows of each."""
PREFILL_QUERIES, PREFILL_ROWS = 4096, 131072
CUTS = {
    1: [(16, 2, 32, 16), (20, 2, 32, 16), (8, 2, 64, 16)],
    6: [(8, 2, 32, 16), (8, 2, 64, 16)],
    16: [(4, 2, 32, 32), (8, 2, 32, 16)],
    64: [(2, 2, 32, 16), (2, 2, 32, 32), (4, 2, 32, 32)],
    4096: [(1, 2, 16, 16), (1, 2, 32, 16)],
}
"""The Triton kernel's shares, parts, keys a tile, entries a tile; by number of queries (the nearest entry below)."""


class Inputs(NamedTuple):
    """One call's tensors, and its window as values."""

    q_NHC: Tensor
    ring: WindowRows
    span_N2: Tensor
    slot_N: Tensor
    pages: DevicePages
    topk_NK: Tensor
    sink_H: Tensor
    window_DRC: Tensor


def decode_inputs(requests: int, rows: int, pages: DevicePages, seed: int) -> Inputs:
    """`rows` verify rows of each request, the newest entry at a position of its own."""
    n, source = requests * rows, torch.Generator("cuda").manual_seed(seed)
    packed, values = random_rings(requests, seed)
    slot = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    stop = ROWS - rows + 1 + torch.arange(rows, device="cuda").repeat(requests)
    q = torch.randn(n, HEADS, CHANNELS, device="cuda", generator=source).bfloat16()
    sink = torch.randn(HEADS, device="cuda", generator=source)
    span = torch.stack([stop - WINDOW, stop], 1)
    return Inputs(q, WindowRows.of_rows(packed, CHANNELS), span, slot, pages, random_ids(n, ROWS, K, seed), sink, values)


def prefill_inputs(queries: int, pages: DevicePages, seed: int) -> Inputs:
    """Consecutive queries of one request; the ring holds their whole chunk and the window before it."""
    source = torch.Generator("cuda").manual_seed(seed)
    packed, values = random_rings(1, seed, ring=queries + WINDOW)
    stop = WINDOW + 1 + torch.arange(queries, device="cuda")
    q = torch.randn(queries, HEADS, CHANNELS, device="cuda", generator=source).bfloat16()
    slot = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ids = random_ids(queries, pages.table_ST.shape[1] * pages.rows, K, seed)
    span = torch.stack([stop - WINDOW, stop], 1)
    sink = torch.randn(HEADS, device="cuda", generator=source)
    return Inputs(q, WindowRows.of_rows(packed, CHANNELS), span, slot, pages, ids, sink, values)


def run_with(tiling: Tiling | None) -> Callable[[Inputs], Tensor]:
    """One call cut as given."""

    def run(x: Inputs) -> Tensor:
        return attend_packed(x.q_NHC, x.ring, x.span_N2, x.slot_N, x.pages, x.topk_NK, x.sink_H, window=WINDOW, tiling=tiling)

    return run


def check(name: str, run: Callable[[Inputs], Tensor], x: Inputs) -> None:
    """Some queries against float64 of the unpacked rows; 20 runs give the same bits."""
    got = run(x)
    queries = torch.linspace(0, len(x.q_NHC) - 1, min(CHECKED, len(x.q_NHC))).long().tolist()
    for n in queries:
        slot, (start, stop) = int(x.slot_N[n]), x.span_N2[n].tolist()
        cells = torch.arange(start, stop, device="cuda") % x.window_DRC.shape[1]
        rows = main_values(x.pages, slot, x.topk_NK[n].long())
        every = torch.arange(len(rows), device="cuda").unsqueeze(0)
        span = torch.tensor([[0, stop - start]], device="cuda")
        keys = x.window_DRC[slot, cells]
        want = sparse_attention(x.q_NHC[n : n + 1], keys, span, rows, every, x.sink_H, window=WINDOW, impl="wide")
        require_near(f"{name}, query {n}", got[n : n + 1], want, 5e-3)
    for _ in range(20):
        require_equal(f"{name}: repeated", run(x), got)


def tilings(queries: int, *, sweep: bool) -> dict[str, Tiling | None]:
    """The default, and with `sweep` the Triton kernel with every cut for this many queries."""
    cuts: dict[str, Tiling | None] = {"kvist": None}
    if sweep:
        for splits, parts, keys, entries in CUTS[max(n for n in CUTS if n <= queries)]:
            name = f"Triton, {splits} shares, {parts} parts, tiles {keys}/{entries}"
            cuts[name] = Tiling(splits=splits, parts=parts, keys=keys, entries=entries, overlap=splits > 1)
    return cuts


def case(name: str, inputs: list[Inputs], peers: dict[str, Callable[[], object]], calls: int, *, sweep: bool) -> TimedCase:
    """One shape; bytes are rows, queries and outputs."""
    n = len(inputs[0].q_NHC)
    nbytes = n * (WINDOW * 528 + K * 288 + 2 * HEADS * CHANNELS * 2)
    flops = 4.0 * n * (WINDOW + K) * HEADS * CHANNELS
    runs = {label: run_with(cut) for label, cut in tilings(n, sweep=sweep).items()}

    def checked() -> None:
        for label, run in runs.items():
            check(f"{name}: {label}", run, inputs[0])

    checked()
    variants: dict[str, Callable[[], object]] = {label: graphed(run, inputs, calls) for label, run in runs.items()}
    return TimedCase(
        name=name, variants=variants | peers, subject="kvist", check=checked, floor=floor_us(nbytes, flops), moved_bytes=nbytes,
        flops=flops, calls=calls,
    )  # fmt: skip


def cases(options: Options, *, sweep: bool) -> Iterator[TimedCase]:
    """Decode and verify at every batch, then prefill. `sweep`: warm decode only, and prefill, over all cuts."""
    pages = random_pages(64, ROWS, main=True)
    for requests, rows in [(1, 1), (64, 1)] if options.quick else DECODE:
        inputs = [decode_inputs(requests, rows, pages, seed) for seed in range(1 if sweep else 4)]
        calls = calls_for(10.0 if requests * rows < 64 else 60.0)
        peers = {} if sweep else flash_mla_decode(requests, rows, HEADS, K, calls)
        yield case(f"{requests} x {rows} rows, warm", inputs[:1], peers, calls, sweep=sweep)
        if not sweep:
            yield case(f"{requests} x {rows} rows, rotated", inputs, {}, calls, sweep=False)
    del pages
    queries = 512 if options.quick else PREFILL_QUERIES
    inputs = [prefill_inputs(queries, random_pages(1, PREFILL_ROWS, main=True), 0)]
    yield case(f"prefill, {queries} queries", inputs, {}, 8, sweep=sweep)
