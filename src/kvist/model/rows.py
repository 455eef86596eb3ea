"""What a forward pass needs to know about its tokens: `Rows`, a frozen ragged batch, complete before the model runs.

Must not know pages, schedulers or weights. Design section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvist.kernels.native.layer import LayerPass
from kvist.model.layers import rotary_table


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive rows of one request: `slot` names its memory, `start` its first row, `position` that row's position.

    Rows at positions below `publish_from` are replay only: they rebuild window entries, their global rows exist already.
    """

    slot: int
    start: int
    length: int
    position: int
    publish_from: int = 0

    @property
    def rows(self) -> slice:
        """Where the request's tokens stand among the batch's rows."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A ragged batch of N tokens.

    `token_ids_N`, `positions_N` int64; `text_N` bool, False inside an image span; `engram_LNX` int64 table rows per Engram
    layer (columns: 2-gram heads, 3-gram heads, ...); `features_FD` replaces the embedding at rows `feature_rows_F`.
    `begun` is `whole_layer`'s: what it made once for the pass, and whose addresses that holds.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    text_N: Tensor
    segments: tuple[Segment, ...]
    engram_LNX: Tensor | None = None
    features_FD: Tensor | None = None
    feature_rows_F: Tensor | None = None
    _rotary: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    begun: dict[tuple[int, int], tuple[LayerPass, object]] = field(default_factory=dict, compare=False, repr=False)
    _rotary_at: dict[tuple[int, int], tuple[Tensor, tuple[Tensor, Tensor]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def many(self) -> bool:
        """Whether some request has more than one row: a prompt, drafts to verify."""
        return len(self.token_ids_N) != len(self.segments)

    def rotary(self, freq_P: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary table of these positions for one frequency vector, computed once a forward pass."""
        key = id(freq_P)
        if key not in self._rotary:
            self._rotary[key] = rotary_table(self.positions_N, freq_P)
        return self._rotary[key]

    def rotary_at(self, positions_G: Tensor, freq_P: Tensor) -> tuple[Tensor, Tensor]:
        """The table of other positions of this pass; layers that bring the same tensors share it."""
        key = id(positions_G), id(freq_P)
        if key not in self._rotary_at:
            none = freq_P.new_empty(0, len(freq_P))
            table = rotary_table(positions_G, freq_P) if len(positions_G) else (none, none)
            self._rotary_at[key] = positions_G, table  # held, so that its id stays its own
        return self._rotary_at[key][1]

    def pick(self, rows_n: Tensor, segments: tuple[Segment, ...], *, engram: bool = False) -> Rows:
        """A batch of some of these rows; `segments` describe them anew. Features are not carried on, n-grams on request."""
        return Rows(
            token_ids_N=self.token_ids_N[rows_n],
            positions_N=self.positions_N[rows_n],
            text_N=self.text_N[rows_n],
            segments=segments,
            engram_LNX=self.engram_LNX[:, rows_n] if engram and self.engram_LNX is not None else None,
        )


def consecutive_rows(starts: list[tuple[int, int, Tensor]]) -> tuple[Tensor, Tensor, tuple[Segment, ...]]:
    """(slot, first position, token ids) per request -> (token ids, positions, segments) of one ragged batch."""
    segments, at = [], 0
    for slot, position, ids in starts:
        segments.append(Segment(slot=slot, start=at, length=len(ids), position=position))
        at += len(ids)
    ids_N = torch.cat([ids for _, _, ids in starts])
    positions_N = torch.cat([torch.arange(s.position, s.position + s.length, device=ids_N.device) for s in segments])
    return ids_N, positions_N, tuple(segments)
