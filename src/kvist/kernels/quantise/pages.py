"""Packing of main rows and index keys straight into pages: one native call a source, the bytes of `kvist.quant`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvist.kernels.native import f32, i64, native_or_none, threads
from kvist.kernels.native.pages import PageSource


def write_pages(source: PageSource, slots_G: Tensor, positions_G: Tensor, main_GC: Tensor, key_GI: Tensor) -> None:
    """Pack rows whose groups start at `positions_G` of requests `slots_G`. A group with a NaN gets a NaN scale, codes 0."""
    native = native_or_none()
    assert native is not None, "callers use the generic path where there is no library"
    main, key, slots, positions = f32(main_GC.detach()), f32(key_GI.detach()), i64(slots_G), i64(positions_G)
    pointers = (main.data_ptr(), key.data_ptr(), slots.data_ptr(), positions.data_ptr())
    native.kvist_pages_write(ctypes.addressof(source), *pointers, len(positions), threads())
