"""The GPU's index selection against its definition: packed keys, ties, pools, published blocks, shares, odd sizes.

Scores are small integers times powers of two, so that every order of sums gives the same bits and ties are frequent.
Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvist.kernels.index_select import Selection, select
from kvist.quant import pack_mxfp4, unpack_mxfp4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK = 4


def small(*shape: int) -> Tensor:
    """Integers -2..2: exact in every format and sum; products tie often."""
    return torch.randint(-2, 3, shape).float()


def same(got: Selection, want: Selection) -> None:
    assert torch.equal(got.topk_NK.cpu().long(), want.topk_NK)
    assert (got.candidates_NB is None) == (want.candidates_NB is None)
    if got.candidates_NB is not None and want.candidates_NB is not None:
        assert torch.equal(got.candidates_NB.cpu().long(), want.candidates_NB)


def pools(n: int, m: int, count: int) -> Tensor:
    """Ascending candidate blocks, -1 last, a different number each."""
    blocks = -(-m // BLOCK)
    pool = torch.full((n, count), -1, dtype=torch.int64)
    for i in range(n):
        some = torch.randperm(blocks)[: max(1, min(count, blocks) - i)].sort().values
        pool[i, : len(some)] = some
    return pool


# queries, heads, channels, rows, k, published blocks
VALUES = [(3, 2, 32, 45, 7, 3), (9, 5, 24, 70, 16, 5), (1, 3, 64, 3, 8, 2), (2, 2, 32, 300, 5, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", VALUES, ids=str)
def test_values_equal_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, heads, channels, m, k, publish = shape
    torch.manual_seed(3)
    # bfloat16 references round scores to 8 bits: these stay below 256.
    q = (small(n, heads, channels) * (torch.rand(n, heads, channels) < 0.2)).to(dtype)
    weight = torch.randint(-1, 2, (n, heads)).to(dtype)
    keys = small(m, channels).to(dtype)
    visible = torch.randint(0, m + 1, (n,))
    visible[0] = m
    arguments = (q, weight, keys, visible)
    there = [x.to(DEVICE) for x in arguments]
    options = {"k": k, "block_size": BLOCK}
    same(select(*there, publish_blocks=publish, impl="gpu", **options), select(*arguments, publish_blocks=publish, **options))
    pool = pools(n, m, 4)
    want = select(*arguments, pool_NB=pool, **options)
    same(select(*there, pool_NB=pool.to(DEVICE), impl="gpu", **options), want)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("share", [16, 64])
def test_packed_keys_of_several_requests(together: int, share: int) -> None:
    """Pages in mixed order, ragged groups, buffers that overflow, lists joined over two levels; unread bytes are NaN."""
    from kvist.kernels.device.pages import DevicePages
    from kvist.kernels.index_select.gpu import ScanTiling, groups_of, select_packed

    torch.manual_seed(4)
    counts, heads, channels, rows_a_page, pages, k, publish = [1, 3], 3, 64, 8, 12, 6, 4
    m, n = rows_a_page * pages, sum(counts)
    scaled = small(2, m, channels) * 2.0 ** torch.randint(-2, 3, (2, m, 1))
    codes, scales = pack_mxfp4(scaled)
    keys = unpack_mxfp4(codes, scales, torch.float32)
    offset, row_bytes = 4, channels // 2
    pool = torch.full((2 * pages + 1, offset + rows_a_page * (row_bytes + channels // 32)), 255, dtype=torch.uint8)
    table = torch.randperm(2 * pages).reshape(2, pages).int()
    for slot in range(2):
        for at in range(pages):
            page, mine = int(table[slot, at]), slice(at * rows_a_page, (at + 1) * rows_a_page)
            pool[page, offset : offset + rows_a_page * row_bytes] = codes[slot, mine].flatten()
            pool[page, offset + rows_a_page * row_bytes :] = scales[slot, mine].flatten()
    source = DevicePages(
        bytes_PB=pool.to(DEVICE), table_ST=table.to(DEVICE), rows=rows_a_page, main_codes=0, main_scales=0, key_codes=offset,
        key_scales=offset + rows_a_page * row_bytes,
    )  # fmt: skip
    slots = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    visible = torch.tensor([m - 3, 0, 17, m])
    q = small(n, heads, channels).bfloat16()
    weight = torch.tensor([[1, 0.5, -1]]).repeat(n, 1).bfloat16()
    device = torch.device(DEVICE)
    there = (q.to(DEVICE), weight.to(DEVICE), source, slots.to(DEVICE), visible.to(DEVICE))
    tiling = ScanTiling(together=together, keys=16, share=share, buffer=32)
    got = select_packed(
        *there, groups_of(counts, together, device), rows=m, k=k, block_size=BLOCK, publish_blocks=publish, tiling=tiling
    )
    inside = pools(n, m, 5)
    # A pool holds blocks that its query sees.
    inside = torch.where(inside * BLOCK < visible.unsqueeze(1), inside, -1).sort(1, descending=True).values.flip(1)
    inside = torch.stack([torch.cat([line[line >= 0], line[line < 0]]) for line in inside])
    one = groups_of(counts, 1, device)
    pooled = select_packed(
        *there, one, rows=m, k=k, block_size=BLOCK, pool_NB=inside.to(DEVICE), tiling=ScanTiling(keys=16, share=16, buffer=32)
    )
    for i in range(n):
        at = slice(i, i + 1)
        # float64: the packed path does not round between steps.
        wide = (q[at].double(), weight[at].double(), keys[int(slots[i])].double(), visible[at])
        want = select(*wide, k=k, block_size=BLOCK, publish_blocks=publish)
        assert got.candidates_NB is not None
        same(Selection(got.topk_NK[at], got.candidates_NB[at]), want)
        same(Selection(pooled.topk_NK[at], None), select(*wide, k=k, block_size=BLOCK, pool_NB=inside[at]))


@pytest.mark.timeout(60)
def test_maxima_of_no_block_choose_nothing() -> None:
    """Many queries of contexts that end no group yet: once joined for ever."""
    from kvist.kernels.index_select.gpu import _join

    got = _join(torch.zeros(3, 0, dtype=torch.int32, device=DEVICE), None, None, 5)
    assert torch.equal(got.cpu(), torch.full((3, 5), -1, dtype=torch.int32))


def test_unsupported_sizes_are_named() -> None:
    q, weight = torch.zeros(1, 2, 32, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    keys, visible = torch.zeros(4, 32, device=DEVICE), torch.tensor([4], device=DEVICE)
    with pytest.raises(ValueError, match="k is 5000"):
        select(q, weight, keys, visible, k=5000, block_size=4, impl="gpu")
    with pytest.raises(ValueError, match="blocks of 3 rows"):
        select(q, weight, keys, visible, k=2, block_size=3, impl="gpu")
    pool = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="not both"):
        select(q, weight, keys, visible, k=2, block_size=4, pool_NB=pool, publish_blocks=1, impl="gpu")
