"""Cases of `gpu-select` (imported only where Triton is): 32 index heads x 128, exact top-512 over MXFP4 keys of 68 bytes.

A call scores, selects and joins the lists: everything between index queries and row ids. Large key sets exceed the L2 cache by
themselves; small ones are replayed over several contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Options, TimedCase, WrongResult
from benchmarks.gpu_cache_peers import Peers, deep_gemm_decode
from benchmarks.gpu_pages import KEY, KEY_CHANNELS, KEY_SCALES, key_values, random_ids, random_pages
from benchmarks.gpu_timing import calls_for, floor_us, graphed, require_equal
from kvist.kernels.device.pages import DevicePages
from kvist.kernels.index_select import Selection
from kvist.kernels.index_select.gpu import ScanTiling, groups_of, select_packed
from kvist.kernels.index_select.hopper import GROUP
from kvist.quant import pack_mxfp4, unpack_mxfp4

HEADS, K, BLOCK, POOL, PUBLISHED = 32, 512, 8, 2048, 2048
COLD_CONTEXTS = 8
MARGIN = 2e-3
"""Scores may differ from float64 by this share of the row's largest."""
DECODE = [(1, 1, 131072), (1, 1, 1 << 20), (1, 6, 131072), (16, 1, 131072), (64, 1, 131072)]
"""Requests, query rows of each, keys of each."""
CUTS: list[ScanTiling | None] = [None, ScanTiling(together=1, keys=128, warps=4), ScanTiling(together=1, keys=128, warps=8)]
"""The default, then the Triton kernels' cuts."""
SHARED_CUTS: list[ScanTiling | None] = [
    None,
    ScanTiling(together=4, keys=128, warps=8),
    ScanTiling(together=4, keys=64, warps=4),
    ScanTiling(together=2, keys=128, warps=8),
]


class Inputs(NamedTuple):
    """One call's tensors."""

    q_NJI: Tensor
    weight_NJ: Tensor
    pages: DevicePages
    slot_N: Tensor
    visible_N: Tensor
    counts: list[int]
    rows: int
    pool_NB: Tensor | None


def inputs_of(requests: int, rows: int, keys: int, pages: DevicePages, first_slot: int, *, pooled: bool = False) -> Inputs:
    """Queries in the released format (MXFP4 values) that see all keys but those of later verify rows."""
    n, source = requests * rows, torch.Generator("cuda").manual_seed(first_slot)
    q = torch.randn(n, HEADS, KEY_CHANNELS, device="cuda", generator=source)
    q = unpack_mxfp4(*pack_mxfp4(q), torch.bfloat16)
    weight = (torch.randn(n, HEADS, device="cuda", generator=source) * (KEY_CHANNELS * HEADS) ** -0.5).bfloat16()
    slot = first_slot + torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    visible = keys - rows + 1 + torch.arange(rows, device="cuda").repeat(requests)
    pool = random_ids(n, keys // BLOCK, POOL, first_slot) if pooled else None
    return Inputs(q, weight, pages, slot, visible, [rows] * requests, keys, pool)


def run_with(tiling: ScanTiling | None, publish: int = 0) -> Callable[[tuple[Inputs, Tensor]], Selection]:
    """One call cut as given, its groups made beforehand."""

    def run(item: tuple[Inputs, Tensor]) -> Selection:
        x, groups = item
        return select_packed(
            x.q_NJI, x.weight_NJ, x.pages, x.slot_N, x.visible_N, groups, rows=x.rows, k=K, block_size=BLOCK, pool_NB=x.pool_NB,
            publish_blocks=publish, tiling=tiling,
        )  # fmt: skip

    return run


def grouped(x: Inputs, tiling: ScanTiling | None) -> tuple[Inputs, Tensor]:
    """Inputs with their group table."""
    return x, groups_of(x.counts, GROUP if tiling is None else tiling.together, torch.device("cuda"))


def check(name: str, got: Selection, x: Inputs) -> None:
    """Two queries against float64: ascending distinct visible rows, none left out whose margin explains nothing."""
    for n in {0, len(x.q_NJI) - 1}:
        ids = got.topk_NK[n].long()
        seen = int(x.visible_N[n])
        scores = torch.full((x.rows,), -torch.inf, dtype=torch.float64, device="cuda")
        for at in range(0, seen, 1 << 16):
            rows = torch.arange(at, min(at + (1 << 16), seen), device="cuda")
            products = (x.q_NJI[n].double() @ key_values(x.pages, int(x.slot_N[n]), rows).double().T).relu()
            scores[rows] = x.weight_NJ[n].double() @ products
        if x.pool_NB is not None:
            inside = torch.zeros(-(-x.rows // BLOCK), dtype=torch.bool, device="cuda")
            inside[x.pool_NB[n].long()] = True
            scores[~inside.repeat_interleave(BLOCK)[: x.rows]] = -torch.inf
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= seen:
            raise WrongResult(f"{name}, query {n}: ids are not ascending, distinct and visible")
        best = scores.topk(K).values
        slack = MARGIN * float(scores[scores > -torch.inf].abs().max())
        if float(scores[ids].min()) < float(best[-1]) - slack:
            raise WrongResult(
                f"{name}, query {n}: a row of score {float(scores[ids].min())} was taken, the cut is {float(best[-1])}"
            )


def case(
    name: str, items: list[Inputs], cuts: list[ScanTiling | None], peers: Callable[[int], Peers], scored: int, publish: int = 0
) -> TimedCase:
    """One shape; bytes are the keys that must be read, operations the products."""
    x = items[0]
    requests = len(x.counts) if x.pool_NB is None else len(x.q_NJI)
    nbytes = requests * scored * (KEY + KEY_SCALES)
    flops = 2.0 * len(x.q_NJI) * scored * HEADS * KEY_CHANNELS
    floor = floor_us(nbytes, flops)
    calls = calls_for(2 * floor + 10)
    runs = {_label(cut): (cut, run_with(cut, publish)) for cut in cuts}

    def checked() -> None:
        for label, (cut, run) in runs.items():
            item = grouped(x, cut)
            got = run(item)
            check(f"{name}: {label}", got, x)
            for _ in range(20):
                require_equal(f"{name}: {label} repeated", run(item).topk_NK, got.topk_NK)

    checked()
    variants: dict[str, Callable[[], object]] = {
        label: graphed(run, [grouped(item, cut) for item in items], calls) for label, (cut, run) in runs.items()
    }
    return TimedCase(
        name=name, variants=variants | peers(calls), subject="kvist", check=checked, floor=floor, moved_bytes=nbytes, flops=flops,
        calls=calls,
    )  # fmt: skip


def _label(cut: ScanTiling | None) -> str:
    return (
        "kvist"
        if cut is None
        else f"Triton, {cut.together} together, tiles of {cut.keys}, shares of {cut.share or 'auto'}, {cut.warps} warps"
    )


def cases(options: Options, *, sweep: bool) -> Iterator[TimedCase]:
    """Full scans, the source layer's scan with published blocks, candidate pools, a prefill tile."""
    for requests, rows, keys in DECODE[:1] if options.quick else DECODE:
        contexts = COLD_CONTEXTS if requests == 1 and keys <= 131072 else requests
        pages = random_pages(contexts, keys, main=False)
        items = [inputs_of(requests, rows, keys, pages, slot) for slot in range(contexts if contexts > requests else 1)]
        cuts = (SHARED_CUTS if rows > 1 else CUTS) if sweep else [SHARED_CUTS[0] if rows > 1 else CUTS[0]]
        peers = _no_peer if sweep else _deep_gemm(requests, rows, keys)
        yield case(f"scan, {requests} x {rows} rows of {keys} keys", items, cuts, peers, keys)
        if requests == 1 and rows == 1:
            yield case(f"scan with blocks, 1 row of {keys} keys", items, CUTS[:1], _no_peer, keys, PUBLISHED)
        del pages, items
    requests = 4 if options.quick else 64
    pages = random_pages(requests, 131072, main=False)
    pooled = inputs_of(requests, 1, 131072, pages, 0, pooled=True)
    yield case(f"candidate pool, {requests} rows", [pooled], CUTS if sweep else CUTS[:1], _no_peer, POOL * BLOCK)
    del pages, pooled
    queries, keys = (256, 32768) if options.quick else (4096, 131072)
    pages = random_pages(1, keys, main=False)
    cuts = SHARED_CUTS if sweep else SHARED_CUTS[:1]
    # Accumulation: exact FP8 products, summed as Hopper's units do; scores were off float64 by 7e-8 of a row's largest.
    many = inputs_of(1, queries, keys, pages, 0)
    yield case(f"prefill, {queries} queries of {keys} keys, FP8 sums", [many], cuts, _no_peer, keys)


def _no_peer(_: int) -> Peers:
    return {}


def _deep_gemm(requests: int, rows: int, keys: int) -> Callable[[int], Peers]:
    """The peer of a shape, as a function of the calls in a graph."""
    return lambda calls: deep_gemm_decode(requests, rows, HEADS, keys, K, calls)
