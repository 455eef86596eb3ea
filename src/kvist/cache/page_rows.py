"""Bytes of pages as rows: writing packed rows, reading them back as values, through a request's page table.

Owns the pool of page bytes, its planes as views, and the page tables. Must not know attention, windows or scheduling.
Shapes: P pages, G rows written, M rows read. Design section 4: the same bytes on the device, in memory and in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.native.pages import PageSource
from kvist.page_layout import PageLayout, Plane
from kvist.quant import pack_main_fp4, pack_mxfp4, unpack_main_fp4, unpack_mxfp4

NO_PAGE = -1
PLANE_KINDS = ("main codes", "main scales", "key codes", "key scales")


class SourcePlanes(NamedTuple):
    """Views [pages, rows a page, bytes a row] of one source's planes, and its ratio."""

    ratio: int
    rows: int
    main_codes: Tensor
    main_scales: Tensor
    key_codes: Tensor
    key_scales: Tensor


class PageRows:
    """`bytes_PB` uint8 [pages, page_bytes] and a page table a slot, int32 [slots, most pages a slot], -1 where none is."""

    def __init__(self, layout: PageLayout, pages: int, slots: int, most_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.bytes_PB = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8, device=device)
        most = max(1, -(-most_tokens // layout.page_tokens))
        self.table = torch.full((slots, most), NO_PAGE, dtype=torch.int32)
        self.table_device = self.table if device.type == "cpu" else self.table.to(device)
        self.held = [0] * slots
        self.sources = {layer: self._planes(layer) for layer in dict.fromkeys(plane.layer for plane in layout.planes)}

    def _planes(self, layer: int) -> SourcePlanes:
        planes = {plane.kind: plane for plane in self.layout.planes if plane.layer == layer}
        main = planes["main codes"]
        views = (self._view(planes[kind]) for kind in PLANE_KINDS)
        return SourcePlanes(main.ratio, main.rows, *views)

    def _view(self, plane: Plane) -> Tensor:
        inside = self.bytes_PB[:, plane.offset : plane.offset + plane.nbytes]
        return inside.unflatten(1, (plane.rows, plane.row_bytes))

    def native_source(self, layer: int) -> PageSource:
        """A source's planes for native code; the pool and the table never move."""
        planes = {plane.kind: plane for plane in self.layout.planes if plane.layer == layer}
        ordered = [planes[kind] for kind in PLANE_KINDS]
        main, key = planes["main codes"], planes["key codes"]
        return PageSource.of(
            self.bytes_PB,
            self.table,
            ratio=main.ratio,
            rows=main.rows,
            main_width=2 * main.row_bytes,
            key_width=2 * key.row_bytes,
            offsets=tuple(plane.offset for plane in ordered),
        )

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Make `pages` the slot's page table. Raises ValueError for a page that the pool does not have, or too many."""
        self.held[slot] = 0
        self.table[slot] = NO_PAGE
        self.add_pages(slot, pages)

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Append to the slot's page table."""
        total, most = len(self.bytes_PB), self.table.shape[1]
        bad = [page for page in pages if not 0 <= page < total]
        if bad:
            raise ValueError(f"page {bad[0]} is outside the pool of {total} pages")
        first = self.held[slot]
        if first + len(pages) > most:
            raise ValueError(f"slot {slot}: {first + len(pages)} pages exceed the {most} that the longest context needs")
        self.table[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.held[slot] = first + len(pages)
        if self.table_device is not self.table:
            self.table_device[slot] = self.table[slot].to(self.table_device.device)

    def exchange(self, slot: int, number: int, page: int) -> None:
        """Make `page` the slot's page `number`. Raises ValueError for a page that the pool or the slot does not have."""
        if not 0 <= page < len(self.bytes_PB):
            raise ValueError(f"page {page} is outside the pool of {len(self.bytes_PB)} pages")
        if not 0 <= number < self.held[slot]:
            raise ValueError(f"slot {slot} has {self.held[slot]} pages; there is no page {number} to exchange")
        self.table[slot, number] = page
        if self.table_device is not self.table:
            self.table_device[slot, number] = page

    def require(self, slot: int, tokens: int) -> None:
        """Raise ValueError unless the slot's pages hold `tokens` tokens."""
        room = self.held[slot] * self.layout.page_tokens
        if tokens > room:
            raise ValueError(f"slot {slot}: its {self.held[slot]} pages hold {room} tokens, {tokens} are needed; extend it first")

    def write(self, source: int, slots_G: Tensor, positions_G: Tensor, main_GC: Tensor, key_GI: Tensor) -> None:
        """Pack rows whose groups start at `positions_G` of requests `slots_G` into their pages."""
        planes = self.sources[source]
        page_G = self.table_device[slots_G, positions_G // self.layout.page_tokens].long()
        row_G = positions_G % self.layout.page_tokens // planes.ratio
        codes, scales = pack_main_fp4(main_GC)
        planes.main_codes[page_G, row_G], planes.main_scales[page_G, row_G] = codes, scales
        codes, scales = pack_mxfp4(key_GI)
        planes.key_codes[page_G, row_G], planes.key_scales[page_G, row_G] = codes, scales

    def keys(self, source: int, slot: int, count: int, dtype: torch.dtype) -> Tensor:
        """The first `count` index keys of a request, [count, I]."""
        planes = self.sources[source]
        pages = self.table_device[slot, : -(-count // planes.rows)].long()
        codes, scales = (plane[pages].flatten(0, 1)[:count] for plane in (planes.key_codes, planes.key_scales))
        return unpack_mxfp4(codes, scales, dtype)

    def main(self, source: int, slot: int, ids_M: Tensor, dtype: torch.dtype) -> Tensor:
        """Main rows of a request by their ids, [M, C]."""
        planes = self.sources[source]
        page_M, row_M = self.table_device[slot, ids_M // planes.rows].long(), ids_M % planes.rows
        return unpack_main_fp4(planes.main_codes[page_M, row_M], planes.main_scales[page_M, row_M], dtype)
