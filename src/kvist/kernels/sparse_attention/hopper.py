"""Joint attention at the released width on Hopper: when `attend.cu` can run, how a call is cut, and its launches.

Must not know requests or layers. Shapes as in `gpu.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kvist.kernels.device import interpreted
from kvist.kernels.device.cuda_source import kernels
from kvist.kernels.device.pages import DevicePages, multiprocessors

CHANNELS = 512
TILE = 64
MOST_TILES = 10
"""Tiles of keys a share may hold: the kernel keeps the places of two shares' rows."""
KEY_UNIT = 2.0**-9
"""The kernel keeps keys times this, so that an FP4 code and its scale need one product."""
LOG2_E = 1.4426950408889634
_SHARED_BYTES = 212992 + 2 * MOST_TILES * TILE * 8 + 2048 + 256 + 1024
_KERNELS = (("attend", _SHARED_BYTES), ("combine", 0))
_SOURCES = (Path(__file__).with_name("attend.cu"),)
_POINTERS = (
    "q", "window", "window_scales", "pages", "out", "sink", "cosines", "sines", "spans", "slots", "table", "topk", "shares",
    "peaks", "totals",
)  # fmt: skip
_STRIDES = ("window_stride", "scale_stride", "slot_stride", "slot_scale_stride", "page_bytes")
_COUNTS = (
    "queries", "heads", "selected", "ring", "window_length", "table_width", "main_codes", "main_scales", "page_shift", "turned",
    "splits",
)  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        ("scale", ctypes.c_float),
    )


def fits(q_NHC: Tensor, codes_DRC: Tensor, pages: DevicePages | None) -> bool:
    """Whether the kernel takes this call of FP8 rings: Hopper, 512 channels, 2^i rows a page, rows on whole words."""
    if interpreted() or not len(q_NHC) or q_NHC.shape[2] != CHANNELS:
        return False
    if torch.cuda.get_device_capability(q_NHC.device) != (9, 0):
        return False
    words = [codes_DRC.data_ptr(), codes_DRC.stride(0), codes_DRC.stride(1)]
    halves = [] if pages is None else [pages.bytes_PB.data_ptr(), pages.page_bytes, pages.main_codes]
    rows = 1 if pages is None else pages.rows
    return not rows & (rows - 1) and not any(at % 16 for at in words) and not any(at % 8 for at in halves)


def shares_of(items: int, tiles: int, programs: int) -> int:
    """How many shares a query's tiles are cut into: as many as fill the card, a tile each at least, ten at most."""
    most = max(1, min(tiles, programs // max(1, items)))
    least = -(-tiles // MOST_TILES)
    # Equal shares: the longest decides.
    longest = -(-tiles // max(most, least))
    return max(least, -(-tiles // longest))


def attend_hopper(
    q_NHC: Tensor,
    codes_DRC: Tensor,
    scales_DRG: Tensor,
    span_N2: Tensor,
    slot_N: Tensor,
    pages: DevicePages | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
    rope: tuple[Tensor, Tensor] | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `gpu.attend_packed`; only where `fits`."""
    n, heads, _ = q_NHC.shape
    device = q_NHC.device
    q = q_NHC.contiguous()
    out = torch.empty_like(q)
    topk = None if pages is None or topk_NK is None else topk_NK.to(torch.int32).contiguous()
    k = 0 if topk is None else topk.shape[1]
    programs = multiprocessors(device)
    items = n * -(-heads // 64)
    tiles = -(-window // TILE) + -(-k // TILE)
    cut = splits or shares_of(items, tiles, programs)
    parts = n * cut * heads if cut > 1 else 0
    shares, peaks, totals = (torch.empty(size, device=device) for size in (parts * CHANNELS, parts, parts))
    cos, sin = (t.float().contiguous() for t in rope) if rope is not None else (sink_H, sink_H)
    sink, span, slots = sink_H.float().contiguous(), span_N2.to(torch.int64).contiguous(), slot_N.to(torch.int32).contiguous()
    table, source = (slots, q) if pages is None else (pages.table_ST, pages.bytes_PB)
    tensors = [q, codes_DRC, scales_DRG, source, out, sink, cos, sin, span, slots, table, slots if topk is None else topk]
    strides = (codes_DRC.stride(1), scales_DRG.stride(1), codes_DRC.stride(0), scales_DRG.stride(0))
    of_pages = (0, 0, 0, 0)
    if pages is not None:
        of_pages = (table.shape[1], pages.main_codes, pages.main_scales, pages.rows.bit_length() - 1)
    call = _Call(
        *(t.data_ptr() for t in (*tensors, shares, peaks, totals)), *strides, 0 if pages is None else pages.page_bytes, n, heads,
        k, codes_DRC.shape[1], window, *of_pages, 0 if rope is None else cos.shape[1], cut, CHANNELS**-0.5 * LOG2_E / KEY_UNIT,
    )  # fmt: skip
    found = kernels(_SOURCES, _KERNELS, device.index or 0)
    found["attend"].launch(call, min(items * cut, programs), 512)
    if cut > 1:
        found["combine"].launch(call, n * heads, 128, overlap=True)
    return out
