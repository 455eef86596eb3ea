"""Random pages and windows on the device, in the released formats and widths: any bits are E2M1 codes, scales are moderate.

Also the same bytes as values, for checks. Knows no benchmark.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.device.pages import DevicePages
from kvist.quant import pack_fp8, unpack_fp8, unpack_main_fp4, unpack_mxfp4

CHANNELS, KEY_CHANNELS = 512, 128
PAGE_ROWS = 128
MAIN, MAIN_SCALES, KEY, KEY_SCALES = CHANNELS // 2, CHANNELS // 16, KEY_CHANNELS // 2, KEY_CHANNELS // 32
WINDOW, RING = 128, 136


def random_pages(slots: int, rows: int, *, main: bool, seed: int = 0) -> DevicePages:
    """`slots` contexts of `rows` rows each, pages in random order; `main` False: index keys only."""
    source = torch.Generator("cuda").manual_seed(seed)
    a_slot = -(-rows // PAGE_ROWS)
    widths = (MAIN, MAIN_SCALES, KEY, KEY_SCALES) if main else (0, 0, KEY, KEY_SCALES)
    offsets = [PAGE_ROWS * sum(widths[:i]) for i in range(5)]
    pool = torch.empty(slots * a_slot, offsets[4], dtype=torch.uint8, device="cuda").random_(0, 256, generator=source)
    # E4M3 scales of 1/4 to 2, E8M0 scales of 2^-3 to 1.
    pool[:, offsets[1] : offsets[2]].random_(0x28, 0x40, generator=source)
    pool[:, offsets[3] :].random_(124, 128, generator=source)
    order = torch.randperm(slots * a_slot, device="cuda", generator=source).int().reshape(slots, a_slot)
    return DevicePages(
        bytes_PB=pool, table_ST=order.contiguous(), rows=PAGE_ROWS, main_codes=offsets[0], main_scales=offsets[1],
        key_codes=offsets[2], key_scales=offsets[3],
    )  # fmt: skip


def _rows(pages: DevicePages, slot: int, ids_M: Tensor, offset: int, width: int) -> Tensor:
    page_M = pages.table_ST[slot, ids_M // pages.rows].long()
    plane = pages.bytes_PB[:, offset : offset + pages.rows * width].unflatten(1, (pages.rows, width))
    return plane[page_M, ids_M % pages.rows]


def main_values(pages: DevicePages, slot: int, ids_M: Tensor) -> Tensor:
    """bfloat16 [M,512] of main rows."""
    codes = _rows(pages, slot, ids_M, pages.main_codes, MAIN)
    return unpack_main_fp4(codes, _rows(pages, slot, ids_M, pages.main_scales, MAIN_SCALES), torch.bfloat16)


def key_values(pages: DevicePages, slot: int, ids_M: Tensor) -> Tensor:
    """bfloat16 [M,128] of index keys."""
    codes = _rows(pages, slot, ids_M, pages.key_codes, KEY)
    return unpack_mxfp4(codes, _rows(pages, slot, ids_M, pages.key_scales, KEY_SCALES), torch.bfloat16)


def random_rings(slots: int, seed: int = 0, ring: int = RING) -> tuple[Tensor, Tensor]:
    """FP8 rows uint8 [slots,ring,528] and the same as values bfloat16 [slots,ring,512]."""
    source = torch.Generator("cuda").manual_seed(seed)
    codes, scales = pack_fp8(torch.randn(slots, ring, CHANNELS, device="cuda", generator=source))
    return torch.cat([codes, scales], -1), unpack_fp8(codes, scales, torch.bfloat16)


def random_ids(queries: int, rows: int, k: int, seed: int = 0) -> Tensor:
    """int32 [queries,k]: distinct rows, ascending."""
    source = torch.Generator("cuda").manual_seed(seed)
    parts = []
    for at in range(0, queries, 64):
        noise = torch.rand(min(64, queries - at), rows, device="cuda", generator=source)
        parts.append(noise.topk(k, 1, sorted=False).indices.sort(1).values.int())
    return torch.cat(parts)
