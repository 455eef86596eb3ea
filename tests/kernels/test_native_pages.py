"""Native selection, attention and packing over pages against the operators on unpacked rows: the same bits.

Random ragged batches, pages of odd row counts, empty segments, NaN rows, scales so far apart that integer sums do not apply.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.kernels.index_select import select
from kvist.kernels.index_select.pages import select_pages
from kvist.kernels.native import native_or_none
from kvist.kernels.native.pages import PageSource, WindowRing
from kvist.kernels.quantise import quantise
from kvist.kernels.quantise.pages import write_pages
from kvist.kernels.sparse_attention import sparse_attention
from kvist.kernels.sparse_attention.pages import attend_pages, keep_window
from kvist.quant import pack_main_fp4, pack_mxfp4, unpack_main_fp4, unpack_mxfp4

pytestmark = pytest.mark.skipif(native_or_none() is None, reason="no C compiler: there is no native code to test")
PARTS = ("main codes", "main scales", "key codes", "key scales")


class Pages:
    """A few slots with full tables over one pool, and what was written as values."""

    def __init__(self, slots: int, tokens: int, ratio: int, rows: int, width: int, key_width: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.ratio, self.rows, self.width, self.key_width = ratio, rows, width, key_width
        sizes = [rows * n for n in (width // 2, width // 16, key_width // 2, key_width // 32)]
        offsets = tuple(sum(sizes[:i]) + 5 * i for i in range(4))
        each = -(-tokens // (ratio * rows))
        self.bytes_PB = torch.randint(0, 256, (slots * each, sum(sizes) + 20), generator=self.random, dtype=torch.uint8)
        self.table = torch.randperm(slots * each, generator=self.random).int().view(slots, each)
        self.source = PageSource.of(
            self.bytes_PB, self.table, ratio=ratio, rows=rows, main_width=width, key_width=key_width, offsets=offsets
        )
        self.offsets, self.count = offsets, tokens // ratio
        self.main_SMC = self.normal(slots, self.count, width)
        self.key_SMI = self.normal(slots, self.count, key_width)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def write(self) -> None:
        """Pack the current values into the pages."""
        for slot, (main, key) in enumerate(zip(self.main_SMC, self.key_SMI, strict=True)):
            positions = torch.arange(self.count) * self.ratio
            write_pages(self.source, torch.full((self.count,), slot), positions, main, key)

    def stored(self, slot: int, row: int, part: str) -> Tensor:
        index = PARTS.index(part)
        size = (self.width // 2, self.width // 16, self.key_width // 2, self.key_width // 32)[index]
        start = self.offsets[index] + row % self.rows * size
        return self.bytes_PB[self.table[slot, row // self.rows].long(), start : start + size]

    def main(self, slot: int) -> Tensor:
        return unpack_main_fp4(*pack_main_fp4(self.main_SMC[slot]), torch.float32)

    def keys(self, slot: int) -> Tensor:
        return unpack_mxfp4(*pack_mxfp4(self.key_SMI[slot]), torch.float32)


def segments(lengths: list[int], positions: list[int]) -> Tensor:
    table, start = [], 0
    for slot, (length, position) in enumerate(zip(lengths, positions, strict=True)):
        table.append((slot, start, length, position, position))
        start += length
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 5)


@pytest.mark.parametrize(("width", "key_width", "rows"), [(64, 64, 7), (32, 32, 4), (512, 128, 16), (96, 288, 5)])
def test_packing_gives_the_bytes_of_the_format(width: int, key_width: int, rows: int) -> None:
    pages = Pages(2, 60, 2, rows, width, key_width, 0)
    pages.main_SMC *= torch.exp2(torch.randint(-30, 20, (2, 30, 1), generator=pages.random))
    pages.key_SMI *= torch.exp2(torch.randint(-140, 120, (2, 30, 1), generator=pages.random).float())
    pages.main_SMC[0, 3, :16] = -0.0
    pages.main_SMC[1, 4] = torch.nan
    pages.key_SMI[1, 5] = torch.inf
    pages.write()
    for slot in range(2):
        expected = dict(zip(PARTS, (*pack_main_fp4(pages.main_SMC[slot]), *pack_mxfp4(pages.key_SMI[slot])), strict=True))
        for row in range(30):
            for part, values in expected.items():
                if (slot, row) not in ((1, 4), (1, 5)) or part.endswith("scales"):
                    assert torch.equal(pages.stored(slot, row, part), values[row]), (slot, row, part)


SHAPES = [
    ([1] * 6, [40, 0, 3, 119, 64, 15]),
    ([3, 0, 1, 17, 2, 5], [10, 50, 7, 33, 0, 100]),
    ([41, 7], [0, 60]),
    ([1], [77]),
    ([], []),
]


@pytest.mark.parametrize(("lengths", "positions"), SHAPES)
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("mode", ["all", "publish", "pool", "pool and publish"])
@pytest.mark.parametrize(("heads", "key_width", "rows"), [(4, 64, 16), (3, 32, 5), (32, 128, 32), (1, 288, 3)])
@pytest.mark.parametrize("input_kind", ["plain", "far scales", "off the grid", "broken"])
def test_selection_is_that_of_unpacked_keys(
    lengths: list[int], positions: list[int], ratio: int, mode: str, heads: int, key_width: int, rows: int, input_kind: str
) -> None:
    pages = Pages(max(1, len(lengths)), 128, ratio, rows, 32, key_width, 1)
    count, k, size, blocks = sum(lengths), 9, 4, 5
    q, weight = pages.normal(count, heads, key_width), pages.normal(count, heads)
    if input_kind == "far scales":
        pages.key_SMI *= torch.exp2(torch.randint(-12, 12, pages.key_SMI.shape, generator=pages.random).float())
        q *= torch.exp2(torch.randint(-12, 12, q.shape, generator=pages.random).float())
        q[::3, :, :32] = 0
    if input_kind != "off the grid":
        q = quantise(q, "mxfp4")
    if input_kind == "broken" and count:
        pages.key_SMI[0, 2] = torch.nan
        pages.key_SMI[0, 3] = 0
        q[count // 2, 0, 1], weight[0, 0] = torch.nan, torch.inf
    pages.write()
    pool = torch.full((count, 6), -1)
    for n in range(count if mode.startswith("pool") else 0):
        ids = torch.randperm(128 // ratio // size, generator=pages.random)[: n % 6].sort().values
        pool[n, : len(ids)] = ids
    pool_NB = pool if mode.startswith("pool") else None
    published = blocks if "publish" in mode else 0
    table = segments(lengths, positions)
    got = select_pages(pages.source, table, q, weight, k=k, block_size=size, pool_NB=pool_NB, publish_blocks=published)
    for slot, start, length, position, _ in table.tolist():
        at = slice(start, start + length)
        visible = (torch.arange(position, position + length) + 1) // ratio
        keys, part = pages.keys(slot)[: (position + length) // ratio], None if pool_NB is None else pool_NB[at]
        want = select(q[at], weight[at], keys, visible, k=k, block_size=size, pool_NB=part, publish_blocks=published, impl="cpu")
        assert torch.equal(got.topk_NK[at], want.topk_NK), f"slot {slot}"
        if published:
            assert got.candidates_NB is not None and want.candidates_NB is not None
            assert torch.equal(got.candidates_NB[at], want.candidates_NB), f"slot {slot}"


@pytest.mark.parametrize("published", [0, 5])
@pytest.mark.parametrize("lengths", [[1], [3]])
def test_keys_shared_out_between_threads_choose_the_same(
    published: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tiles of queries than threads: scores come from several threads, more than one span of rows each."""
    tokens, heads, width = 9003, 64, 128
    pages = Pages(1, tokens, 1, 64, 32, width, 3)
    pages.write()
    count = sum(lengths)
    q, weight = quantise(pages.normal(count, heads, width), "mxfp4"), pages.normal(count, heads)
    table = segments(lengths, [tokens - 2 - count])
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("kvist.kernels.native.calls._threads", threads)
        found.append(select_pages(pages.source, table, q, weight, k=40, block_size=8, publish_blocks=published))
    visible = torch.arange(tokens - 2 - count, tokens - 2) + 1
    want = select(q, weight, pages.keys(0)[: tokens - 2], visible, k=40, block_size=8, publish_blocks=published, impl="cpu")
    for got in found:
        assert torch.equal(got.topk_NK, want.topk_NK)
        assert published == 0 or torch.equal(got.candidates_NB, want.candidates_NB)  # type: ignore[arg-type]


def test_the_newest_block_is_kept_and_ties_go_to_lower_rows() -> None:
    """IDX-05 with block maxima 5, 4, 3, 2, -9 (17 rows); IDX-07 with a query of zeros, alone and among others."""
    pages = Pages(2, 32, 1, 16, 32, 32, 5)
    pages.key_SMI[:] = 0
    pages.key_SMI[0, :17, 0] = torch.tensor([5.0, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1])
    pages.write()
    q, weight = torch.zeros(2, 1, 32), torch.ones(2, 1)
    q[0, 0, 0] = 1.0
    table = torch.tensor([[0, 0, 1, 16, 16], [1, 1, 1, 29, 29]])
    got = select_pages(pages.source, table, q, weight, k=4, block_size=4, publish_blocks=2)
    assert got.candidates_NB is not None
    assert got.candidates_NB.tolist() == [[0, 4], [0, 7]]
    assert got.topk_NK.tolist() == [[0, 4, 8, 12], [0, 1, 2, 3]]
    again = select_pages(pages.source, table, q, weight, k=8, block_size=4, pool_NB=got.candidates_NB)
    assert again.topk_NK.tolist() == [[0, 1, 2, 3, 16, -1, -1, -1], [0, 1, 2, 3, 28, 29, -1, -1]]
    alone = select_pages(pages.source, torch.tensor([[1, 0, 1, 29, 29]]), q[1:], weight[1:], k=4, block_size=4)
    assert torch.equal(alone.topk_NK, got.topk_NK[1:])


@pytest.mark.parametrize("length", [1, 5])
def test_sums_that_round_in_float_round_here_too(length: int) -> None:
    """32 products too small to move the sum one by one: added first, they would move it and row 1 would win."""
    pages = Pages(1, 32, 1, 16, 32, 64, 4)
    pages.key_SMI[:] = 0
    pages.key_SMI[0, :, :32] = 6.0
    pages.key_SMI[0, 1:, 32:] = 6.0 * 2.0**-24
    pages.write()
    q, weight = torch.full((length, 1, 64), 6.0), torch.ones(length, 1)
    table = torch.tensor([[0, 0, length, 20, 20]])
    got = select_pages(pages.source, table, q, weight, k=1, block_size=4)
    visible = torch.arange(21, 21 + length)
    want = select(q, weight, pages.keys(0)[: 20 + length], visible, k=1, block_size=4, impl="cpu")
    assert torch.equal(got.topk_NK, want.topk_NK)
    assert got.topk_NK.tolist() == [[0]] * length


@pytest.mark.parametrize(("lengths", "positions"), SHAPES)
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize(("heads", "width", "rows"), [(8, 64, 16), (3, 32, 5), (10, 96, 2), (64, 512, 64), (20, 512, 16)])
def test_attention_is_that_of_unpacked_rows_and_copied_windows(
    lengths: list[int], positions: list[int], ratio: int, heads: int, width: int, rows: int
) -> None:
    window, size, k = 8, 11, 6
    pages = Pages(max(1, len(lengths)), 160, max(1, ratio), rows, width, 32, 2)
    pages.main_SMC[0, 1] = torch.nan
    pages.write()
    count = sum(lengths)
    q, fresh = pages.normal(count, heads, width), pages.normal(count, width)
    sink = pages.normal(heads)
    old = [pages.normal(position, width) for position in positions]
    values, state = torch.full((max(1, len(lengths)), size, width), torch.nan), torch.full((max(1, len(lengths)), 3), -1)
    ring = WindowRing.of(values, state, window)
    for slot, entries in enumerate(old):
        keep_window(ring, torch.tensor([[slot, 0, len(entries), 0, 0]]), entries)
    table = segments(lengths, positions)
    topk = torch.full((count, k), -1)
    for _, start, length, position, _ in table.tolist():
        for n in range(length):
            visible = (position + n + 1) // max(1, ratio)
            ids = torch.randperm(visible, generator=pages.random)[: (n % (k + 1)) if n else k].sort().values
            topk[start + n, : len(ids)] = ids
    source = pages.source if ratio else None
    block = attend_pages(None, ring, table, q, fresh, None, sink, block=True)
    got = attend_pages(source, ring, table, q, fresh, topk if ratio else None, sink)
    for slot, start, length, position, _ in table.tolist():
        at, held = slice(start, start + length), old[slot][-window:]
        keys = torch.cat([held, fresh[at]])
        stop = torch.arange(len(held) + 1, len(held) + 1 + length)
        span = torch.stack([(stop - window).clamp_min(0), stop], 1)
        main = pages.main(slot) if ratio else None
        picked = topk[at] if ratio else None
        want = sparse_attention(q[at], keys, span, main, picked, sink, window=window, impl="cpu")
        assert torch.equal(got[at].nan_to_num(7.0), want.nan_to_num(7.0)), f"slot {slot}"
        span = torch.tensor([[0, len(keys)]]).expand(length, 2)
        want = sparse_attention(q[at], keys, span, None, None, sink, window=window + length, impl="cpu")
        assert torch.equal(block[at], want), f"slot {slot}, block"
        newest = torch.cat([old[slot], fresh[at]])[-size:].float()
        cells = torch.arange(position + length - len(newest), position + length) % size
        assert torch.equal(values[slot, cells], newest)
        if position + length:
            assert int(state[slot, 2]) == position + length


def test_a_ring_that_lost_entries_is_an_error() -> None:
    values, state = torch.zeros(1, 10, 32), torch.full((1, 3), -1)
    ring = WindowRing.of(values, state, 8)
    keep_window(ring, torch.tensor([[0, 0, 40, 0, 0]]), torch.zeros(40, 32))
    q, fresh, sink = torch.zeros(1, 2, 32), torch.zeros(1, 32), torch.zeros(2)
    attend_pages(None, ring, torch.tensor([[0, 0, 1, 37, 37]]), q, fresh, None, sink)
    with pytest.raises(AssertionError, match="slot 0, position 36"):
        attend_pages(None, ring, torch.tensor([[0, 0, 1, 36, 36]]), q, fresh, None, sink)
