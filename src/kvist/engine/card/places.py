"""Where each row of a step stands: rings, pages, tables of angles, groups; computed on the device, once a step.

A step has runs of consecutive new tokens, one a request. Must not know weights or operators. Shapes: N rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.engine.card.state import CardState
from kvist.kernels.row_places import row_places

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


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the rows of a step stand; all on the device, all made once a step.

    `slot_N` int32, `slot_long_N` the same as int64, `span_N2` window [start, stop), `cell_N` places in the rings, `groups_G2`
    queries of one slot that may be scored together; `rope` (cos, sin) by kind of layer (YaRN or not), `head_rope` the YaRN table
    once an index head; by ratio: rows a query sees, where a new row goes (page -1: nowhere) and its group's table; `position_N`
    and `offset_N` of the rows. `tokens`: the host's bound on positions; `longest`: the longest span where it is not the window.
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
    position_N: Tensor
    offset_N: Tensor
    tokens: int
    longest: int | None = None

    def pick(self, rows_W: Tensor) -> Places:
        """The places of some rows, each scored by itself."""

        def of(table: Table) -> Table:
            return table[0][rows_W], table[1][rows_W]

        def of_heads(part: Tensor) -> Tensor:
            return part.unflatten(0, (len(self.slot_N), -1))[rows_W].flatten(0, 1)

        heads, number_W = self.head_rope, torch.arange(len(rows_W), device=rows_W.device, dtype=torch.int32)
        return replace(
            self, slot_N=self.slot_N[rows_W], slot_long_N=self.slot_long_N[rows_W], span_N2=self.span_N2[rows_W],
            cell_N=self.cell_N[rows_W], text_N=self.text_N[rows_W],
            groups_G2=torch.stack([number_W, torch.ones_like(number_W)], 1),
            rope={kind: of(table) for kind, table in self.rope.items()},
            head_rope=None if heads is None else (of_heads(heads[0]), of_heads(heads[1])),
            visible={ratio: part[rows_W] for ratio, part in self.visible.items()},
            page={ratio: part[rows_W] for ratio, part in self.page.items()},
            row={ratio: part[rows_W] for ratio, part in self.row.items()},
            group_rope={ratio: of(table) for ratio, table in self.group_rope.items()},
            position_N=self.position_N[rows_W], offset_N=self.offset_N[rows_W],
        )  # fmt: skip


def places_of(rows: CardRows, state: CardState, config: ModelConfig, reach: int) -> Places:
    """Places of a step whose positions lie below `reach`."""
    ratios = sorted({spec.ratio for spec in config.plan.kv_sources})
    made = row_places(
        rows.positions_N, rows.slots_N, state.rows.table_device, state.freq_2P, ratios=ratios, window=config.plan.window,
        cells=state.codes.shape[2], page_tokens=state.layout.page_tokens, heads=config.index_n_heads, impl="gpu",
    )  # fmt: skip
    groups = made.groups.items()
    return Places(
        slot_N=made.slot_N, slot_long_N=rows.slots_N, span_N2=made.span_N2, cell_N=made.cell_N, text_N=rows.text_N,
        groups_G2=rows.groups_G2, rope={False: made.plain, True: made.yarn}, head_rope=made.heads if ratios else None,
        visible={ratio: part.visible_N for ratio, part in groups}, page={ratio: part.page_N for ratio, part in groups},
        row={ratio: part.row_N for ratio, part in groups}, group_rope={ratio: part.rope for ratio, part in groups},
        position_N=rows.positions_N, offset_N=rows.offsets_N, tokens=reach,
    )  # fmt: skip
