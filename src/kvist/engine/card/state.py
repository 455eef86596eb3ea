"""What a card holds of its requests: pages of released bytes, FP8 window rings, raw tails of unfinished groups, n-gram history.

Everything is allocated when it is made. One slot and one page more than asked for serve the padding rows of a batch bucket.
Rings, tails and history are addressed by position and longer than what is read by the rows that a step may take back: drafts
that are rejected are overwritten, never rolled back. Must not know weights or layers' order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.cache.page_rows import PageRows
from kvist.cache.paged_memory import PagedMemory
from kvist.config import ModelConfig
from kvist.kernels.device.pages import DevicePages
from kvist.kernels.sparse_attention.gpu import WindowRows
from kvist.model.layers import inverse_frequencies
from kvist.page_layout import PageLayout
from kvist.quant import pack_fp8

NONE = -1


class CardState:
    """Pages and per-request state for `slots` requests; `pages` in the pool, `most_tokens` of one request.

    `rows`: the most rows of a request that a step may compute and take back; `page_tokens`: tokens of a page (default: the
    plan's). Windows of the draft blocks follow those of the layers. Raises ConfigError for a size that the ratios do not divide.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        most_tokens: int,
        device: torch.device,
        rows: int = 1,
        page_tokens: int | None = None,
    ) -> None:
        for name, value in (("slots", slots), ("pages", pages), ("most_tokens", most_tokens), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1")
        self.config, self.plan, self.device = config, config.plan, device
        self.slots, self.spare = slots, slots
        self.layout = PageLayout.of(config, page_tokens)
        self.rows = PageRows(self.layout, pages + 1, slots + 1, most_tokens, device)
        self.pages = {layer: self._source(layer) for layer in self.rows.sources}
        self.most_rows = rows
        kinds = {spec.ratio > 0: inverse_frequencies(config, spec) for spec in (*self.plan.layers, *self.plan.drafts)}
        every = [kinds[kind] for kind in (False, True) if kind in kinds]
        # Of layers without rows, which have their own theta, and of those with.
        self.freq_2P = torch.stack([every[0], every[-1]]).to(device)
        back = config.engram_max_ngram_size - 1
        self.kept = max(1, back, *(spec.ratio - 1 for spec in self.plan.kv_sources))
        layers, cells, width = len(self.plan.layers) + len(self.plan.drafts), self.plan.window + rows, config.head_dim
        self.codes = torch.zeros(layers, slots + 1, cells, width, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(layers, slots + 1, cells, width // 32, dtype=torch.uint8, device=device)
        self.tails = {
            spec.index: torch.zeros(slots + 1, self.kept + rows, 2, width, device=device)
            for spec in self.plan.kv_sources
            if spec.ratio > 1
        }
        # What the draft blocks' windows are computed from, so that steps which do not draft need not fill them.
        seen = len(config.dspark_target_layer_ids) * config.dim if self.plan.drafts else 0
        self.targets = torch.zeros(slots + 1 if seen else 0, cells, seen, dtype=torch.bfloat16, device=device)
        self.history = torch.full((slots + 1, self.kept + rows), NONE, dtype=torch.int64, device=device)
        self.rows.set_pages(self.spare, [pages])

    def _source(self, layer: int) -> DevicePages:
        offsets = {plane.kind: plane.offset for plane in self.layout.planes if plane.layer == layer}
        return DevicePages(
            bytes_PB=self.rows.bytes_PB, table_ST=self.rows.table_device, rows=self.rows.sources[layer].rows,
            main_codes=offsets["main codes"], main_scales=offsets["main scales"], key_codes=offsets["key codes"],
            key_scales=offsets["key scales"],
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.rows.bytes_PB, self.rows.table_device, self.codes, self.scales, self.history, self.targets, self.freq_2P)
        return sum(part.nbytes for part in (*parts, *self.tails.values()))

    def ring(self, layer: int) -> WindowRows:
        """One layer's window entries."""
        return WindowRows(values=self.codes[layer], scales=self.scales[layer])

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """Begin a request whose rows will lie in `pages`. Raises ValueError for a slot or page that is not there."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside 0..{self.slots - 1}")
        spare = len(self.rows.bytes_PB) - 1
        if spare in pages:
            raise ValueError(f"page {spare} is the spare one of padding rows; the pool has pages 0..{spare - 1}")
        self.rows.set_pages(slot, pages)

    def adopt(self, slot: int, memory: PagedMemory, other: int, position: int, classes_T: Tensor | None) -> None:
        """Take over a request that the engine's memory holds in its slot `other`, whose next token stands at `position`.

        The slot must be open with pages enough. `classes_T`: Engram classes of all tokens so far, -1 inside an image. Raises
        ValueError for memory of another page layout, or whose window does not reach back as far as a query will look.
        """
        if memory.layout != self.layout:
            raise ValueError(f"pages of {memory.layout.page_tokens} tokens cannot be taken into {self.layout.page_tokens}")
        self.rows.require(slot, position + 1)
        count = -(-position // self.layout.page_tokens)
        mine, theirs = (rows.table[at, :count].long() for rows, at in ((self.rows, slot), (memory.rows, other)))
        self.rows.bytes_PB[mine.to(self.device)] = memory.bytes_PB[theirs.to(memory.device)].to(self.device)
        cells = self.codes.shape[2]
        for layer in range(len(self.codes)):
            entries_TC = memory.window(layer, other, position)[-self.plan.window :]
            # The draft blocks' windows are theirs to fill: what is there is taken.
            if layer < len(self.plan.layers) and len(entries_TC) < min(position, self.plan.window - 1):
                raise ValueError(
                    f"layer {layer} holds {len(entries_TC)} window entries before position {position}; replay "
                    f"{min(position, self.plan.window - 1)} first"
                )
            cell_T = torch.arange(position - len(entries_TC), position, device=self.device) % cells
            codes, scales = pack_fp8(entries_TC)
            self.codes[layer, slot, cell_T], self.scales[layer, slot, cell_T] = codes.to(self.device), scales.to(self.device)
        for source, tail in self.tails.items():
            ratio, ring = self.plan.layers[source].ratio, memory.tails[source]
            for at in range(position - position % ratio, position):
                both = torch.stack([ring.kv[other, at % ring.size], ring.gate[other, at % ring.size]])
                tail[slot, at % tail.shape[1]] = both.to(self.device)
        if classes_T is not None:
            self.recall(slot, classes_T[:position])

    def recall(self, slot: int, classes_T: Tensor) -> None:
        """Set the n-gram history of a request whose tokens so far have these Engram classes (-1 inside an image)."""
        recent_T = torch.arange(max(0, len(classes_T) - self.kept), len(classes_T), device=self.device)
        self.history[slot, recent_T % self.history.shape[1]] = classes_T.to(self.device)[recent_T]
