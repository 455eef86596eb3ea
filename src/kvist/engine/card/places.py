"""Where each row of a step stands: rings, pages, tables of angles, groups; computed on the device, once a step.

A step has runs of consecutive new tokens, one a request. Must not know weights or operators. Shapes: N rows, R tokens of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.engine.card.state import CardState
from kvist.model.layers import rotary_table

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class CardRows:
    """int64 [N] ids, positions, slots, and how many rows of its run stand before each; bool `text_N`, False inside an image.

    `groups_G2` int32 (first row, rows): queries of a run that may be scored together.
    """

    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    offsets_N: Tensor
    text_N: Tensor
    groups_G2: Tensor

    def __len__(self) -> int:
        return len(self.tokens_N)


class Members(NamedTuple):
    """Where the R tokens of the group that a row may end stand: in `row_NR` of the step's rows where `inside_NR`, else in
    `cell_NR` of the slot's tail. A row itself is kept in `own_N`."""

    inside_NR: Tensor
    row_NR: Tensor
    cell_NR: Tensor
    own_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the rows of a step stand; all on the device, all made once a step.

    `slot_N` int32, `slot_long_N` the same as int64, `span_N2` window [start, stop), `cell_N` places in the rings, `groups_G2`
    queries of one slot that may be scored together; `rope` (cos, sin) by kind of layer (YaRN or not), `head_rope` the YaRN table
    once an index head; by ratio: rows a query sees, where a new row goes (page -1: nowhere), its group's table, and its group's
    tokens (ratios above 1). `tokens`: the host's bound on positions; `longest`: the longest span where it is not the window.
    """

    slot_N: Tensor
    slot_long_N: Tensor
    span_N2: Tensor
    cell_N: Tensor
    text_N: Tensor
    groups_G2: Tensor
    rope: dict[bool, Table]
    head_rope: Table | None
    visible: dict[int, Tensor]
    page: dict[int, Tensor]
    row: dict[int, Tensor]
    group_rope: dict[int, Table]
    tokens: int
    members: dict[int, Members] = field(default_factory=dict)
    longest: int | None = None


def places_of(rows: CardRows, state: CardState, config: ModelConfig, freq: dict[bool, Tensor], reach: int) -> Places:
    """Places of a step whose positions lie below `reach`; `freq` the rotary frequencies of layers with rows and without."""
    plan, position_N, slot_N = config.plan, rows.positions_N, rows.slots_N
    rope = {has_rows: rotary_table(position_N, freq_P) for has_rows, freq_P in freq.items()}
    ratios = sorted({spec.ratio for spec in plan.kv_sources})
    head_rope: Table | None = None
    if ratios:
        cos, sin = (part.repeat_interleave(config.index_n_heads, 0) for part in rope[True])
        head_rope = (cos, sin)
    page_N, page, row, group_rope, visible, members = _page(rows, state), {}, {}, {}, {}, {}
    stop_N = position_N + 1
    for ratio in ratios:
        page[ratio] = page_N if ratio == 1 else torch.where(stop_N % ratio == 0, page_N, -1)
        row[ratio] = position_N % state.layout.page_tokens // ratio
        visible[ratio] = stop_N // ratio
        if ratio == 1:
            group_rope[ratio] = rope[True]
        else:
            group_rope[ratio] = rotary_table((stop_N - ratio).clamp_min(0), freq[True])
            members[ratio] = _members(rows, state, ratio)
    return Places(
        slot_N=slot_N.int(), slot_long_N=slot_N, span_N2=torch.stack([(stop_N - plan.window).clamp_min(0), stop_N], 1),
        cell_N=position_N % state.codes.shape[2], text_N=rows.text_N, groups_G2=rows.groups_G2, rope=rope, head_rope=head_rope,
        visible=visible, page=page, row=row, group_rope=group_rope, tokens=reach, members=members,
    )  # fmt: skip


def _page(rows: CardRows, state: CardState) -> Tensor:
    """The page of each row's position, -1 for rows behind their pages."""
    table, number_N = state.rows.table_device, rows.positions_N // state.layout.page_tokens
    last = table.shape[1] - 1
    return torch.where(number_N > last, -1, table[rows.slots_N, number_N.clamp_max(last)])


def _members(rows: CardRows, state: CardState, ratio: int) -> Members:
    cells, device = state.kept + state.most_rows, state.device
    back_R = torch.arange(ratio - 1, -1, -1, device=device)
    at_N1 = torch.arange(len(rows), device=device).unsqueeze(1)
    cell_NR = (rows.positions_N.unsqueeze(1) - back_R) % cells
    return Members(
        inside_NR=back_R <= rows.offsets_N.unsqueeze(1), row_NR=(at_N1 - back_R).clamp_min(0), cell_NR=cell_NR,
        own_N=cell_NR[:, -1],
    )  # fmt: skip
