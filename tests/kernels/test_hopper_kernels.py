"""The CUDA kernels of attention at released widths against the definitions, where `on_hopper.py` says."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.pages import DevicePages
from kvist.kernels.rotary.ref import rotate_ref
from kvist.kernels.sparse_attention import hopper as attend_kernels
from kvist.kernels.sparse_attention import sparse_attention
from kvist.quant import pack_fp8, pack_main_fp4, unpack_fp8, unpack_main_fp4
from tests.kernels.cuda_on_cpu import OnCpu
from tests.kernels.on_hopper import DEVICE, ON_HOPPER, far_apart, processor_kernels, use

ATTEND = tuple(f"attend_{parts}" for parts in attend_kernels.PARTS)
ATTEND_FEW = tuple(name for name, _ in attend_kernels._FEW_KERNELS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OnCpu]:
    sources = {
        attend_kernels._SOURCES: dict.fromkeys(ATTEND, 512),
        attend_kernels._FEW_SOURCES: dict.fromkeys(ATTEND_FEW, attend_kernels._FEW_THREADS),
    }
    return processor_kernels(sources, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _kernels_here(built: dict[str, OnCpu], monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, attend_kernels, built)


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


class LastBlocks:
    """A kernel of which a processor runs the last 16 blocks of each launch alone."""

    def __init__(self, kernel: OnCpu) -> None:
        self.kernel = kernel

    def launch(self, argument: ctypes.Structure, blocks: int, threads: int, **options: int) -> None:
        """As `OnCpu.launch`."""
        self.kernel.launch(argument, blocks, threads, first=blocks - 16, **options)


@pytest.mark.parametrize("queries", [4095, 4100])
def test_shares_of_very_many_queries(queries: int, built: dict[str, OnCpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """From 65,536 blocks on, their number times the last one's does not fit 32 bits; the last query's are looked at."""
    torch.manual_seed(9)
    if built:
        monkeypatch.setattr(attend_kernels, "kernels", lambda *_: {"attend_8": LastBlocks(built["attend_8"])})
    memory = Memory(64, 16, 64, 130)
    slots, span = torch.ones(queries, dtype=torch.int32), torch.tensor([[66, 130]]).repeat(queries, 1)
    q, sink, topk = torch.randn(queries, 1, 512).bfloat16(), torch.randn(1), torch.arange(64).repeat(queries, 1)
    got = attend_kernels.attend_hopper(
        q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span.to(DEVICE), slots.to(DEVICE), memory.pages,
        topk.to(DEVICE), sink.to(DEVICE), window=64, cut=(2, 8),
    ).cpu()  # fmt: skip
    last = slice(queries - 1, queries)
    want = sparse_attention(q[last], memory.entries[1], span[last], memory.rows[1], topk[last], sink, window=64, impl="wide")
    assert relative(got[last], want) < 6e-3


@pytest.mark.parametrize("few", [0, 1])
def test_rows_in_a_pool_beyond_32_bits(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    by_few(monkeypatch, few)
    memory = Memory(32, 16, 64, 130)
    q, sink, topk = torch.randn(2, 9, 512).bfloat16(), torch.randn(9), torch.arange(32).repeat(2, 1)
    span, at = torch.tensor([[66, 130]]).repeat(2, 1).to(DEVICE), torch.arange(2, dtype=torch.int32).to(DEVICE)
    there = (q.to(DEVICE), memory.ring[..., :512], memory.ring[..., 512:], span, at)
    near, far = (
        attend_kernels.attend_hopper(*there, pages, topk.to(DEVICE), sink.to(DEVICE), window=64).cpu()
        for pages in (memory.pages, far_apart(memory.pages))
    )
    assert near.abs().max() > 0 and torch.equal(far, near)
