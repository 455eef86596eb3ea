"""The engine's memory as native code reads it: a source's pages and a layer's window ring, as C structures.

The structures keep the tensors they point into alive. Must not know requests or what the operators mean. Mirrors pages.h.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

SEGMENT_FIELDS = 5
"""Columns of a segment table, int64: slot, first batch row, rows, position of the first row, first position to publish."""


class PageSource(ctypes.Structure):
    """One source layer's planes behind the page table."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_bytes", "table_width", "ratio", "rows", "main_width", "key_width")),
        *((name, ctypes.c_int64) for name in ("main_codes", "main_scales", "key_codes", "key_scales")),
    )
    ratio: int
    key_width: int

    @staticmethod
    def of(
        bytes_PB: Tensor, table: Tensor, *, ratio: int, rows: int, main_width: int, key_width: int, offsets: tuple[int, ...]
    ) -> PageSource:
        """`bytes_PB` uint8 [pages, page bytes], `table` int32 [slots, pages a slot]; `offsets` of the four planes in a page."""
        sizes = (bytes_PB.shape[1], table.shape[1], ratio, rows, main_width, key_width)
        source = PageSource(bytes_PB.data_ptr(), table.data_ptr(), *sizes, *offsets)
        source.owners = (bytes_PB, table)
        return source


class WindowRing(ctypes.Structure):
    """One layer's ring of window entries."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("size", "window", "width")),
    )
    width: int

    @staticmethod
    def of(values: Tensor, state: Tensor, window: int) -> WindowRing:
        """`values` float32 [slots, size, width], `state` int64 [slots, 3] (origin, low, stop), `window` entries a query."""
        ring = WindowRing(values.data_ptr(), state.data_ptr(), values.shape[1], window, values.shape[2])
        ring.owners = (values, state)
        return ring
