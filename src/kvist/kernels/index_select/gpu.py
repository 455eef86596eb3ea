"""Index selection on the GPU: cutting keys into shares, launches, joining lists. Kernels in `scan_triton.py`.

`select_gpu` takes values as `select` does; `select_packed` reads MXFP4 keys in pages for queries of any requests. Scores are
float32 sums of exact products (the reference rounds each step to the queries' dtype): choices agree wherever the margin exceeds
that rounding. On Hopper products are FP8 where that is exact and sums are its units' (`keys.cuh`). Must not know requests or
layers. Shapes as in `ref.py`; G groups of queries that share keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvist.kernels.device import interpreted
from kvist.kernels.device.pages import DevicePages, multiprocessors, require_on_gpu
from kvist.kernels.index_select.hopper import MOST_LAUNCHES, MOST_SCORES, fits, many_fit, select_few, select_many
from kvist.kernels.index_select.ref import Selection
from kvist.kernels.index_select.scan_triton import join, scan

MOST_CHANNELS = 256
MOST_CHOSEN = 4096
MOST_TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class ScanTiling:
    """How a scan is cut: queries a program (a power of two), keys a tile, keys a share (0: chosen), buffer entries, warps."""

    together: int = 1
    keys: int = 128
    share: int = 0
    buffer: int = 0
    warps: int = 4


def _check(q_NJI: Tensor, weight_NJ: Tensor, k: int, publish_blocks: int, block_size: int, pool_NB: Tensor | None) -> None:
    n, heads, channels = q_NJI.shape
    if q_NJI.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"index queries are {q_NJI.dtype}; the GPU kernel takes bfloat16 or float32")
    if channels % 2 or channels > MOST_CHANNELS:
        raise ValueError(f"{channels} index channels; the GPU kernel takes an even number up to {MOST_CHANNELS}")
    if weight_NJ.shape != (n, heads):
        raise ValueError(f"weights {tuple(weight_NJ.shape)} for {n} queries of {heads} heads")
    if not 1 <= k <= MOST_CHOSEN or publish_blocks > MOST_CHOSEN:
        raise ValueError(f"k is {k}, publish_blocks {publish_blocks}; the GPU kernel chooses 1 to {MOST_CHOSEN}")
    if block_size & (block_size - 1) or block_size > 16:
        raise ValueError(f"candidate blocks of {block_size} rows; the GPU kernel takes powers of two up to 16")
    if pool_NB is not None and publish_blocks:
        raise ValueError("a query inside a candidate pool publishes none; pass pool_NB or publish_blocks, not both")


def groups_of(counts: list[int], together: int, device: torch.device) -> Tensor:
    """int32 [G,2] (first query, queries) for requests with `counts` queries each, at most `together` in a group."""
    if together == 1:  # made on the device: a step that is being captured may ask for them
        first_G = torch.arange(sum(counts), dtype=torch.int32, device=device)
        return torch.stack((first_G, torch.ones_like(first_G)), 1)
    rows, first = [], 0
    for count in counts:
        rows += [(first + at, min(together, count - at)) for at in range(0, count, together)]
        first += count
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, 2)


def select_gpu(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys_MI: Tensor,
    visible_N: Tensor,
    *,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
) -> Selection:
    """See `select`; keys of one request as values. Raises GpuUnavailable, or ValueError for unsupported sizes."""
    require_on_gpu("index_select", q_NJI, weight_NJ, keys_MI, visible_N, pool_NB)
    _check(q_NJI, weight_NJ, k, publish_blocks, block_size, pool_NB)
    n, m = q_NJI.shape[0], keys_MI.shape[0]
    device = q_NJI.device
    # float32 products have no matrix unit of their own exactness: they run in registers, which wide tiles would overflow.
    wide = q_NJI.dtype is torch.float32
    together = 1 if pool_NB is not None or wide else min(MOST_TOGETHER, triton.next_power_of_2(max(n, 1)))
    groups = groups_of([n], together, device)
    slots = torch.zeros(max(n, 1), dtype=torch.int32, device=device)
    keys = keys_MI.to(q_NJI.dtype).contiguous()
    tiling = ScanTiling(together=together, keys=64 if wide else 128)
    chosen = _select(
        q_NJI, weight_NJ, keys, slots, visible_N.clamp_max(m), groups, m, k, block_size, pool_NB, publish_blocks, tiling
    )
    return Selection(*(None if x is None else x.long() for x in chosen))


def select_packed(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    pages: DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    groups_G2: Tensor,
    *,
    rows: int,
    k: int,
    block_size: int,
    pool_NB: Tensor | None = None,
    publish_blocks: int = 0,
    tiling: ScanTiling | None = None,
) -> Selection:
    """Choose rows of bfloat16 queries of any requests, keys read from the slots' pages. Ids int32; otherwise as `select`.

    `groups_G2` from `groups_of`: queries of one slot that may be scored together, up to `hopper.GROUP`, or with a `tiling` up to
    its `together` (one each with a pool); `rows` bounds what any query may see and is the host's number, so that nothing waits
    for the device. Raises GpuUnavailable, or ValueError.
    """
    require_on_gpu("index_select", q_NJI, weight_NJ, pages.bytes_PB, slot_N, visible_N, pool_NB)
    _check(q_NJI, weight_NJ, k, publish_blocks, block_size, pool_NB)
    if q_NJI.dtype is not torch.bfloat16 or q_NJI.shape[2] % 32:
        got = f"{q_NJI.dtype} of {q_NJI.shape[2]}"
        raise ValueError(f"packed keys are read by bfloat16 queries of a multiple of 32 channels, got {got}")
    if tiling is None and fits(q_NJI, pages, k, block_size, publish_blocks):
        if pool_NB is None and many_fit(q_NJI, groups_G2, k):
            topk, maxima = select_many(
                q_NJI, weight_NJ, pages, slot_N, visible_N, groups_G2, rows=rows, k=k, publish=publish_blocks > 0
            )
            limits = _block_limits(visible_N, block_size)
            return Selection(topk, None if maxima is None else _join(maxima, None, limits, publish_blocks))
        # A pool is small, and passes that have one bring thousands of queries: those gain nothing by several launches.
        launches = MOST_LAUNCHES if pool_NB is None else 1
        if 0 < len(q_NJI) * _scanned(rows, pool_NB, block_size) <= MOST_SCORES * launches:
            return select_few(
                q_NJI, weight_NJ, pages, slot_N, visible_N, rows=rows, k=k, pool_NB=pool_NB, publish_blocks=publish_blocks
            )
    cut = tiling
    if cut is None:
        cut, groups_G2 = ScanTiling(together=1), groups_of([1] * len(q_NJI), 1, q_NJI.device)
    return Selection(
        *_select(
            q_NJI, weight_NJ, pages, slot_N, visible_N, groups_G2, rows, k, block_size, pool_NB, publish_blocks, cut
        )
    )  # fmt: skip


def _select(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys: Tensor | DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    groups_G2: Tensor,
    rows: int,
    k: int,
    block_size: int,
    pool_NB: Tensor | None,
    publish_blocks: int,
    tiling: ScanTiling,
) -> tuple[Tensor, Tensor | None]:
    n, device = q_NJI.shape[0], q_NJI.device
    scanned = _scanned(rows, pool_NB, block_size)
    if not n or not scanned:
        blank = torch.full((n, k), -1, dtype=torch.int32, device=device)
        return blank, torch.full((n, publish_blocks), -1, dtype=torch.int32, device=device) if publish_blocks else None
    chunk, shares = _shares(scanned, len(groups_G2), tiling, multiprocessors(device))
    blocks = -(-rows // block_size)
    block_orders = torch.empty((n, blocks) if publish_blocks else (0,), dtype=torch.int32, device=device)
    orders, ids = (torch.empty((n, shares * k), dtype=torch.int32, device=device) for _ in range(2))
    _scan(
        q_NJI, weight_NJ, keys, slot_N, visible_N, groups_G2, pool_NB, chunk, shares, orders, ids, block_orders, k, block_size,
        publish_blocks, tiling,
    )  # fmt: skip
    topk = ids if shares == 1 else _join(orders, ids, None, k)
    if not publish_blocks:
        return topk, None
    return topk, _join(block_orders, None, _block_limits(visible_N, block_size), publish_blocks)


def _block_limits(visible_N: Tensor, block_size: int) -> Tensor:
    """How many candidate blocks each query sees."""
    return ((visible_N + block_size - 1) // block_size).to(torch.int32)


def _scanned(rows: int, pool_NB: Tensor | None, block_size: int) -> int:
    """Keys that a query scores at most."""
    return rows if pool_NB is None else pool_NB.shape[1] * block_size


def _shares(scanned: int, groups: int, tiling: ScanTiling, programs: int) -> tuple[int, int]:
    """(keys a share, shares): enough programs to fill the card twice, but no share below eight tiles."""
    chunk = tiling.share
    if not chunk:
        wanted = max(1, 2 * programs // groups)
        chunk = max(-(-scanned // wanted), 8 * tiling.keys)
    chunk = -(-chunk // tiling.keys) * tiling.keys
    return chunk, -(-scanned // chunk)


def _scan(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    keys: Tensor | DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    groups_G2: Tensor,
    pool_NB: Tensor | None,
    chunk: int,
    shares: int,
    orders: Tensor,
    ids: Tensor,
    block_orders: Tensor,
    k: int,
    block_size: int,
    publish_blocks: int,
    tiling: ScanTiling,
) -> None:
    _, heads, channels = q_NJI.shape
    pairs, device = channels // 2, q_NJI.device
    buffer = tiling.buffer or triton.next_power_of_2(max(4 * k, k + 2 * tiling.keys))
    held = (len(groups_G2) * shares * tiling.together * buffer,)
    buffers = [torch.empty(held, dtype=torch.int32, device=device) for _ in range(2)]
    wide = q_NJI.dtype is torch.float32
    of_pages = (0, 0, 0, 0)
    if isinstance(keys, DevicePages):
        source, table = keys.bytes_PB, keys.table_ST
        of_pages = (table.shape[1], keys.page_bytes, keys.key_codes, keys.key_scales)
    else:
        source, table = keys if wide else keys.view(torch.int32), slot_N
    pool = pool_NB.contiguous() if pool_NB is not None else slot_N
    scan[(len(groups_G2), shares)](
        q_NJI.contiguous(), weight_NJ.contiguous(), source, table, slot_N, groups_G2, visible_N, pool, *buffers, orders, ids,
        block_orders, heads, chunk, *of_pages, 0 if pool_NB is None else pool_NB.shape[1],
        block_orders.shape[1] if publish_blocks else 0, PAIRS=pairs, PB=max(16, triton.next_power_of_2(pairs)),
        R=tiling.together, JP=max(16, triton.next_power_of_2(heads)), KT=tiling.keys, K=k, CAP=buffer, BS=block_size,
        POOLED=pool_NB is not None, PUBLISH=publish_blocks > 0, WRITE_ORDERS=shares > 1,
        ROWS=keys.rows if isinstance(keys, DevicePages) else 1, PACKED=isinstance(keys, DevicePages),
        WIDE=wide, PLAIN=interpreted(), num_warps=tiling.warps, num_stages=1,
    )  # fmt: skip


def _join(orders_NL: Tensor, ids_NL: Tensor | None, limits_N: Tensor | None, k: int) -> Tensor:
    """The k best entries of each line, ascending by id, by levels of segments that fit a program. int32 [N,k]."""
    if not orders_NL.shape[1]:
        return torch.full((len(orders_NL), k), -1, dtype=torch.int32, device=orders_NL.device)
    segment = triton.next_power_of_2(max(4 * k, 64))
    segment = max(segment, 4096) if not interpreted() else segment
    while True:
        n, length = orders_NL.shape
        size = min(segment, triton.next_power_of_2(max(length, k)))
        segments = -(-length // size)
        out_orders, out_ids = (torch.empty((n, segments * k), dtype=torch.int32, device=orders_NL.device) for _ in range(2))
        join[(n, segments)](
            orders_NL, orders_NL if ids_NL is None else ids_NL, orders_NL if limits_N is None else limits_N, out_orders,
            out_ids, length, L=size, K=k, NUMBERED=ids_NL is not None, WRITE_ORDERS=segments > 1,
            num_warps=4 if size <= 2048 else 8,
        )  # fmt: skip
        if segments == 1:
            return out_ids
        orders_NL, ids_NL, limits_N = out_orders, out_ids, None
