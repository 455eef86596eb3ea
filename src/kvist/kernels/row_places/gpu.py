"""Places of new rows on a GPU: one launch, a program for a row's own places and one for each ratio's.

Must not know layers. Shapes: N rows, P rotated pairs, J index heads, G ratios.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_gpu
from kvist.kernels.device.gpu import begin, early, let_next
from kvist.kernels.row_places.ref import GroupPlaces, RowPlaces

PLAIN = interpreted()


@triton.jit
def _angles(position, freq, pair, inside, cos, sin):
    """Store one row of a table."""
    angle = position.to(tl.float32) * tl.load(freq + pair, mask=inside, other=0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    tl.store(cos + pair, c, mask=inside)
    tl.store(sin + pair, s, mask=inside)
    return c, s


@triton.jit
def _stand(positions, slots, table, freq, ratios, slot_out, span_out, cell_out, of_groups, tables, heads_cos, heads_sin, N, WIDTH,
           WINDOW, CELLS, PAGE, P: tl.constexpr, PP: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
           PLAIN: tl.constexpr):  # fmt: skip
    """Program (n, 0): row n's own places; (n, g): those for ratio g - 1. `tables` [2 + G, 2, N, P], `of_groups` [G, 3, N]."""
    n, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin(PLAIN)
    let_next(PLAIN)
    position, slot = tl.load(positions + n), tl.load(slots + n)
    pair = tl.arange(0, PP)
    inside = pair < P
    if which == 0:
        tl.store(slot_out + n, slot.to(tl.int32))
        start = position + 1 - WINDOW
        tl.store(span_out + 2 * n, tl.where(start > 0, start, 0))
        tl.store(span_out + 2 * n + 1, position + 1)
        tl.store(cell_out + n, position % CELLS)
        _angles(position, freq, pair, inside, tables + n * P, tables + (N + n) * P)
        c, s = _angles(position, freq + P, pair, inside, tables + (2 * N + n) * P, tables + (3 * N + n) * P)
        head = tl.arange(0, JP)
        place = (n * J + head)[:, None] * P + pair[None, :]
        here = (head < J)[:, None] & inside[None, :]
        tl.store(heads_cos + place, tl.broadcast_to(c[None, :], (JP, PP)), mask=here)
        tl.store(heads_sin + place, tl.broadcast_to(s[None, :], (JP, PP)), mask=here)
    else:
        ratio = tl.load(ratios + which - 1)
        stop, number = position + 1, position // PAGE
        ends = (stop % ratio == 0) & (number < WIDTH)
        page = tl.load(table + slot * WIDTH + number, mask=ends, other=-1).to(tl.int64)
        mine = of_groups + (which - 1) * 3 * N + n
        tl.store(mine, stop // ratio)
        tl.store(mine + N, page)
        tl.store(mine + 2 * N, position % PAGE // ratio)
        first = tl.where(stop > ratio, stop - ratio, 0)
        own = tables + 2 * (which.to(tl.int64) + 1) * N * P + n * P
        _angles(first, freq + P, pair, inside, own, own + N * P)


@functools.cache
def _ratios(ratios: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ratios, dtype=torch.int64, device=device)


def row_places_gpu(
    position_N: Tensor, slot_N: Tensor, table_ST: Tensor, freq_2P: Tensor, *, ratios: tuple[int, ...], window: int, cells: int,
    page_tokens: int, heads: int,
) -> RowPlaces:  # fmt: skip
    """See `row_places`."""
    require_gpu()
    n, pairs, device, count = len(position_N), freq_2P.shape[1], position_N.device, len(ratios)
    slot = torch.empty(n, dtype=torch.int32, device=device)
    whole = torch.empty(3 * n + 3 * count * n, dtype=torch.int64, device=device)
    span, cell, of_groups = whole[: 2 * n].view(n, 2), whole[2 * n : 3 * n], whole[3 * n :].view(count, 3, n)
    angles = torch.empty(2 * (2 + count) * n * pairs + 2 * n * heads * pairs, device=device)
    tables = angles[: 2 * (2 + count) * n * pairs].view(2 + count, 2, n, pairs)
    of_heads = angles[2 * (2 + count) * n * pairs :].view(2, n * heads, pairs)
    _stand[(n, 1 + count)](
        position_N.contiguous(), slot_N.contiguous(), table_ST, freq_2P, _ratios(ratios, device), slot, span, cell, of_groups,
        tables, of_heads[0], of_heads[1], n, table_ST.shape[1], window, cells, page_tokens, P=pairs,
        PP=triton.next_power_of_2(pairs), J=heads, JP=triton.next_power_of_2(max(heads, 1)), PLAIN=PLAIN, num_warps=1,
        **early(PLAIN),
    )  # fmt: skip
    groups = {
        ratio: GroupPlaces(*of_groups[number].unbind(0), (tables[2 + number, 0], tables[2 + number, 1]))
        for number, ratio in enumerate(ratios)
    }
    return RowPlaces(
        slot_N=slot, span_N2=span, cell_N=cell, plain=(tables[0, 0], tables[0, 1]), yarn=(tables[1, 0], tables[1, 1]),
        heads=(of_heads[0], of_heads[1]), groups=groups,
    )  # fmt: skip
