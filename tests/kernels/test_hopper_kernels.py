"""The CUDA kernels of attention and index selection at released widths against the definitions.

On a Hopper card they run there; elsewhere the same sources run on the processor (`cuda_on_cpu.py`), which shows wrong arithmetic,
layouts, indices and barriers, but neither a missing wait for a matrix product nor what the compiler makes of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.pages import DevicePages
from kvist.kernels.index_select import hopper as select_kernels
from kvist.kernels.index_select.ref import select_ref
from kvist.kernels.rotary.ref import rotate_ref
from kvist.kernels.sparse_attention import hopper as attend_kernels
from kvist.kernels.sparse_attention import sparse_attention
from kvist.quant import pack_fp8, pack_main_fp4, pack_mxfp4, unpack_fp8, unpack_main_fp4, unpack_mxfp4

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
FEW = tuple(name for name, _ in select_kernels._FEW_KERNELS)
ATTEND = tuple(f"attend_{parts}" for parts in attend_kernels.PARTS)
ATTEND_FEW = tuple(name for name, _ in attend_kernels._FEW_KERNELS)
THREADS = {
    **dict.fromkeys(ATTEND, 512),
    **dict.fromkeys(ATTEND_FEW, attend_kernels._FEW_THREADS),
    "scan": 128,
    "sift": 256,
    "choose": 512,
    "scan_many": 384,
    **dict.fromkeys(FEW, 256),
    "scan_many_fp8": 512,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Every kernel for the processor; empty on a Hopper card."""
    if ON_HOPPER:
        return {}
    sys.path.insert(0, str(Path(__file__).parent))
    from cuda_on_cpu import build

    folder, made = tmp_path_factory.mktemp("kernels"), {}
    sources = {
        attend_kernels._SOURCES: ATTEND,
        attend_kernels._FEW_SOURCES: ATTEND_FEW,
        select_kernels._FEW_SOURCES: FEW,
        select_kernels._MANY_SOURCES: ("scan_many", "choose"),
        select_kernels._FP8_SOURCES: ("scan_many_fp8",),
    }
    for paths, names in sources.items():
        made.update(build(paths, {name: THREADS[name] for name in names}, folder))
    sys.path.remove(str(Path(__file__).parent))
    return made


@pytest.fixture(autouse=True)
def _kernels_here(built: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no card: the processor's kernels, on a card of two multiprocessors, so that blocks serve many items."""
    if built:
        for module in (attend_kernels, select_kernels):
            monkeypatch.setattr(module, "kernels", lambda *_: built)
            monkeypatch.setattr(module, "multiprocessors", lambda _: 2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def by_few(monkeypatch: pytest.MonkeyPatch, shares: int) -> None:
    """Calls go to `attend_few.cu` with so many shares of the keys; 0: to `attend.cu`."""
    monkeypatch.setattr(attend_kernels, "few_shares", lambda _clusters, tiles, _programs: min(shares, tiles))


class Memory:
    """Two slots of 512-channel rows in pages of mixed order, and wrapped rings; NaN wherever nothing may be read."""

    def __init__(self, rows: int, rows_a_page: int, window: int, position: int) -> None:
        pages = -(-rows // rows_a_page)
        main = 32
        pool = torch.full((2 * pages, main + rows_a_page * 288), 255, dtype=torch.uint8)
        table = torch.randperm(2 * pages).reshape(2, pages).int()
        codes, scales = pack_main_fp4(torch.randn(2, pages * rows_a_page, 512) * torch.rand(2, pages * rows_a_page, 1) * 3)
        self.rows = unpack_main_fp4(codes, scales, torch.bfloat16)
        split = main + rows_a_page * 256
        pool[table.long().flatten(), main:split] = codes.reshape(2 * pages, -1)
        pool[table.long().flatten(), split:] = scales.view(torch.uint8).reshape(2 * pages, -1)
        self.pages = DevicePages(
            bytes_PB=pool.to(DEVICE), table_ST=table.to(DEVICE), rows=rows_a_page, main_codes=main, main_scales=split,
            key_codes=0, key_scales=0,
        )  # fmt: skip
        codes, scales = pack_fp8(torch.randn(2, position, 512) * 2.0 ** torch.randint(-6, 6, (2, position, 1)))
        self.entries = unpack_fp8(codes, scales, torch.bfloat16)
        ring = torch.full((2, window + 3, 528), 255, dtype=torch.uint8)
        for at in range(position - window, position):
            ring[:, at % (window + 3)] = torch.cat([codes[:, at], scales[:, at]], -1)
        self.ring = ring.to(DEVICE)


@pytest.mark.parametrize(
    ("heads", "cut", "rotated"),
    [
        (7, None, True),
        (7, 10, True),
        (66, 4, False),
        (16, 1, True),
        (66, (1, 1), False),
        (66, (3, 1), True),
        (5, (1, 2), True),
        (64, (2, 4), False),
        (9, (4, 8), True),
        (33, (1, 8), True),
    ],
)
def test_attention_equals_its_definition(
    heads: int, cut: tuple[int, int] | int | None, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places without a row, a short window, no key at all, more heads than a tile has."""
    torch.manual_seed(5)
    by_few(monkeypatch, cut if isinstance(cut, int) else 0)
    window, position, queries = 100, 205, 4
    memory = Memory(240, 8, window, position)
    slots = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    stop = torch.full((queries,), position)
    span = torch.stack([stop - window, stop], 1)
    span[2, 0], span[3, 0] = position - 3, position
    topk = torch.stack([torch.randperm(240)[:200].sort().values for _ in range(queries)])
    topk[1, 50:], topk[3] = -1, -1
    q, sink, angle = torch.randn(queries, heads, 512).bfloat16(), torch.randn(heads), torch.rand(queries, 32) * 6
    table = (angle.cos(), angle.sin())
    got = attend_kernels.attend_hopper(
        q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span.to(DEVICE), slots.to(DEVICE), memory.pages,
        topk.to(DEVICE), sink.to(DEVICE), window=window, cut=cut if isinstance(cut, tuple) else None,
        rope=(table[0].to(DEVICE), table[1].to(DEVICE)) if rotated else None,
    ).cpu()  # fmt: skip
    assert torch.equal(got[3], torch.zeros_like(got[3]))
    for i in range(3):
        one, s, place = slice(i, i + 1), int(slots[i]), (table[0][i : i + 1], table[1][i : i + 1])
        turned = rotate_ref(q[one], place) if rotated else q[one]
        arguments = (turned, memory.entries[s], span[one], memory.rows[s], topk[one], sink)
        want = sparse_attention(*arguments, window=window, impl="wide")
        assert relative(got[one], rotate_ref(want, place, back=True) if rotated else want) < 6e-3


@pytest.mark.parametrize("pairs", [0, 12, 16])
@pytest.mark.parametrize("alone", [False, True])
def test_neighbours_share_their_windows(alone: bool, pairs: int) -> None:
    """More queries than blocks: a window that slides by a few rows, another request's, one with fewer rows; `alone`: in a layer
    that has nothing else, so that nothing stands between two windows."""
    torch.manual_seed(3)
    queries, window = 300 if ON_HOPPER else 7, 128
    memory, turning = Memory(240, 8, 150, 300), torch.rand(queries, pairs) * 6
    slots = (torch.arange(queries) > queries // 2).int()
    stop = 300 - 3 * (torch.arange(queries).flip(0) % 7)
    span = torch.stack([stop - window, stop], 1)
    span[2, 0] = stop[2] - 5
    topk = torch.stack([torch.randperm(240)[:200].sort().values for _ in range(queries)])
    q, sink, table = torch.randn(queries, 8, 512).bfloat16(), torch.randn(8), (turning.cos(), turning.sin())
    there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span.to(DEVICE), slots.to(DEVICE))
    chosen = (None, None) if alone else (memory.pages, topk.to(DEVICE))
    rope = (table[0].to(DEVICE), table[1].to(DEVICE)) if pairs else None
    got = attend_kernels.attend_hopper(*there, *chosen, sink.to(DEVICE), window=window, cut=(1, 1), rope=rope).cpu()
    for i in range(queries):
        one, s, place = slice(i, i + 1), int(slots[i]), (table[0][i : i + 1], table[1][i : i + 1])
        turned = rotate_ref(q[one], place) if pairs else q[one]
        arguments = (turned, memory.entries[s], span[one], *((None, None) if alone else (memory.rows[s], topk[one])), sink)
        want = sparse_attention(*arguments, window=window, impl="wide")
        assert relative(got[one], rotate_ref(want, place, back=True) if pairs else want) < 6e-3


@pytest.mark.parametrize("few", [0, 1, 2])
def test_attention_of_pages_alone_and_of_a_window_alone(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    by_few(monkeypatch, few)
    memory = Memory(64, 16, 64, 130)
    slots, span = torch.tensor([1], dtype=torch.int32), torch.tensor([[66, 130]])
    q, sink, topk = torch.randn(1, 9, 512).bfloat16(), torch.randn(9), torch.arange(64).unsqueeze(0)
    there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:])
    at, sinks, none = slots.to(DEVICE), sink.to(DEVICE), torch.tensor([[130, 130]]).to(DEVICE)
    alone = attend_kernels.attend_hopper(*there, none, at, memory.pages, topk.to(DEVICE), sinks, window=64).cpu()
    want = sparse_attention(q, memory.entries[1][:1], torch.tensor([[0, 0]]), memory.rows[1], topk, sink, window=1, impl="wide")
    assert relative(alone, want) < 6e-3
    near = attend_kernels.attend_hopper(*there, span.to(DEVICE), at, None, None, sinks, window=64).cpu()
    assert relative(near, sparse_attention(q, memory.entries[1], span, None, None, sink, window=64, impl="wide")) < 6e-3


@pytest.mark.parametrize("shares", [2, 6])
def test_few_queries_with_large_scores(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that rise from tile to tile and differ between shares; heads with ordinary scores keep their bits."""
    torch.manual_seed(5)
    by_few(monkeypatch, shares)
    memory = Memory(240, 8, 100, 205)
    slots = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    span = torch.tensor([[105, 205], [105, 205], [202, 205], [205, 205], [105, 205]])
    topk = torch.stack([torch.randperm(240)[:200].sort().values for _ in range(5)])
    topk[1, 50:], topk[3] = -1, -1
    sink, plain = torch.randn(9), torch.randn(5, 9, 512).bfloat16()
    large = plain.clone()
    large[1:, 2:5] *= 40

    def attend(q: Tensor) -> Tensor:
        there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span.to(DEVICE), slots.to(DEVICE), memory.pages)
        return attend_kernels.attend_hopper(*there, topk.to(DEVICE), sink.to(DEVICE), window=100).cpu()

    got, other = attend(large), attend(plain)
    for i in (0, 1, 2, 4):
        one, s = slice(i, i + 1), int(slots[i])
        arguments = (large[one], memory.entries[s], span[one], memory.rows[s], topk[one], sink)
        assert relative(got[one], sparse_attention(*arguments, window=100, impl="wide")) < 6e-3
    assert torch.equal(got[3], torch.zeros_like(got[3]))
    small_heads = [h for h in range(9) if not 2 <= h < 5]
    assert torch.equal(got[:, small_heads], other[:, small_heads])


@pytest.mark.parametrize(
    ("clusters", "tiles", "shares"),
    [
        (4, 10, 10),
        (4, 2, 2),
        (8, 10, 5),
        (16, 10, 5),
        (24, 10, 4),
        (32, 10, 3),
        (36, 10, 3),
        (64, 10, 2),
        (68, 10, 0),
        (256, 1, 0),
        (128, 1, 1),
    ],
)
def test_shares_of_few_queries_run_side_by_side(clusters: int, tiles: int, shares: int) -> None:
    """On 132 multiprocessors: as few tiles a block as may be, in as few shares."""
    assert attend_kernels.few_shares(clusters, tiles, 132) == shares


@pytest.mark.skipif(not ON_HOPPER, reason="needs the compiler beside a Hopper card")
@pytest.mark.parametrize("name", ATTEND_FEW)
def test_products_of_few_queries_do_not_wait_for_each_other(name: str) -> None:
    """Where registers are short, or a loop may not run at all, ptxas quietly puts a wait behind every matrix product."""
    from kvist.kernels.device.cuda_source import built as compiled
    from tests.kernels.hopper import Built

    source = "".join(path.read_text() for path in attend_kernels._FEW_SOURCES)
    cubin = compiled(source, attend_kernels._FEW_SOURCES[-1].name, "sm_90a")
    sass = Built(name=name, registers=0, local_bytes=0, shared_bytes=0, cubin=cubin).sass()
    kernel = sass.split(f"Function : {name}\n")[1].split("Function : ")[0]
    assert kernel.count("HGMMA") == 16
    assert kernel.count("WARPGROUP.DEPBAR") <= 4


@pytest.mark.parametrize("shares", [1, 2])
def test_page_tables_wider_than_shared_memory_takes(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(8)
    by_few(monkeypatch, shares)
    memory = Memory(128, 16, 64, 130)
    wide = torch.nn.functional.pad(memory.pages.table_ST, (0, attend_kernels.FEW_PAGES))
    q, sink, topk = torch.randn(1, 9, 512).bfloat16(), torch.randn(9), torch.arange(128).unsqueeze(0)
    none, at = torch.tensor([[130, 130]]).to(DEVICE), torch.tensor([1], dtype=torch.int32).to(DEVICE)
    there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], none, at)
    narrow, far = (
        attend_kernels.attend_hopper(*there, pages, topk.to(DEVICE), sink.to(DEVICE), window=0).cpu()
        for pages in (memory.pages, replace(memory.pages, table_ST=wide))
    )
    assert narrow.abs().max() > 0 and torch.equal(far, narrow)


def test_a_query_that_is_no_number_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    by_few(monkeypatch, 2)
    memory = Memory(64, 16, 64, 130)
    slots, span = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[66, 130], [66, 130]])
    q, sink, topk = torch.randn(2, 17, 512).bfloat16(), torch.randn(17), torch.arange(64).repeat(2, 1)

    def attend(q: Tensor) -> Tensor:
        there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span.to(DEVICE), slots.to(DEVICE), memory.pages)
        return attend_kernels.attend_hopper(*there, topk.to(DEVICE), sink.to(DEVICE), window=64).cpu()

    want, broken = attend(q), q.clone()
    broken[1, 16, 100] = float("nan")
    got = attend(broken)
    assert got[1, 16].isnan().all()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1, :16], want[1, :16])


def small(*shape: int) -> Tensor:
    """Integers -2..2: every order of sums gives the same bits, and scores tie often."""
    return torch.randint(-2, 3, shape).float()


class Choice:
    """Requests with keys in pages of mixed order, their queries, and the exact choice."""

    def __init__(self, requests: int, each: int, m: int, *, equal: bool) -> None:
        torch.manual_seed(7)
        rows_a_page, self.m, n = 32, m, requests * each
        pages = -(-m // rows_a_page)
        codes, scales = pack_mxfp4(small(requests, pages * rows_a_page, 128) * 2.0 ** torch.randint(-2, 3, (requests, 1, 1)))
        self.keys = unpack_mxfp4(codes, scales, torch.float32)
        table = torch.randperm(requests * pages).reshape(requests, pages).int()
        pool = torch.full((requests * pages, rows_a_page * 68), 255, dtype=torch.uint8)
        pool[table.long().flatten(), : rows_a_page * 64] = codes.reshape(requests * pages, -1)
        pool[table.long().flatten(), rows_a_page * 64 :] = scales.view(torch.uint8).reshape(requests * pages, -1)
        self.pages = DevicePages(
            bytes_PB=pool.to(DEVICE), table_ST=table.to(DEVICE), rows=rows_a_page, main_codes=0, main_scales=0, key_codes=0,
            key_scales=rows_a_page * 64,
        )  # fmt: skip
        self.slots = torch.arange(requests).repeat_interleave(each)
        self.visible = torch.randint(1, m + 1, (n,))
        self.visible[0] = m
        self.q, weight = small(n, 32, 128).bfloat16(), torch.randint(-1, 2, (n, 32)).bfloat16()
        self.weight = torch.zeros_like(weight) if equal else weight
        slots = self.slots.int().to(DEVICE)
        self.there = (self.q.to(DEVICE), self.weight.to(DEVICE), self.pages, slots, self.visible.to(DEVICE))

    def want(self, n: int, k: int, pool: Tensor | None, publish: int) -> tuple[Tensor, Tensor | None]:
        """Rows and blocks of query n by the definition, in float64."""
        at = slice(n, n + 1)
        keys = self.keys[int(self.slots[n]), : self.m].double()
        inside = None if pool is None else pool[at].long()
        chosen = select_ref(
            self.q[at].double(), self.weight[at].double(), keys, self.visible[at], k=k, block_size=8, pool_NB=inside,
            publish_blocks=publish,
        )  # fmt: skip
        return chosen.topk_NK[0], None if chosen.candidates_NB is None else chosen.candidates_NB[0]


@pytest.mark.parametrize(
    ("requests", "m", "k", "publish", "candidates", "equal"),
    [
        (2, 900, 100, 20, 0, False),
        (1, 300, 512, 16, 0, False),
        (2, 1300, 64, 0, 60, False),
        # More equal scores than the buffer holds: the lowest ids, found by reading the scores again.
        (1, 4700, 64, 30, 0, True),
        # Equals of the K-th within what shares list, and beyond it.
        (1, 700, 3, 0, 0, True),
        (1, 2048, 100, 256, 0, False),
    ],
)
def test_selection_of_single_queries(requests: int, m: int, k: int, publish: int, candidates: int, equal: bool) -> None:
    x = Choice(requests, 1, m, equal=equal)
    pool = None
    if candidates:
        # Blocks that a query sees, ascending, -1 last.
        pool = torch.full((requests, candidates), -1, dtype=torch.int32)
        for n in range(requests):
            some = torch.randperm(-(-int(x.visible[n]) // 8))[: candidates - 20 * n].sort().values.int()
            pool[n, : len(some)] = some
    given = None if pool is None else pool.to(DEVICE)
    for _ in range(2):  # The second call finds the counters as the first left them.
        got = select_kernels.select_few(*x.there, rows=m, k=k, pool_NB=given, publish_blocks=publish)
    for n in range(requests):
        rows, blocks = x.want(n, k, pool, publish)
        assert torch.equal(got.topk_NK[n].cpu().long(), rows)
        assert blocks is None or (got.candidates_NB is not None and torch.equal(got.candidates_NB[n].cpu().long(), blocks))


@pytest.mark.parametrize(("publish", "candidates"), [(20, 0), (0, 40)])
def test_selection_of_more_queries_than_a_launch_keeps_scores_of(
    publish: int, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five queries, two a launch: the same rows as by one launch."""
    x = Choice(5, 1, 700, equal=False)
    pool = None
    if candidates:
        pool = torch.full((5, candidates), -1, dtype=torch.int32)
        for n in range(5):
            some = torch.randperm(-(-int(x.visible[n]) // 8))[:candidates].sort().values.int()
            pool[n, : len(some)] = some
        pool = pool.to(DEVICE)
    launches = []
    launch = select_kernels._launch_few
    monkeypatch.setattr(select_kernels, "_launch_few", lambda *a, **b: launches.append(len(a[0])) or launch(*a, **b))
    whole = select_kernels.select_few(*x.there, rows=700, k=64, pool_NB=pool, publish_blocks=publish)
    monkeypatch.setattr(select_kernels, "MOST_SCORES", 2 * (8 * candidates or 700) + 1)
    parts = select_kernels.select_few(*x.there, rows=700, k=64, pool_NB=pool, publish_blocks=publish)
    assert launches == [5, 2, 2, 1] and torch.equal(whole.topk_NK, parts.topk_NK)
    if publish:
        assert whole.candidates_NB is not None and parts.candidates_NB is not None
        assert torch.equal(whole.candidates_NB, parts.candidates_NB)
    else:
        assert whole.candidates_NB is parts.candidates_NB is None


def test_selection_of_queries_that_see_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, one row, a few: most blocks of the launch have no share, and both lists are picked side by side."""
    monkeypatch.setattr(select_kernels, "multiprocessors", lambda _: 4)
    x = Choice(3, 1, 1024, equal=False)
    x.visible = torch.tensor([0, 1, 300])
    got = select_kernels.select_few(*x.there[:4], x.visible.to(DEVICE), rows=1024, k=100, publish_blocks=40)
    assert got.candidates_NB is not None
    for n in range(3):
        rows, blocks = x.want(n, 100, None, 40)
        assert torch.equal(got.topk_NK[n].cpu().long(), rows)
        assert torch.equal(got.candidates_NB[n].cpu().long(), blocks)


@pytest.mark.parametrize(
    ("m", "k", "first", "together"),
    # The second: more of the best than a share lists, so that all are told how low to go.
    [(2048, 200, 256, 256), (4608, 600, 768, 768), (4608, 600, 256, 1536)],
)
def test_selection_where_the_best_rows_lie_together(
    m: int, k: int, first: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares that hold many of the best, and others that hold none."""
    monkeypatch.setattr(select_kernels, "multiprocessors", lambda _: 4)
    x = Choice(1, 1, m, equal=False)
    for page in range(first // 32, (first + together) // 32):
        start = x.pages.key_scales
        x.pages.bytes_PB[int(x.pages.table_ST[0, page]), start : start + 128] += 10
    x.keys[0, first : first + together] *= 1024
    x.weight = x.weight.abs()
    got = select_kernels.select_few(x.there[0], x.weight.to(DEVICE), *x.there[2:], rows=m, k=k)
    assert torch.equal(got.topk_NK[0].cpu().long(), x.want(0, k, None, 0)[0])


@pytest.mark.parametrize(
    ("requests", "each", "m", "k", "publish", "equal"),
    [(1, 18, 300, 100, True, False), (2, 2, 4300, 50, False, False), (1, 1, 4400, 50, False, True)],
)
def test_selection_of_queries_that_share_keys(requests: int, each: int, m: int, k: int, publish: bool, equal: bool) -> None:
    """Groups of 16 and a rest, spills that are cut back, shares that are joined, maxima of blocks."""
    x = Choice(requests, each, m, equal=equal)
    sizes = [
        (r * each + at, min(select_kernels.GROUP, each - at))
        for r in range(requests)
        for at in range(0, each, select_kernels.GROUP)
    ]
    groups = torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    topk, maxima = select_kernels.select_many(*x.there, groups, rows=m, k=k, publish=publish)
    for n in range(0, requests * each, 3):
        rows, blocks = x.want(n, k, None, 12 if publish else 0)
        assert torch.equal(topk[n].cpu().long(), rows)
        if blocks is not None and maxima is not None:
            seen = -(-int(x.visible[n]) // 8)
            orders = maxima[n, :seen].cpu().long() & 0xFFFFFFFF
            best = orders.sort(descending=True, stable=True).indices[:12].sort().values
            assert torch.equal(best, blocks[blocks >= 0])


@pytest.mark.parametrize("each", [5, 13])
def test_groups_that_are_not_full_keep_scores_of_their_queries_alone(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All see all keys. What a product has beside a group's queries once filled the lists of the next group's."""
    requests, m = (20, 20_000) if ON_HOPPER else (2, 700)
    x = Choice(requests, each, m, equal=False)
    seen = torch.full((requests * each,), m)
    x.visible = seen
    groups = torch.tensor([(r * each, each) for r in range(requests)], dtype=torch.int32, device=DEVICE)
    made, empty = [], torch.empty
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *a, **b: made.append(empty(*a, **b).fill_(-7)) or made[-1])
        topk, _ = select_kernels.select_many(*x.there[:4], seen.to(DEVICE), groups, rows=m, k=60)
    (spill,) = (tensor for tensor in made if tensor.numel() % (16 * 4096 * 2) == 0 and tensor.numel())
    assert bool((spill.view(-1, 16, 8192)[:, each:] == -7).all())
    assert bool((spill.view(-1, 16, 8192)[:, :each] != -7).any(2).all())
    for n in range(0, requests * each, 3):
        assert torch.equal(topk[n].cpu().long(), x.want(n, 60, None, 0)[0])


class Nothing:
    """A kernel that does nothing."""

    def launch(self, *_: object, **__: object) -> None:
        """Leave every output as it is."""


@pytest.mark.parametrize("odd", ["", "powers", "query", "weight", "key"])
def test_fp8_products_take_what_they_hold_exactly_and_leave_the_rest(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bfloat16 kernel, choices are exact as long as everything fits; with it, always."""
    x, m, k = Choice(1, 18, 700, equal=False), 700, 60
    q, weight, pages, slots, visible = x.there
    if odd == "powers":
        x.q = (x.q.float() * 2.0 ** torch.randint(-8, 9, (18, 32, 1))).bfloat16()
        q = x.q.to(DEVICE)
    if odd == "query":
        q[0, 31, 127] = x.q[0, 31, 127] = 1.125
    if odd == "weight":
        weight[2, 5] = x.weight[2, 5] = 1e-35
    if odd == "key":
        page = int(pages.table_ST[0, 3])
        pages.bytes_PB[page, pages.key_scales + 8 : pages.key_scales + 12] = 100
        x.keys[0, 98] = unpack_mxfp4(
            pages.bytes_PB[page, 128:192].cpu(), pages.bytes_PB[page, pages.key_scales + 8 :][:4].cpu(), torch.float32
        )
    groups = torch.tensor([(0, 16), (16, 2)], dtype=torch.int32, device=DEVICE)
    whole = select_kernels.kernels
    if odd in ("", "powers"):

        def without(*of: object) -> dict[str, object]:
            return {**whole(*of), "scan_many": Nothing()}

        monkeypatch.setattr(select_kernels, "kernels", without)
    topk, _ = select_kernels.select_many(q, weight, pages, slots, visible, groups, rows=m, k=k)
    alone = select_kernels.select_few(q[:3], weight[:3], pages, slots[:3], visible[:3], rows=m, k=k).topk_NK
    for n in range(18):
        assert torch.equal(topk[n].cpu().long(), x.want(n, k, None, 0)[0])
    assert torch.equal(alone, topk[:3])


def test_rows_to_verify_choose_as_if_decoded() -> None:
    """Values whose sums are rounded: both kernels must add in the same order."""
    x = Choice(1, 6, 500, equal=False)
    q, weight, pages, slots, visible = x.there
    q = unpack_mxfp4(*pack_mxfp4(torch.randn(6, 32, 128)), torch.bfloat16).to(DEVICE)
    weight = torch.randn(6, 32).bfloat16().to(DEVICE)
    groups = torch.tensor([(0, 6)], dtype=torch.int32, device=DEVICE)
    topk, _ = select_kernels.select_many(q, weight, pages, slots, visible, groups, rows=500, k=60)
    assert torch.equal(select_kernels.select_few(q, weight, pages, slots, visible, rows=500, k=60).topk_NK, topk)
