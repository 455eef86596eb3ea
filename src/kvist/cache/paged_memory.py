"""The engine's memory: global rows in pages of released bytes, windows and unfinished groups in rings of fixed size.

Satisfies the model's memory protocol without importing it and gives the bits of the dense memory. Everything is allocated
when it is made; a pass needs a workspace for one request's keys at most. Must not know scheduling, prefixes or weights.
Design sections 3 to 5, facts sections 3 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from kvist.cache.native_places import NativePlaces
from kvist.cache.page_rows import PageRows
from kvist.cache.placement import BatchRows, Placement, Span
from kvist.cache.rings import TailRings, WindowRings
from kvist.config import ModelConfig
from kvist.kernels.group_pool import Groups
from kvist.kernels.index_select import Selection, select
from kvist.kernels.index_select.pages import select_pages
from kvist.kernels.native import native_or_none
from kvist.kernels.native.pages import WindowRing
from kvist.kernels.quantise.pages import write_pages
from kvist.kernels.sparse_attention import sparse_attention
from kvist.kernels.sparse_attention.pages import attend_pages, keep_window
from kvist.page_layout import PageLayout


class MemoryNumerics(Protocol):
    """What the memory must know of the model's numerics."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def quantise(self) -> bool: ...
    @property
    def query_impl(self) -> str: ...
    @property
    def whole_peaks(self) -> bool: ...


def takes_native(numerics: MemoryNumerics, device: torch.device) -> bool:
    """Whether native code serves whole batches: float32 on the CPU (bfloat16 rounds where the reference does)."""
    wanted = numerics.query_impl == "cpu" and numerics.dtype is torch.float32 and device.type == "cpu"
    return wanted and native_or_none() is not None


@lru_cache(maxsize=64)
def _spans(held: int, length: int, window: int, device: torch.device) -> Tensor:
    """[start, stop) of each of `length` queries after `held` entries, int64 [length,2]."""
    stop_N = torch.arange(held + 1, held + 1 + length, device=device)
    return torch.stack([(stop_N - window).clamp_min(0), stop_N], 1)


class PagedMemory:
    """Pages and rings for `slots` requests.

    `pages`: pages of the pool; `verify_rows`: the most rows of a request that one pass may compute and later take back;
    `page_tokens`: tokens of a page (default: the plan's); `most_tokens`: of a request (default: the context). ConfigError for a
    size that the ratios do not divide, ValueError for numerics without quantisers (pages hold quantised bytes only).
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: MemoryNumerics,
        *,
        pages: int,
        slots: int,
        verify_rows: int,
        page_tokens: int | None = None,
        most_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not numerics.quantise:
            raise ValueError("pages hold quantised bytes only; use the dense memory with quantise=False")
        for name, value in (("pages", pages), ("slots", slots), ("verify_rows", verify_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1")
        self.config, self.numerics, self.plan = config, numerics, config.plan
        self.layout = PageLayout.of(config, page_tokens)
        self.slots, self.verify_rows, self.device = slots, verify_rows, torch.device(device)
        self.rows = PageRows(self.layout, pages, slots, most_tokens or config.max_seq_len, self.device)
        layers = len(self.plan.layers) + len(self.plan.drafts)
        self.native = takes_native(numerics, self.device)
        self.rings = WindowRings(layers, slots, self.plan.window, verify_rows, config.head_dim, numerics.dtype, self.device)
        self.tails = {
            spec.index: TailRings(slots, spec.ratio, verify_rows, config.head_dim, self.device)
            for spec in self.plan.kv_sources
            if spec.ratio > 1
        }
        sources = [spec.index for spec in self.plan.kv_sources] if self.native else []
        self._sources = {layer: self.rows.native_source(layer) for layer in sources}
        self._rings = [
            WindowRing.of(*self.rings.of_layer(layer), self.plan.window) for layer in range(layers if self.native else 0)
        ]
        self.opened: set[int] = set()
        self._placement: Placement | None = None
        self._places: NativePlaces | None = None

    @property
    def bytes_PB(self) -> Tensor:
        """The pool, uint8 [pages, page_bytes]."""
        return self.rows.bytes_PB

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's windows, draft windows and unfinished groups."""
        return (self.rings.nbytes + sum(tail.nbytes for tail in self.tails.values())) // self.slots

    def open(self, slot: int, pages: Sequence[int], tokens: int) -> None:
        """Begin a request whose first `tokens` positions' global rows already lie in `pages`; its rings are empty.

        ValueError unless `tokens` is a multiple of the ratios (an unfinished group is not stored) and the pages hold them.
        """
        if tokens % self.plan.alignment:
            raise ValueError(f"a prefix of {tokens} tokens ends inside a group; cut it to a multiple of {self.plan.alignment}")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside 0..{self.slots - 1}")
        self.rows.set_pages(slot, pages)
        self.rows.require(slot, tokens)
        self.rings.clear(slot)
        self.opened.add(slot)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Give an open request more pages."""
        self._check_open(slot)
        self.rows.add_pages(slot, pages)

    def exchange(self, slot: int, number: int, page: int) -> None:
        """Let an open request read its page `number` from another one, which holds the same tokens' rows."""
        self._check_open(slot)
        self.rows.exchange(slot, number, page)

    def close(self, slot: int) -> None:
        """End a request; its pages are the pool's affair."""
        self.rows.set_pages(slot, ())
        self.rings.clear(slot)
        self.opened.discard(slot)

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page (a request that goes on inside a shared page writes to its own copy)."""
        self.bytes_PB[target].copy_(self.bytes_PB[source])

    def page_view(self, page: int) -> Tensor:
        """A page's bytes, uint8 [page_bytes], writable in place."""
        return self.bytes_PB[page]

    def window(self, layer: int, slot: int, position: int) -> Tensor:
        """The window entries [T,C] before `position`, oldest first: at most `window`, fewer after a prefix hit."""
        first = self.rings.first(layer, slot, position)
        return self.rings.read(layer, slot, first, position)

    def group(self, source: int, rows: BatchRows, ratio: int, kv_NC: Tensor, gate_NC: Tensor | None) -> Groups:
        """Join new tokens with each request's unfinished group; replayed rows only refresh the unfinished tokens."""
        tail = self.tails.get(source)
        plan = self._place(rows).grouping(ratio, 0 if tail is None else tail.size)
        if tail is None or gate_NC is None:
            assert gate_NC is None, f"source {source} has gates but a ratio of 1"
            return Groups(kv_NC[plan.batch_GR], None, plan.positions_G, plan.counts)
        joined = []
        for new_NC, ring in ((kv_NC, tail.kv.flatten(0, 1)), (gate_NC, tail.gate.flatten(0, 1))):
            group_GRC = new_NC[plan.batch_GR]
            group_GRC.flatten(0, 1)[plan.early_E] = ring[plan.ring_E]
            ring[plan.cell_K] = new_NC[plan.keep_K]
            joined.append(group_GRC)
        return Groups(joined[0], joined[1], plan.positions_G, plan.counts)

    def append(self, source: int, rows: BatchRows, groups: Groups, main_GC: Tensor, key_GI: Tensor) -> None:
        """Pack the groups' rotated main rows and index keys into the requests' pages."""
        place = self._place(rows)
        if not len(main_GC):
            return
        tail = self.tails.get(source)
        plan = place.grouping(self.plan.layers[source].ratio, 0 if tail is None else tail.size)
        if self.native:
            write_pages(self._sources[source], plan.slots_G, plan.positions_G, main_GC, key_GI)
        else:
            self.rows.write(source, plan.slots_G, plan.positions_G, main_GC, key_GI)

    def select(
        self, source: int, rows: BatchRows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """Score a source's keys and choose each query's rows, inside its candidate pool if one is given."""
        ratio, config = self.plan.layers[source].ratio, self.config
        sizes = {
            "k": config.index_topk,
            "block_size": config.candidate_block_size,
            "publish_blocks": config.candidate_topk_blocks if publish else 0,
        }
        if self.native:
            return select_pages(self._sources[source], self._place(rows).table_S5, q_NJI, weight_NJ, pool_NB=pool_NB, **sizes)
        parts = []
        for span in self._place(rows).spans:
            at = span.rows
            parts.append(
                select(
                    q_NJI[at],
                    weight_NJ[at],
                    self.rows.keys(source, span.slot, span.stop // ratio, q_NJI.dtype),
                    (rows.positions_N[at] + 1) // ratio,
                    pool_NB=None if pool_NB is None else pool_NB[at],
                    impl=self.numerics.query_impl,
                    **sizes,
                )
            )
        blocks = [part.candidates_NB for part in parts if part.candidates_NB is not None]
        return Selection(torch.cat([part.topk_NK for part in parts]), torch.cat(blocks) if blocks else None)

    def attend(
        self,
        layer: int,
        source: int | None,
        rows: BatchRows,
        q_NHC: Tensor,
        window_NC: Tensor,
        topk_NK: Tensor | None,
        sink_H: Tensor,
    ) -> Tensor:
        """Attend window and selected rows; `window_NC` are the new tokens' entries, kept afterwards for later queries."""
        if self.native:
            table_S5, packed = self._place(rows).table_S5, None if source is None else self._sources[source]
            return attend_pages(packed, self._rings[layer], table_S5, q_NHC, window_NC, topk_NK, sink_H)
        outs = []
        for span in self._place(rows).spans:
            at = span.rows
            old_TC = self.window(layer, span.slot, span.position)
            main_MC, local_NK = self._picked(source, span, None if topk_NK is None else topk_NK[at], q_NHC.dtype)
            outs.append(
                sparse_attention(
                    q_NHC[at],
                    torch.cat([old_TC, window_NC[at]]),
                    _spans(len(old_TC), span.length, self.plan.window, q_NHC.device),
                    main_MC,
                    local_NK,
                    sink_H,
                    window=self.plan.window,
                    impl=self.numerics.query_impl,
                    whole_peaks=self.numerics.whole_peaks,
                )
            )
            self.rings.write(layer, span.slot, span.position, window_NC[at])
        return torch.cat(outs) if outs else torch.empty_like(q_NHC)

    def places(self, rows: BatchRows, *, block: bool = False) -> NativePlaces | None:
        """Where native code finds a pass's rows, or None where the operators are not native. `block`: see `attend_block`."""
        if not self.native:
            return None
        place = self._place(rows, pages=not block)
        found = self._places
        if found is None or found.segments_S5 is not place.table_S5 or found.block != block:
            found = self._places = NativePlaces(place, self._rings, self._sources, self.tails, block=block)
        return found

    def attend_block(self, layer: int, rows: BatchRows, q_NHC: Tensor, window_NC: Tensor, sink_H: Tensor) -> Tensor:
        """Every query sees its request's last `window` entries and the whole block, in both directions; nothing is kept."""
        if self.native:
            table_S5 = self._place(rows, pages=False).table_S5
            return attend_pages(None, self._rings[layer], table_S5, q_NHC, window_NC, None, sink_H, block=True)
        outs = []
        for span in self._place(rows, pages=False).spans:
            at = span.rows
            old_TC = self.window(layer, span.slot, span.position)
            keys_TC = torch.cat([old_TC, window_NC[at]])
            span_N2 = torch.tensor([[0, len(keys_TC)]], device=q_NHC.device).expand(span.length, 2)
            size = self.plan.window + span.length
            impl = self.numerics.query_impl
            q_nHC, peaks = q_NHC[at], self.numerics.whole_peaks
            outs.append(sparse_attention(q_nHC, keys_TC, span_N2, None, None, sink_H, window=size, impl=impl, whole_peaks=peaks))
        return torch.cat(outs) if outs else torch.empty_like(q_NHC)

    def write_window(self, layer: int, rows: BatchRows, window_NC: Tensor) -> None:
        """Keep window entries without attending (the draft blocks' view of accepted tokens)."""
        if self.native:
            keep_window(self._rings[layer], self._place(rows).table_S5, window_NC)
            return
        for span in self._place(rows).spans:
            self.rings.write(layer, span.slot, span.position, window_NC[span.rows])

    def _picked(
        self, source: int | None, span: Span, topk_nK: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """The distinct selected rows [M,C] of a request's queries and the selection in terms of them."""
        if source is None or topk_nK is None:
            return None, None
        unique_M, place = torch.unique(topk_nK.clamp_min(0), return_inverse=True)
        local_nK = torch.where(topk_nK >= 0, place, -1)
        if span.stop < self.plan.layers[source].ratio:
            return torch.zeros(0, self.config.head_dim, dtype=dtype, device=self.device), local_nK
        return self.rows.main(source, span.slot, unique_M, dtype), local_nK

    def _place(self, rows: BatchRows, *, pages: bool = True) -> Placement:
        """The pass's index tensors. `pages` False: the rows own no global rows (drafts), so no page need hold them."""
        place = self._placement
        if place is None or place.key is not rows.segments:
            place = Placement(rows, self.device)
            for span in place.spans:
                self._check_open(span.slot)
                if pages:
                    self.rows.require(span.slot, span.stop)
            self._placement = place
        return place

    def _check_open(self, slot: int) -> None:
        if slot not in self.opened:
            raise ValueError(f"slot {slot} is not open")
