"""Joint attention at the released width on Hopper: when its kernels can run, which one does, how a call is cut, and launches.

Shares of a query's keys are a cluster of blocks, parts of its output channels are blocks of their own: `attend.cu` takes any
number of queries, `attend_one.cu` very few, a tile of keys a block. Must not know requests or layers. Shapes as in `gpu.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kvist.kernels import device as device_kernels
from kvist.kernels.device import interpreted
from kvist.kernels.device.cuda_source import kernels
from kvist.kernels.device.pages import DevicePages, multiprocessors

CHANNELS = 512
TILE = 64
MOST_TILES = 10
"""Tiles of keys a share may hold: the kernel keeps the places of two shares' rows."""
KEY_UNIT = 2.0**-9
"""The kernel keeps keys times this, so that an FP4 code and its scale need one product."""
MOST_SHARES = 8
"""Blocks of a cluster on any card."""
PARTS = (1, 2, 4, 8)
"""Parts that the kernel is built for."""
LOG2_E = 1.4426950408889634
_SHARED_BYTES = 212992 + 2 * MOST_TILES * TILE * 8 + 2048 + 256 + 1024
_KERNELS = tuple((f"attend_{parts}", _SHARED_BYTES) for parts in PARTS)
_SHARED = (Path(device_kernels.__file__).with_name("stream.cuh"), Path(__file__).with_name("rows.cuh"))
_SOURCES = (*_SHARED, Path(__file__).with_name("attend.cu"))
FEW_ITEMS = 1
"""Queries (times tiles of heads) up to which `attend_one.cu` is the faster one."""
FEW_PARTS, FEW_TILES, FEW_TURNED, FEW_POOL_BYTES = 4, 10, 32, 1 << 36
"""What it is built for: parts of the channels, tiles of keys, rotated pairs (the last 64 channels), pages found by 32 bits."""
_FEW_KERNELS = (("attend_one", 108560 + 1024),)
_FEW_SOURCES = (*_SHARED, Path(__file__).with_name("attend_one.cu"))
_FEW_THREADS = 256
_POINTERS = (
    "q", "window", "window_scales", "pages", "out", "sink", "cosines", "sines", "spans", "slots", "table", "topk",
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


class _FewCall(_Call):
    _fields_ = (("shares", ctypes.c_void_p), ("totals", ctypes.c_void_p))


def _few(scales_DRG: Tensor, pages: DevicePages | None, items: int, tiles: int, turned: int) -> bool:
    """Whether `attend_one.cu` takes a call that `fits`, and is the faster one."""
    aligned = not any(at % 4 for at in (scales_DRG.data_ptr(), scales_DRG.stride(0), scales_DRG.stride(1)))
    near = pages is None or pages.bytes_PB.numel() < FEW_POOL_BYTES
    return items <= FEW_ITEMS and tiles <= FEW_TILES and turned <= FEW_TURNED and near and aligned


def fits(q_NHC: Tensor, codes_DRC: Tensor, pages: DevicePages | None, keys: int) -> bool:
    """Whether the kernel takes this call of FP8 rings and `keys` keys a query: Hopper, 512 channels, 2^i rows a page, planes on
    whole words of 16 bytes."""
    if interpreted() or not len(q_NHC) or q_NHC.shape[2] != CHANNELS:
        return False
    if torch.cuda.get_device_capability(q_NHC.device) != (9, 0):
        return False
    words = [codes_DRC.data_ptr(), codes_DRC.stride(0), codes_DRC.stride(1)]
    words += [] if pages is None else [pages.bytes_PB.data_ptr(), pages.page_bytes, pages.main_codes, pages.main_scales]
    rows = 1 if pages is None else pages.rows
    return not rows & (rows - 1) and not any(at % 16 for at in words) and keys <= (MOST_SHARES * MOST_TILES - 2) * TILE


def cut_of(items: int, tiles: int, programs: int) -> tuple[int, int]:
    """Shares of the keys and parts of the channels for `items` (queries x tiles of heads): the fastest by a model.

    Measured on an H200: a block starts and ends in 5.0, expands and scores a tile in 1.9 and gathers its values in 0.9 for all
    channels; other blocks' sums come at 8.8 KB a microsecond. Clusters of three or more fill groups of 16 to 18 multiprocessors.
    """

    def microseconds(cut: tuple[int, int]) -> float:
        shares, parts = cut
        resident = programs if shares <= 2 else max(1, programs // 18 * (16 // shares)) * shares
        waves = -(-items * shares * parts // resident)
        join = 0.0 if shares == 1 else 0.6 + 128 / parts * (1 - 1 / shares) / 8.8
        return waves * (5.0 + -(-tiles // shares) * (1.9 + 0.9 / parts) + join)

    least = -(-tiles // MOST_TILES)
    return min(((shares, parts) for shares in range(least, min(MOST_SHARES, tiles) + 1) for parts in PARTS), key=microseconds)


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
    cut: tuple[int, int] | None = None,
) -> Tensor:
    """See `gpu.attend_packed`; only where `fits`. `cut`: shares of the keys and parts of the channels, by `attend.cu`."""
    n, heads, _ = q_NHC.shape
    device = q_NHC.device
    q = q_NHC.contiguous()
    out = torch.empty_like(q)
    topk = None if pages is None or topk_NK is None else topk_NK.to(torch.int32).contiguous()
    k = 0 if topk is None else topk.shape[1]
    programs = multiprocessors(device)
    items = n * -(-heads // 64)
    tiles = -(-window // TILE) + -(-k // TILE)
    turned = 0 if rope is None else rope[0].shape[1]
    few = cut is None and _few(scales_DRG, pages, items, tiles, turned)
    shares, parts = (tiles, FEW_PARTS) if few else cut or cut_of(items, tiles, programs)
    cos, sin = (t.float().contiguous() for t in rope) if rope is not None else (sink_H, sink_H)
    sink, span, slots = sink_H.float().contiguous(), span_N2.to(torch.int64).contiguous(), slot_N.to(torch.int32).contiguous()
    table, source = (slots, q) if pages is None else (pages.table_ST, pages.bytes_PB)
    tensors = [q, codes_DRC, scales_DRG, source, out, sink, cos, sin, span, slots, table, slots if topk is None else topk]
    strides = (codes_DRC.stride(1), scales_DRG.stride(1), codes_DRC.stride(0), scales_DRG.stride(0))
    of_pages = (0, 0, 0, 0)
    if pages is not None:
        of_pages = (table.shape[1], pages.main_codes, pages.main_scales, pages.rows.bit_length() - 1)
    fields = (
        *(t.data_ptr() for t in tensors), *strides, 0 if pages is None else pages.page_bytes, n, heads,
        k, codes_DRC.shape[1], window, *of_pages, turned, shares, CHANNELS**-0.5 * LOG2_E / KEY_UNIT,
    )  # fmt: skip
    blocks = items * parts * shares
    if few:
        sums, totals = (torch.empty(n * shares * heads * size, device=device) for size in (CHANNELS, parts * 2))
        kernel = kernels(_FEW_SOURCES, _FEW_KERNELS, device.index or 0)["attend_one"]
        whole = _FewCall(*fields, sums.data_ptr(), totals.data_ptr())
        kernel.launch(whole, blocks, _FEW_THREADS, overlap=True, cluster=shares)
        return out
    kernel = kernels(_SOURCES, _KERNELS, device.index or 0)[f"attend_{parts}"]
    # One share: blocks serve several queries each. Shares: a cluster for every query.
    kernel.launch(_Call(*fields), min(blocks, programs) if shares == 1 else blocks, 512, overlap=True, cluster=shares)
    return out
