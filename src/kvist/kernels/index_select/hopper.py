"""Index selection at the released widths on Hopper: when its kernels can run, how a call is cut, and its launches.

Must not know requests or layers. Shapes as in `gpu.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kvist.kernels.device import interpreted
from kvist.kernels.device.arrivals import refuse_capture
from kvist.kernels.device.cuda_source import kernels
from kvist.kernels.device.pages import DevicePages, multiprocessors
from kvist.kernels.index_select.ref import Selection

CHANNELS, MOST_HEADS, BLOCK = 128, 32, 8
BINS, PROGRESS = 4096, 64
MOST_CHOSEN = 4096
MOST_SCORES, MOST_LAUNCHES = 1 << 26, 8
"""Scores that a launch of `select_few` may keep, and launches of a call; `scan_triton` keeps none."""
TILE = 64
GROUP = 16
"""Queries that `select_many` scores together."""
MOST_OF_MANY = 2048
FEW_THREADS, FEW_BLOCKS = 256, 2
"""Threads of a block of `few`, and blocks that a multiprocessor holds."""
FEW_KEPT = 4096
"""Scores of a share that `few` keeps in shared memory."""
MOST_ROWS, MOST_BLOCKS, MOST_LISTED = 1024, 2048, 264
"""Rows and candidate blocks that are picked from what shares list, and queries of such a call."""
LISTED = (4096, 8192)
"""Entries of a query's shares, of rows and of candidate blocks."""
FEW_BYTES = 1024 + 1024 + 16384 + 8192 + 16384 + 8 * 3 * 2176 + 4 * 4096
"""Shared memory of `few` while it scores: alignment, words, bins, queries, places or bins, keys under way, scores."""
FEW_HELD_AT = 1024 + 1024 + 4096
"""Where candidates lie in it afterwards."""
_FOLDER = Path(__file__).parent
_FEW_SOURCES = (_FOLDER / "keys.cuh", _FOLDER / "choose.cuh", _FOLDER / "lists.cuh", _FOLDER / "few.cu")
_FP8_SOURCES = (_FOLDER / "keys.cuh", _FOLDER / "many_fp8.cu")
_MANY_SOURCES = (_FOLDER / "keys.cuh", _FOLDER / "choose.cuh", _FOLDER / "many.cu")
_FEW_KERNELS = tuple((name, 160 << 10) for name in ("few", "few_with_blocks", "few_in_pool"))
_FP8_KERNELS = (("scan_many_fp8", 72 << 10),)
_MANY_KERNELS = (("scan_many", 136 << 10), ("choose", 40 << 10))


class _List(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("orders", "bins", "counts", "found", "out", "entries")),
        *((name, ctypes.c_int32) for name in ("stride", "chosen", "room", "number_shift")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q", "weights", "pages", "table", "slots", "visible", "pool", "groups", "arrivals", "left", "spill",
            )
        ),
        ("rows", _List),
        ("blocks", _List),
        ("page_bytes", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                "queries", "heads", "table_width", "key_codes", "key_scales", "page_shift", "pool_blocks", "publish", "limit",
                "share", "shares", "group_count", "inverse",
            )
        ),
    )  # fmt: skip


_zeroed: dict[tuple[torch.device, int, int], Tensor] = {}


def fits(q_NJI: Tensor, pages: DevicePages, k: int, block_size: int, publish_blocks: int) -> bool:
    """Whether the kernels take this call: Hopper, released widths, blocks of 8, pages of 2^i >= 32 rows on whole words."""
    if interpreted() or torch.cuda.get_device_capability(q_NJI.device) != (9, 0):
        return False
    _, heads, channels = q_NJI.shape
    if channels != CHANNELS or heads > MOST_HEADS or block_size != BLOCK or max(k, publish_blocks) > MOST_CHOSEN:
        return False
    return (
        pages.rows >= 32
        and not pages.rows & (pages.rows - 1)
        and not any(at % 16 for at in (pages.bytes_PB.data_ptr(), pages.page_bytes, pages.key_codes))
        and not pages.key_scales % 4
    )


def _most(n: int) -> int:
    """Queries that counters of `n` have room for: passes bring any number, and what is kept must not grow with each new one."""
    return 1 << (n - 1).bit_length()


def _counters_of(most: int) -> int:
    return most * BINS + -(-most // 32) * 32


def _counters(device: torch.device, n: int, lists: int) -> Tensor:
    """Words between launches of `few`, zeros at first. Its users must be ordered.

    Bins, then a count, of each of `_most(n)` queries, for each list; entries of shares, which list their best for up to
    MOST_LISTED queries; PROGRESS words a query. A query's words lie at the same place whatever `n`.
    """
    most = _most(n)
    key = (device, most, lists)
    if key not in _zeroed:
        refuse_capture(device)
        listed = 2 * sum(LISTED[:lists]) * min(most, MOST_LISTED)
        _zeroed[key] = torch.zeros(lists * _counters_of(most) + listed + PROGRESS * most, dtype=torch.int32, device=device)
    return _zeroed[key]


def _number_shift(numbers: int) -> int:
    """Ids below `numbers` shifted by this are below 1,024."""
    return max(0, (max(numbers, 1) - 1).bit_length() - 10)


def _list(counters: Tensor, at: int, n: int, length: int, k: int) -> tuple[_List, Tensor, list[Tensor]]:
    """One list of scores to choose from: its structure, its output, what must outlive the launch."""
    device = counters.device
    stride = -(-length // 4) * 4
    room = max(4096, 1 << (4 * k - 1).bit_length())
    orders = torch.empty(n * stride, dtype=torch.int32, device=device)
    found = torch.empty(n * room * 2, dtype=torch.int32, device=device)
    out = torch.empty(n, k, dtype=torch.int32, device=device)
    bins = counters.data_ptr() + 4 * at * _counters_of(_most(n))
    buffers = (orders.data_ptr(), bins, bins + 4 * BINS * _most(n), found.data_ptr(), out.data_ptr(), None)
    made = _List(*buffers, stride, k, room, _number_shift(length))
    return made, out, [orders, found]


def _rest(
    q_NJI: Tensor, weight_NJ: Tensor, pages: DevicePages, slot_N: Tensor, visible_N: Tensor, pool: Tensor | None
) -> list[Tensor]:
    """The tensors of a call in the kernels' order; the caller keeps them until it has launched."""
    slots, visible = slot_N.to(torch.int32).contiguous(), visible_N.to(torch.int64).contiguous()
    weight = weight_NJ.to(torch.bfloat16).contiguous()
    return [q_NJI.contiguous(), weight, pages.bytes_PB, pages.table_ST, slots, visible, slots if pool is None else pool]


def _of_pages(pages: DevicePages) -> tuple[int, int, int, int]:
    return pages.table_ST.shape[1], pages.key_codes, pages.key_scales, pages.rows.bit_length() - 1


def select_few(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    pages: DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    *,
    rows: int,
    k: int,
    pool_NB: Tensor | None = None,
    publish_blocks: int = 0,
) -> Selection:
    """See `gpu.select_packed`; only where `fits`. Queries read their keys alone, so many of them go some at a time."""
    n = len(q_NJI)
    each = max(1, MOST_SCORES // max(1, rows if pool_NB is None else pool_NB.shape[1] * BLOCK))
    parts = []
    for start in range(0, n, each):
        at = slice(start, start + each)
        pool = None if pool_NB is None else pool_NB[at]
        given = (q_NJI[at], weight_NJ[at], pages, slot_N[at], visible_N[at], pool)
        parts.append(_launch_few(*given, rows=rows, k=k, publish_blocks=publish_blocks))
    if len(parts) == 1:
        return parts[0]
    blocks = [part.candidates_NB for part in parts if part.candidates_NB is not None]
    return Selection(torch.cat([part.topk_NK for part in parts]), torch.cat(blocks) if blocks else None)


def _launch_few(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    pages: DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    pool_NB: Tensor | None,
    *,
    rows: int,
    k: int,
    publish_blocks: int,
) -> Selection:
    """One launch, whose programs wait for each other; the next one reads and writes nothing before this one has ended."""
    n, heads, _ = q_NJI.shape
    device = q_NJI.device
    programs = multiprocessors(device)
    pool = None if pool_NB is None else pool_NB.to(torch.int32).contiguous()
    scanned = rows if pool is None else pool.shape[1] * BLOCK
    most, counters = _most(n), _counters(device, n, 2 if publish_blocks else 1)
    main, topk, kept = _list(counters, 0, n, scanned, k)
    main.number_shift = _number_shift(rows)
    other, blocks = _List(), None
    if publish_blocks:
        other, blocks, more = _list(counters, 1, n, -(-rows // BLOCK), publish_blocks)
        kept += more
    shared = max(FEW_BYTES, FEW_HELD_AT + max(main.room * 8 + k * 4, other.room * 8 + publish_blocks * 4))
    # All programs of a query run side by side.
    side_by_side = programs * (FEW_BLOCKS if shared <= 114 << 10 else 1)
    chunk = -(-scanned // max(1, min(FEW_THREADS, side_by_side // n)))
    chunk = -(-chunk // FEW_THREADS) * FEW_THREADS
    tensors = _rest(q_NJI, weight_NJ, pages, slot_N, visible_N, pool)
    shares = -(-scanned // chunk)
    if n <= MOST_LISTED and chunk <= FEW_KEPT and k <= MOST_ROWS and publish_blocks <= MOST_BLOCKS:
        at = counters.data_ptr() + 4 * (2 if publish_blocks else 1) * _counters_of(most)
        main.entries, other.entries = at, at + 8 * LISTED[0] * min(most, MOST_LISTED) if publish_blocks else None
    progress = counters.data_ptr() + 4 * (len(counters) - PROGRESS * most)
    call = _Call(
        *(t.data_ptr() for t in tensors), None, progress, None, None, main, other,
        pages.page_bytes, n, heads, *_of_pages(pages), 0 if pool is None else pool.shape[1], int(publish_blocks > 0), rows, chunk,
        shares, 0, -(-(1 << 31) // shares),
    )  # fmt: skip
    name = "few_in_pool" if pool is not None else "few_with_blocks" if publish_blocks else "few"
    few = kernels(_FEW_SOURCES, _FEW_KERNELS, device.index or 0)[name]
    grid = n * call.shares
    few.launch(call, grid, FEW_THREADS, together=call.shares > 1, overlap=True, shared_bytes=shared)
    return Selection(topk, blocks)


def many_fit(q_NJI: Tensor, groups_G2: Tensor, k: int) -> bool:
    """Whether `select_many` is the better way for a call that fits otherwise: queries share keys, and fill the card."""
    n, groups = len(q_NJI), len(groups_G2)
    return k <= MOST_OF_MANY and n >= 4 * groups and groups * 8 >= multiprocessors(q_NJI.device)


def select_many(
    q_NJI: Tensor,
    weight_NJ: Tensor,
    pages: DevicePages,
    slot_N: Tensor,
    visible_N: Tensor,
    groups_G2: Tensor,
    *,
    rows: int,
    k: int,
    publish: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Queries in groups of up to 16 that share keys: row ids [N,k], and with `publish` ordered block maxima int32 [N,blocks].

    No score is kept but of what may still be chosen. What does not fit FP8 products is left to a second kernel. Only where `fits`
    and `many_fit`.
    """
    n, heads, _ = q_NJI.shape
    device, groups = q_NJI.device, len(groups_G2)
    programs = multiprocessors(device)
    tiles = -(-rows // TILE)
    shares = max(1, min(8, 4096 // k, 2 * programs // groups, tiles // 64))
    room = 4096
    blocks = torch.empty((n, -(-rows // BLOCK)) if publish else (0, 0), dtype=torch.int32, device=device)
    found, topk = (torch.empty(n, size, dtype=torch.int32, device=device) for size in (2 * room, k))
    counts = torch.zeros(n, dtype=torch.int32, device=device)
    grid = min(groups * shares, programs)
    left = torch.empty(groups * shares, dtype=torch.int32, device=device)
    spill = torch.empty(grid * GROUP * 4096 * 2, dtype=torch.int32, device=device)
    main = _List(None, None, counts.data_ptr(), found.data_ptr(), topk.data_ptr(), None, 0, k, room, _number_shift(rows))
    other = _List(orders=blocks.data_ptr(), stride=blocks.shape[1])
    tensors, table = _rest(q_NJI, weight_NJ, pages, slot_N, visible_N, None), groups_G2.contiguous()
    call = _Call(
        *(t.data_ptr() for t in tensors), table.data_ptr(), None, left.data_ptr(), spill.data_ptr(), main, other,
        pages.page_bytes, n, heads, *_of_pages(pages), 0, int(publish), rows, -(-tiles // shares), shares, groups, 0,
    )  # fmt: skip
    kernels(_FP8_SOURCES, _FP8_KERNELS, device.index or 0)["scan_many_fp8"].launch(call, grid, 512)
    rest = kernels(_MANY_SOURCES, _MANY_KERNELS, device.index or 0)
    rest["scan_many"].launch(call, grid, 384)
    rest["choose"].launch(call, n, 512, shared_bytes=room * 8 + k * 4)
    return topk, blocks if publish else None
