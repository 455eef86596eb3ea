"""The GPU's joint attention against its definition: values, packed pages and rings, shares, parts, rotation, odd sizes.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvist.kernels.rotary.ref import rotate_ref
from kvist.kernels.sparse_attention import sparse_attention
from kvist.quant import pack_fp8, pack_main_fp4, unpack_fp8, unpack_main_fp4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
BF16 = 6e-3
"""Relative error bound of bfloat16 outputs: both sides round probabilities, against maxima of different key sets."""


def random_topk(n: int, rows: int, k: int) -> Tensor:
    """Ascending distinct ids, query i lacking i of them."""
    topk = torch.full((n, k), -1, dtype=torch.int64)
    for i in range(n):
        some = torch.randperm(rows)[: max(0, min(k, rows) - 3 * i)].sort().values
        topk[i, : len(some)] = some
    return topk


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


# queries, heads, channels, window entries, window, rows, selected
VALUES = [(3, 5, 32, 20, 8, 12, 7), (2, 16, 64, 9, 16, 40, 33), (2, 3, 24, 5, 4, 0, 4), (1, 66, 32, 4, 4, 9, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", VALUES, ids=str)
def test_values_equal_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, heads, channels, entries, window, rows_count, k = shape
    torch.manual_seed(1)
    q, keys, rows = (torch.randn(*s, channels).to(dtype) for s in ((n, heads), (entries,), (rows_count,)))
    sink = torch.randn(heads)
    stop = torch.arange(entries - n + 1, entries + 1)
    span = torch.stack([(stop - window).clamp_min(0), stop], 1)
    topk = random_topk(n, rows_count, k)
    arguments = (q, keys, span, rows, topk, sink)
    want = sparse_attention(*arguments, window=window, impl="wide")
    got = sparse_attention(*(x.to(DEVICE) for x in arguments), window=window, impl="gpu").cpu()
    bound = BF16 if dtype is torch.bfloat16 else 1e-5
    assert got.dtype is dtype
    assert relative(got, want) < bound
    alone = sparse_attention(*(x.to(DEVICE) for x in (q, keys, span)), None, None, sink.to(DEVICE), window=window, impl="gpu")
    assert relative(alone.cpu(), sparse_attention(q, keys, span, None, None, sink, window=window, impl="wide")) < bound


class Packed:
    """Two slots with pages in mixed order and rings that have wrapped; NaN wherever nothing may be read."""

    def __init__(self, channels: int, rows_a_page: int, pages: int, window: int, slack: int, position: int) -> None:
        from kvist.kernels.device.pages import DevicePages

        self.ring, self.window, self.position = window + slack, window, position
        width = channels // 2 + channels // 16
        offset = 24
        pool = torch.full((2 * pages + 1, offset + rows_a_page * width + 8), 255, dtype=torch.uint8)
        order = torch.randperm(2 * pages)
        table = torch.full((2, pages + 1), -1, dtype=torch.int32)
        self.rows = torch.randn(2, pages * rows_a_page, channels) * torch.rand(2, pages * rows_a_page, 1) * 3
        codes, scales = pack_main_fp4(self.rows)
        self.rows = unpack_main_fp4(codes, scales, torch.bfloat16)
        for slot in range(2):
            for at in range(pages):
                page = int(order[slot * pages + at])
                table[slot, at] = page
                mine = slice(at * rows_a_page, (at + 1) * rows_a_page)
                split = offset + rows_a_page * channels // 2
                pool[page, offset:split] = codes[slot, mine].flatten()
                pool[page, split : split + rows_a_page * channels // 16] = scales[slot, mine].flatten()
        self.pages = DevicePages(
            bytes_PB=pool.to(DEVICE), table_ST=table.to(DEVICE), rows=rows_a_page, main_codes=offset,
            main_scales=offset + rows_a_page * channels // 2, key_codes=0, key_scales=0,
        )  # fmt: skip
        entries = torch.randn(2, position, channels) * 2.0 ** torch.randint(-9, 9, (2, position, 1))
        codes, scales = pack_fp8(entries)
        self.entries = unpack_fp8(codes, scales, torch.bfloat16)
        stored = channels + channels // 32
        # Rows of an even number of bytes, as a kernel that reads two codes at a time needs them.
        ring_rows = torch.full((2, self.ring, stored + stored % 2), 255, dtype=torch.uint8)
        for at in range(max(0, position - window), position):
            ring_rows[:, at % self.ring, :stored] = torch.cat([codes[:, at], scales[:, at]], -1)
        # A copy of a view would lose the even distance.
        self.ring_rows = ring_rows.to(DEVICE)[..., :stored]


def wanted(memory: Packed, q: Tensor, span: Tensor, slots: Tensor, topk: Tensor, sink: Tensor, window: int) -> Tensor:
    """The definition's outputs of rotated queries, query by query."""
    outs = []
    for i in range(len(q)):
        s, one = int(slots[i]), slice(i, i + 1)
        arguments = (q[one], memory.entries[s], span[one], memory.rows[s], topk[one], sink)
        outs.append(sparse_attention(*arguments, window=window, impl="wide"))
    return torch.cat(outs)


# heads, channels, rows a page, pages, window, selected, splits, parts
PACKED = [
    (5, 32, 4, 5, 8, 9, 1, 1),
    (16, 64, 8, 6, 20, 40, 2, 1),
    (7, 128, 8, 6, 33, 37, 4, 2),
    (3, 96, 2, 9, 16, 18, 2, 2),
]


@pytest.mark.parametrize("layout", ["given", "rotated", "planar"])
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_pages_and_rings_equal_the_definition_of_their_values(shape: tuple[int, ...], layout: str) -> None:
    """Rows of both slots, two of them verify rows; rings have wrapped; unread bytes are NaN."""
    from kvist.kernels.sparse_attention.gpu import Tiling, WindowRows, attend_packed

    heads, channels, rows_a_page, pages, window, k, splits, parts = shape
    torch.manual_seed(2)
    position = 2 * window + 5
    memory = Packed(channels, rows_a_page, pages, window + 1, 2, position)
    slots = torch.tensor([0, 1, 1], dtype=torch.int32)
    stop = torch.tensor([position, position - 1, position])
    span = torch.stack([stop - window, stop], 1)
    q, sink = torch.randn(3, heads, channels).bfloat16(), torch.randn(heads)
    topk = random_topk(3, pages * rows_a_page, k)
    angle = torch.rand(3, 8) * 6
    table = (angle.cos(), angle.sin()) if layout == "rotated" else None
    turned = q if table is None else rotate_ref(q, table)
    want = wanted(memory, turned, span, slots, topk, sink, window)
    want = want if table is None else rotate_ref(want, table, back=True)
    planar = layout == "planar"
    got = attend_packed(
        (torch.cat([q[..., 0::2], q[..., 1::2]], -1) if planar else q).to(DEVICE),
        WindowRows.of_rows(memory.ring_rows, channels),
        span.to(DEVICE),
        slots.to(DEVICE),
        memory.pages,
        topk.to(DEVICE),
        sink.to(DEVICE),
        window=window,
        rope=None if table is None else (table[0].to(DEVICE), table[1].to(DEVICE)),
        tiling=Tiling(splits=splits, parts=parts, keys=16, entries=16),
        planar=planar,
    )
    if planar:
        got = torch.stack(got.chunk(2, -1), -1).flatten(-2)
    assert relative(got.cpu(), want) < BF16


@pytest.mark.parametrize("splits", [1, 2])
def test_no_key_gives_zero_and_nan_is_not_hidden(splits: int) -> None:
    """An empty window and no row: 0. A NaN key that is attended: NaN."""
    from kvist.kernels.sparse_attention.gpu import Tiling, WindowRows, _launch

    q, sink = torch.randn(2, 2, 32, device=DEVICE), torch.zeros(2, device=DEVICE)
    values = torch.randn(1, 6, 32, device=DEVICE)
    values[0, 5] = float("nan")
    span = torch.tensor([[2, 2], [3, 6]], device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    cut = Tiling(splits=splits, entries=16, keys=16)
    out = _launch(q, WindowRows(values=values), span, slots, None, None, sink, 4, None, cut)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool(out[1].isnan().all())


def test_unsupported_sizes_are_named() -> None:
    from kvist.kernels.sparse_attention.gpu import WindowRows, attend_packed

    q, keys, sink = torch.zeros(1, 1, 600, device=DEVICE), torch.zeros(1, 600, device=DEVICE), torch.zeros(1, device=DEVICE)
    span = torch.tensor([[0, 1]], device=DEVICE)
    with pytest.raises(ValueError, match="600 channels"):
        sparse_attention(q, keys, span, None, None, sink, window=1, impl="gpu")
    odd = WindowRows.of_rows(torch.zeros(1, 4, 33, dtype=torch.uint8, device=DEVICE), 32)
    slots, narrow = torch.zeros(1, dtype=torch.int32, device=DEVICE), q[..., :32].bfloat16()
    with pytest.raises(ValueError, match="33 bytes"):
        attend_packed(narrow, odd, span, slots, None, None, sink, window=1)
    with pytest.raises(ValueError, match="bfloat16 queries"):
        attend_packed(q[..., :32], odd, span, slots, None, None, sink, window=1)
