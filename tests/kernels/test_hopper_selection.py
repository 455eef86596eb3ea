"""The CUDA kernels of index selection at released widths against the definitions, where `on_hopper.py` says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.pages import DevicePages
from kvist.kernels.index_select import hopper as select_kernels
from kvist.kernels.index_select.ref import select_ref
from kvist.quant import pack_mxfp4, unpack_mxfp4
from tests.kernels.cuda_on_cpu import OnCpu
from tests.kernels.on_hopper import DEVICE, ON_HOPPER, far_apart, processor_kernels, use


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OnCpu]:
    sources = {
        select_kernels._FEW_SOURCES: {name: select_kernels.FEW_THREADS for name, _ in select_kernels._FEW_KERNELS},
        select_kernels._MANY_SOURCES: {"scan_many": 384, "choose": 512},
        select_kernels._FP8_SOURCES: {"scan_many_fp8": 512},
    }
    return processor_kernels(sources, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _kernels_here(built: dict[str, OnCpu], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, select_kernels, built)


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


def test_what_is_kept_between_launches_does_not_grow_with_each_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes bring any number of queries; each finds counters as calls of other numbers and rarer ways left them."""
    monkeypatch.setattr(select_kernels, "_zeroed", {})
    for queries, publish, k, equal in (
        (5, 20, 60, False),
        (8, 20, 60, True),
        (7, 20, 1200, False),
        (6, 20, 60, False),
        (5, 0, 60, False),
    ):
        x = Choice(queries, 1, 300 if equal else 700, equal=equal)
        got = select_kernels.select_few(*x.there, rows=x.m, k=k, publish_blocks=publish)
        for n in range(queries):
            rows, blocks = x.want(n, k, None, publish)
            assert torch.equal(got.topk_NK[n].cpu().long(), rows)
            assert blocks is None or (got.candidates_NB is not None and torch.equal(got.candidates_NB[n].cpu().long(), blocks))
        for (_, most, lists), words in select_kernels._zeroed.items():
            progress = words[-select_kernels.PROGRESS * most :].view(most, select_kernels.PROGRESS)
            # Bins, counts, and blocks that have arrived; verdicts and entries stay.
            assert not words[: lists * select_kernels._counters_of(most)].any() and not progress[:, :32].any()
    assert len(select_kernels._zeroed) == 2


@pytest.mark.parametrize("odd", [False, True])
def test_keys_in_a_pool_beyond_32_bits(odd: bool) -> None:
    """Every way to read keys; `odd`: a query for the kernel of what does not fit FP8."""
    x = Choice(1, 5, 120, equal=False)
    if odd:
        x.q[1, 3, 7] = 1.125
    pages = far_apart(x.pages)
    _, weight, _, slots, visible = x.there
    there = (x.q.to(DEVICE), weight, pages, slots, visible)
    pool = torch.arange(15, dtype=torch.int32).repeat(5, 1).to(DEVICE)
    groups = torch.tensor([(0, 5)], dtype=torch.int32, device=DEVICE)
    few, within = (select_kernels.select_few(*there, rows=120, k=20, pool_NB=given).topk_NK for given in (None, pool))
    many, _ = select_kernels.select_many(*there, groups, rows=120, k=20)
    for n in range(5):
        want = x.want(n, 20, None, 0)[0]
        assert all(torch.equal(got[n].cpu().long(), want) for got in (few, within, many))
