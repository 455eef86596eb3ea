"""Places of new rows in plain torch: the meaning. Knows no layers. Shapes: N rows, S slots, T pages a slot, P rotated pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Table = tuple[Tensor, Tensor]


class GroupPlaces(NamedTuple):
    """For one ratio, int64 [N]: rows that a query sees; page and row for the group that a row ends (page -1: it ends none, or
    stands behind its slot's pages); and the table (cos, sin) of that group's first position."""

    visible_N: Tensor
    page_N: Tensor
    row_N: Tensor
    rope: Table


class RowPlaces(NamedTuple):
    """int32 `slot_N`; int64 window [start, stop) and cell of each row; float32 tables (cos, sin) [N,P] of layers without rows and
    with; the latter once an index head [N*J,P]; and `groups` by ratio."""

    slot_N: Tensor
    span_N2: Tensor
    cell_N: Tensor
    plain: Table
    yarn: Table
    heads: Table
    groups: dict[int, GroupPlaces]


def _table(position_N: Tensor, freq_P: Tensor) -> Table:
    """The product is rounded to float32, as the release does."""
    angle_NP = position_N.float().unsqueeze(1) * freq_P
    return angle_NP.cos(), angle_NP.sin()


def row_places_ref(
    position_N: Tensor, slot_N: Tensor, table_ST: Tensor, freq_2P: Tensor, *, ratios: tuple[int, ...], window: int, cells: int,
    page_tokens: int, heads: int,
) -> RowPlaces:  # fmt: skip
    """See `row_places`."""
    stop_N, number_N, last = position_N + 1, position_N // page_tokens, table_ST.shape[1] - 1
    page_N = torch.where(number_N > last, -1, table_ST[slot_N, number_N.clamp_max(last)]).long()
    plain, yarn = (_table(position_N, freq_P) for freq_P in freq_2P)
    cos, sin = (part.repeat_interleave(heads, 0) for part in yarn)
    groups = {
        ratio: GroupPlaces(
            visible_N=stop_N // ratio, page_N=torch.where(stop_N % ratio == 0, page_N, -1),
            row_N=position_N % page_tokens // ratio, rope=_table((stop_N - ratio).clamp_min(0), freq_2P[1]),
        )
        for ratio in ratios
    }  # fmt: skip
    return RowPlaces(
        slot_N=slot_N.int(), span_N2=torch.stack([(stop_N - window).clamp_min(0), stop_N], 1), cell_N=position_N % cells,
        plain=plain, yarn=yarn, heads=(cos, sin), groups=groups,
    )  # fmt: skip
