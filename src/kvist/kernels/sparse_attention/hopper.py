"""Joint attention at the released width on Hopper: when its kernels can run, which one does, how a call is cut, and launches.

Shares of a query's keys are a cluster of blocks: `attend.cu` takes any number of queries and parts of the output channels,
`attend_few.cu` as many queries as run side by side, 16 heads a block. Must not know requests or layers. Shapes as in `gpu.py`.
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
MOST_BLOCKS = (1 << 16) - 1
"""Blocks of a launch of clusters: the kernel multiplies their number by itself in 32 bits."""
PARTS = (1, 2, 4, 8)
"""Parts that the kernel is built for."""
LOG2_E = 1.4426950408889634
_SHARED_BYTES = 212992 + 2 * MOST_TILES * TILE * 8 + 2048 + 256 + 1024
_KERNELS = tuple((f"attend_{parts}", _SHARED_BYTES) for parts in PARTS)
_SHARED = (Path(device_kernels.__file__).with_name("stream.cuh"), Path(__file__).with_name("rows.cuh"))
_SOURCES = (*_SHARED, Path(__file__).with_name("attend.cu"))
FEW_HEADS, FEW_SHARES, FEW_TILES, FEW_TURNED = 16, 10, 5, 32
"""What `attend_few.cu` is built for: heads a block, blocks of a cluster, rotated pairs (the last 64 channels); and up to how many
tiles a block it is the faster one."""
H200_CLUSTERS = {3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9, 10: 7}
"""Clusters side by side, by their blocks."""
FEW_PAGES = 8192
"""Of a page table, copied to shared memory; a wider one is read where it lies."""
_FEW_BYTES, _FEW_TILE_BYTES = 1024 + -(-(16384 + 2048 + 17408 + 1280 + 704) // 1024) * 1024, 65536
_FEW_KERNELS = tuple(
    (name, _FEW_BYTES + n * _FEW_TILE_BYTES + 4 * FEW_PAGES) for name, n in (("attend_one", 1), ("attend_several", 2))
)
_FEW_SOURCES = (*_SHARED, Path(__file__).with_name("attend_few.cu"))
_FEW_THREADS, _FEW_SUMS = 512, 8192
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
    _fields_ = (("shares", ctypes.c_void_p),)


def clusters_at_once(blocks: int, programs: int) -> int:
    """Clusters of so many blocks that run side by side, a block a multiprocessor: what the driver says of an H200's 132
    (`cuOccupancyMaxActiveClusters`), elsewhere groups of 16 to 18 multiprocessors."""
    if blocks <= 2:
        return programs // blocks
    if programs == 132 and blocks in H200_CLUSTERS:
        return H200_CLUSTERS[blocks]
    return programs // 18 * (16 // blocks)


def few_shares(clusters: int, tiles: int, programs: int) -> int:
    """Shares of the keys by which `attend_few.cu` takes so many (queries x 16 heads): as few tiles a block as clusters side by
    side allow. 0: too many queries for it."""
    fitting = [s for s in range(1, min(FEW_SHARES, tiles) + 1) if clusters <= clusters_at_once(s, programs)]
    shares = min(fitting, key=lambda s: (-(-tiles // s), s), default=0)
    return shares if shares and -(-tiles // shares) <= FEW_TILES else 0


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
    channels; other blocks' sums come at 12.8 KB a microsecond. Clusters of three or more fill groups of 16 to 18 multiprocessors.
    """

    def microseconds(cut: tuple[int, int]) -> float:
        shares, parts = cut
        resident = programs if shares <= 2 else max(1, programs // 18 * (16 // shares)) * shares
        waves = -(-items * shares * parts // resident)
        join = 0.0 if shares == 1 else 0.6 + 128 / parts * (1 - 1 / shares) / 12.8
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
    """See `gpu.attend_packed`; only where `fits`. `cut`: shares of the keys and parts of the channels, by `attend.cu`.

    `slot_N` and page tables must be older than the launches just before this one, which (kernels of this package do) may let it
    begin before they have ended: both are read at once.
    """
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
    parts_few = -(-heads // FEW_HEADS)
    few = few_shares(n * parts_few, tiles, programs) if cut is None and turned <= FEW_TURNED else 0
    shares, parts = (few, parts_few) if few else cut or cut_of(items, tiles, programs)
    if shares > 1 and items * parts * shares > MOST_BLOCKS and not few:
        each = MOST_BLOCKS // (items // n * parts * shares)
        cuts = (slice(at, at + each) for at in range(0, n, each))
        return torch.cat([
            attend_hopper(
                q[at], codes_DRC, scales_DRG, span_N2[at], slot_N[at], pages, None if topk is None else topk[at], sink_H,
                rope=None if rope is None else (rope[0][at], rope[1][at]), window=window, cut=(shares, parts),
            )
            for at in cuts
        ])  # fmt: skip
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
    if few:
        sums = torch.empty(n * parts * shares * _FEW_SUMS, device=device)
        copied = 4 * table.shape[1] if pages is not None and table.shape[1] <= FEW_PAGES else 0
        name, buffers = ("attend_one", 1) if tiles == shares else ("attend_several", 2)
        kernel = kernels(_FEW_SOURCES, _FEW_KERNELS, device.index or 0)[name]
        kernel.launch(
            _FewCall(*fields, sums.data_ptr()), n * parts * shares, _FEW_THREADS, overlap=True, cluster=shares,
            shared_bytes=_FEW_BYTES + buffers * _FEW_TILE_BYTES + copied,
        )  # fmt: skip
        return out
    blocks = items * parts * shares
    kernel = kernels(_SOURCES, _KERNELS, device.index or 0)[f"attend_{parts}"]
    # One share: blocks serve several queries each. Shares: a cluster for every query.
    kernel.launch(_Call(*fields), min(blocks, programs) if shares == 1 else blocks, 512, overlap=True, cluster=shares)
    return out
