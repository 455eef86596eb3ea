"""Shared memory: what one layer publishes and later layers read, the central idea of the architecture.

`SharedMemory` is the protocol between a layer and wherever keys live; `Shared` is the immutable note that travels from
block to block (whose rows, which selection, which candidates). `DenseMemory` keeps one request a slot in plain tensors.
Must not know weights or schedules. Design section 5, facts sections 3 to 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.kernels.group_pool import Groups
from kvist.kernels.index_select import Selection, select
from kvist.kernels.native.layer import NewGroups
from kvist.kernels.sparse_attention import sparse_attention
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.model.stores import RowStore


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the blocks so far have published, layer order: the last Full layer, the last selection, the last candidates."""

    kv_source: int | None = None
    topk_NK: Tensor | None = None
    candidates_NB: Tensor | None = None


class SharedMemory(Protocol):
    """What a layer needs from wherever keys live. Rows of a request stay in order; ids are local to the request."""

    def group(self, source: int, rows: Rows, ratio: int, kv_NC: Tensor, gate_NC: Tensor | None) -> Groups:
        """Join new tokens with each request's unfinished group; return the complete groups, keep the rest."""
        ...

    def append(self, source: int, rows: Rows, groups: Groups, main_GC: Tensor, key_GI: Tensor) -> None:
        """Publish the groups' rotated main rows and index keys, not yet quantised, as the next rows of each request.

        Quantising is the memory's part: packing an already quantised FP4 row again may change it (subnormal scales).
        """
        ...

    def select(
        self, source: int, rows: Rows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """Score a source's keys and choose each query's rows, inside its candidate pool if one is given."""
        ...

    def attend(
        self, layer: int, source: int | None, rows: Rows, q_NHC: Tensor, window_NC: Tensor, topk_NK: Tensor | None, sink_H: Tensor
    ) -> Tensor:
        """Attend window and selected rows; `window_NC` are the new tokens' entries, kept for later queries."""
        ...

    def places(self, rows: Rows) -> LayerPlaces | None:
        """Where native code finds all of the above for a pass; None: operators are called one by one."""
        ...


class LayerPlaces(Protocol):
    """Where one pass's rows lie, for calls that run a whole layer: addresses of what `kernels.native.pages` describes.

    `segments_S5` int64; `block`: every query sees its whole segment and nothing is kept.
    """

    segments_S5: Tensor
    block: bool

    def ring(self, layer: int) -> int:
        """A layer's window ring."""
        ...

    def source(self, source: int) -> int:
        """A source's pages."""
        ...

    def positions(self, source: int) -> Tensor:
        """First positions int64 [G] of the groups that this pass completes."""
        ...

    def groups(self, source: int, table: tuple[Tensor, Tensor]) -> NewGroups:
        """Their members; `table` is the rotary table of their positions."""
        ...


class DraftMemory(Protocol):
    """What the draft blocks need besides: windows filled from accepted tokens, blocks attended without a trace."""

    def places(self, rows: Rows, *, block: bool) -> LayerPlaces | None:
        """See `SharedMemory.places`."""
        ...

    def write_window(self, layer: int, rows: Rows, window_NC: Tensor) -> None:
        """Keep window entries without attending (the draft blocks' view of accepted tokens)."""
        ...

    def attend_block(self, layer: int, rows: Rows, q_NHC: Tensor, window_NC: Tensor, sink_H: Tensor) -> Tensor:
        """Every query sees its request's last `window` entries and its whole block, in both directions; nothing is kept."""
        ...


class RequestMemory(SharedMemory, DraftMemory, Protocol):
    """A memory that serves layers and draft blocks."""

    def places(self, rows: Rows, *, block: bool = False) -> LayerPlaces | None:
        """See `SharedMemory.places` and `DraftMemory.places`."""
        ...


class Slot:
    """One request's state: rows and keys a source, unfinished groups, window entries a layer."""

    def __init__(self) -> None:
        self.main: dict[int, RowStore] = {}
        self.keys: dict[int, RowStore] = {}
        self.tails: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.windows: dict[int, Tensor] = {}

    def fork(self) -> Slot:
        """An independent copy that shares tensors already written."""
        twin = Slot()
        twin.main = {source: store.fork() for source, store in self.main.items()}
        twin.keys = {source: store.fork() for source, store in self.keys.items()}
        twin.tails, twin.windows = dict(self.tails), dict(self.windows)
        return twin


@lru_cache(maxsize=64)
def _spans(held: int, length: int, window: int, device: torch.device) -> Tensor:
    """[start, stop) of each of `length` queries after `held` entries, int64 [length,2]: the same for all layers of a pass."""
    stop_N = torch.arange(held + 1, held + 1 + length, device=device)
    return torch.stack([(stop_N - window).clamp_min(0), stop_N], 1)


class DenseMemory:
    """The reference memory. Differentiable in its inputs when `packed` is False.

    `packed` stores main rows and keys as the released bytes and unpacks on reading: the same bits, tested.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, *, packed: bool = False) -> None:
        if packed and not numerics.quantise:
            raise ValueError("packed memory holds quantised bytes only; use packed=False with quantise=False")
        self.config, self.numerics, self.packed = config, numerics, packed
        self.plan = config.plan
        self.slots: dict[int, Slot] = {}

    def slot(self, index: int) -> Slot:
        """A request's state, created empty on first use."""
        return self.slots.setdefault(index, Slot())

    def places(self, rows: Rows, *, block: bool = False) -> LayerPlaces | None:
        """None: slots are plain tensors that grow."""
        return None

    def release(self, index: int) -> None:
        """Forget a request."""
        self.slots.pop(index, None)

    def group(self, source: int, rows: Rows, ratio: int, kv_NC: Tensor, gate_NC: Tensor | None) -> Groups:
        """See `SharedMemory.group`."""
        parts: list[tuple[Tensor, Tensor | None, Tensor]] = []
        for segment in rows.segments:
            kv_tC = kv_NC[segment.rows]
            gate_tC = None if gate_NC is None else gate_NC[segment.rows]
            parts.append(self._group_one(self.slot(segment.slot), source, segment, ratio, kv_tC, gate_tC))
        gates = [gate for _, gate, _ in parts if gate is not None]
        return Groups(
            torch.cat([kv for kv, _, _ in parts]),
            torch.cat(gates) if gates else None,
            torch.cat([positions for _, _, positions in parts]),
            tuple(len(positions) for _, _, positions in parts),
        )

    def _group_one(
        self, slot: Slot, source: int, segment: Segment, ratio: int, kv_tC: Tensor, gate_tC: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        skip = min(max(0, segment.publish_from - segment.position), segment.length)
        kv_tC, gate_tC = kv_tC[skip:], None if gate_tC is None else gate_tC[skip:]
        held = (segment.position + skip) % ratio
        if held:
            tail_kv, tail_gate = slot.tails[source]
            assert len(tail_kv) == held, f"source {source} holds {len(tail_kv)} unfinished tokens, position says {held}"
            kv_tC = torch.cat([tail_kv, kv_tC])
            gate_tC = None if gate_tC is None or tail_gate is None else torch.cat([tail_gate, gate_tC])
        whole = len(kv_tC) // ratio * ratio
        slot.tails[source] = (kv_tC[whole:], None if gate_tC is None else gate_tC[whole:])
        first = segment.position + skip - held
        positions = torch.arange(first, first + whole, ratio, device=kv_tC.device)
        gate_GRC = None if gate_tC is None else gate_tC[:whole].unflatten(0, (-1, ratio))
        return kv_tC[:whole].unflatten(0, (-1, ratio)), gate_GRC, positions

    def append(self, source: int, rows: Rows, groups: Groups, main_GC: Tensor, key_GI: Tensor) -> None:
        """See `SharedMemory.append`."""
        for segment, main, key in zip(
            rows.segments, main_GC.split(list(groups.counts)), key_GI.split(list(groups.counts)), strict=True
        ):
            slot = self.slot(segment.slot)
            if not self.packed:
                main, key = self.numerics.main(main), self.numerics.index(key)
            slot.main.setdefault(source, RowStore("main", self.packed, self.numerics.dtype)).append(main)
            slot.keys.setdefault(source, RowStore("key", self.packed, self.numerics.dtype)).append(key)

    def select(
        self, source: int, rows: Rows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """See `SharedMemory.select`."""
        ratio = self.plan.layers[source].ratio
        parts = []
        for segment in rows.segments:
            at = segment.rows
            parts.append(
                select(
                    q_NJI[at],
                    weight_NJ[at],
                    self.index_keys(source, segment),
                    (rows.positions_N[at] + 1) // ratio,
                    k=self.config.index_topk,
                    block_size=self.config.candidate_block_size,
                    pool_NB=None if pool_NB is None else pool_NB[at],
                    publish_blocks=self.config.candidate_topk_blocks if publish else 0,
                    impl=self.numerics.query_impl,
                )
            )
        blocks = [part.candidates_NB for part in parts if part.candidates_NB is not None]
        return Selection(torch.cat([part.topk_NK for part in parts]), torch.cat(blocks) if blocks else None)

    def index_keys(self, source: int, segment: Segment) -> Tensor:
        """The keys [M,I] that a request's queries are scored against: those of the source."""
        return self.slot(segment.slot).keys[source].read()

    def attend(
        self, layer: int, source: int | None, rows: Rows, q_NHC: Tensor, window_NC: Tensor, topk_NK: Tensor | None, sink_H: Tensor
    ) -> Tensor:
        """See `SharedMemory.attend`."""
        outs = []
        for segment in rows.segments:
            slot, at = self.slot(segment.slot), segment.rows
            old_TC = slot.windows.get(layer)
            new_TC = window_NC[at] if old_TC is None else torch.cat([old_TC, window_NC[at]])
            held = len(new_TC) - segment.length
            span_N2 = _spans(held, segment.length, self.plan.window, q_NHC.device)
            outs.append(
                sparse_attention(
                    q_NHC[at],
                    new_TC,
                    span_N2,
                    None if source is None else slot.main[source].read(),
                    None if topk_NK is None else topk_NK[at],
                    sink_H,
                    window=self.plan.window,
                    impl=self.numerics.query_impl,
                    whole_peaks=self.numerics.whole_peaks,
                )
            )
            slot.windows[layer] = new_TC[-self.plan.window :]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attend_block(self, layer: int, rows: Rows, q_NHC: Tensor, window_NC: Tensor, sink_H: Tensor) -> Tensor:
        """See `DraftMemory.attend_block`."""
        outs = []
        for segment in rows.segments:
            held_TC, block_TC = self.slot(segment.slot).windows.get(layer), window_NC[segment.rows]
            keys_TC = block_TC if held_TC is None else torch.cat([held_TC, block_TC])
            span_N2 = torch.tensor([[0, len(keys_TC)]], device=q_NHC.device).expand(segment.length, 2)
            size, impl = self.plan.window + segment.length, self.numerics.query_impl
            q_nHC = q_NHC[segment.rows]
            peaks = self.numerics.whole_peaks
            outs.append(sparse_attention(q_nHC, keys_TC, span_N2, None, None, sink_H, window=size, impl=impl, whole_peaks=peaks))
        return torch.cat(outs)

    def write_window(self, layer: int, rows: Rows, window_NC: Tensor) -> None:
        """See `DraftMemory.write_window`."""
        for segment in rows.segments:
            slot = self.slot(segment.slot)
            old_TC = slot.windows.get(layer)
            new_TC = window_NC[segment.rows] if old_TC is None else torch.cat([old_TC, window_NC[segment.rows]])
            slot.windows[layer] = new_TC[-self.plan.window :]
