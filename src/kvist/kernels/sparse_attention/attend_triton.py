"""Triton kernels of joint window + row attention: decode, verify and prefill are one kernel with different grids.

A program owns one query, up to 64 of its heads, a share of its keys (`SPLITS`) and of its output channels (`PARTS`); keys are
read where they lie (pages, rings, plain rows) and serve all heads as key and value. Shares are joined by `combine`. Softmax runs
in base 2; the sink enters the last denominator only. Imported only where Triton runs; must not know requests or layers.

Shapes: N queries, H heads, C channels as 2 planes of B pairs, W window entries, K selected rows, S shares.
"""

# ruff: noqa: RET505 (Triton compiles what follows an `if` of constants unless it is an `else`)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvist.kernels.device.planes_triton import e4m3_scale, e8m0_scale, fp4_planes, fp8_planes, rounded, store_pairs, value_planes

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turn(even, odd, cos, sin, at, pair, mask, PAIRS: tl.constexpr, TURNED: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr):
    """Rotate the last `TURNED` of `PAIRS` channel pairs by row `at` of the tables; `BACK`: by the conjugate."""
    place = pair - (PAIRS - TURNED)
    turning = (place >= 0) & mask
    c = tl.load(cos + at * TURNED + place, mask=turning, other=1.0)[None, :]
    s = tl.load(sin + at * TURNED + place, mask=turning, other=0.0)[None, :]
    if BACK:
        s = -s
    turned_even, turned_odd = even * c - odd * s, even * s + odd * c
    if not WIDE:
        turned_even, turned_odd = rounded(turned_even), rounded(turned_odd)
    # Channels that stand still keep their bits, infinities included.
    return tl.where(turning[None, :], turned_even, even), tl.where(turning[None, :], turned_odd, odd)


@triton.jit
def _prepare(q, planes, cos, sin, n, head, H, PAIRS: tl.constexpr, TURNED: tl.constexpr, HT: tl.constexpr, BT: tl.constexpr,
             PARTS: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Write a query's heads as two planes, rotated if tables are given. Programs of one query write the same bytes.

    Only what is loaded can be an operand in shared memory; computed queries would fill the registers of the accumulator.
    """
    for j in tl.static_range(PARTS):
        pair = j * BT + tl.arange(0, BT)
        mask = (head < H)[:, None] & (pair < PAIRS)[None, :]
        even, odd = value_planes(q, (n * H + head)[:, None] * PAIRS + pair[None, :], mask, WIDE, PLAIN)
        if TURNED > 0:
            even, odd = _turn(
                even.to(tl.float32), odd.to(tl.float32), cos, sin, n, pair, pair < PAIRS, PAIRS, TURNED, False, WIDE
            )
        to = planes + (n * H + head)[:, None] * (2 * PAIRS) + pair[None, :]
        tl.store(to, even.to(planes.dtype.element_ty), mask=mask)
        tl.store(to + PAIRS, odd.to(planes.dtype.element_ty), mask=mask)


@triton.jit
def _queries(planes, n, head, pair, H, PAIRS: tl.constexpr, PLAIN: tl.constexpr):
    """Even and odd channels [HT,BT] of a query's heads."""
    at = planes + (n * H + head)[:, None] * (2 * PAIRS) + pair[None, :]
    mask = (head < H)[:, None] & (pair < PAIRS)[None, :]
    even, odd = tl.load(at, mask=mask, other=0.0), tl.load(at + PAIRS, mask=mask, other=0.0)
    if PLAIN:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
    return even, odd


@triton.jit
def _entries(window, scales, cell, valid, pair, first_pair, stride, scale_stride, PAIRS: tl.constexpr, NT: tl.constexpr,
             BT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Planes [NT,BT] of window entries at the cells `cell` of a ring: FP8 rows, or values."""
    mask = valid[:, None] & (pair < PAIRS)[None, :]
    if PACKED:
        code = tl.load(window + cell[:, None] * stride + pair[None, :], mask=mask, other=0)
        group = first_pair // 16 + tl.arange(0, BT // 16)
        inside = valid[:, None] & (group * 16 < PAIRS)[None, :]
        scale = e8m0_scale(tl.load(scales + cell[:, None] * scale_stride + group[None, :], mask=inside, other=0))
        return fp8_planes(code, scale, NT, BT, BT // 16, PLAIN)
    else:
        return value_planes(window, cell[:, None] * stride + pair[None, :], mask, WIDE, PLAIN)


@triton.jit
def _lookup(topk, table, n, slot, at, K, table_width, page_bytes, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """Where the selected rows `at` of a query lie: (page offset in bytes, row in its page, or 0 and the row id), validity."""
    row = tl.load(topk + n * K + at, mask=at < K, other=-1)
    valid = row >= 0
    # 32 bits: a division of 64 is a subroutine with branches.
    row = tl.maximum(row, 0).to(tl.int32)
    if PACKED:
        page = tl.load(table + slot * table_width + row // ROWS, mask=valid, other=0).to(tl.int64)
        return page * page_bytes, row % ROWS, valid
    else:
        return row.to(tl.int64) * 0, row, valid


@triton.jit
def _row_bytes(pages, main_codes, main_scales, page, row, valid, pair, first_pair, PAIRS: tl.constexpr, BT: tl.constexpr):
    """Codes [NT,BT] and scale bytes [NT,BT/8] of packed rows."""
    mask = valid[:, None] & (pair < PAIRS)[None, :]
    code = tl.load(pages + (page + main_codes + row * PAIRS)[:, None] + pair[None, :], mask=mask, other=0)
    group = first_pair // 8 + tl.arange(0, BT // 8)
    inside = valid[:, None] & (group * 8 < PAIRS)[None, :]
    scale = tl.load(pages + (page + main_scales + row * (PAIRS // 8))[:, None] + group[None, :], mask=inside, other=0)
    return code, scale


@triton.jit
def _rows(pages, main_codes, main_scales, page, row, valid, first, PAIRS: tl.constexpr, KT: tl.constexpr, BT: tl.constexpr,
          PACKED: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Planes [KT,BT] of selected rows from pair `first` on."""
    pair = first + tl.arange(0, BT)
    if PACKED:
        code, scale = _row_bytes(pages, main_codes, main_scales, page, row, valid, pair, first, PAIRS, BT)
        return fp4_planes(code, e4m3_scale(scale), KT, BT, BT // 8, PLAIN)
    else:
        return value_planes(
            pages, row.to(tl.int64)[:, None] * PAIRS + pair[None, :], valid[:, None] & (pair < PAIRS)[None, :], WIDE, PLAIN
        )


@triton.jit
def _multiply(a, b, acc, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _weigh(s, valid, peak, total, scale):
    """Running softmax: probabilities of one more tile of keys, the shrink factor of what came before, peak and total.

    Peaks are whole numbers in log2 (`ref.py`): shrinking is exact, and so is what tiles and shares round.
    """
    s = tl.where(valid[None, :], s * scale, float("-inf"))
    higher = tl.maximum(peak, tl.ceil(tl.max(s, 1)))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(peak - higher)
    return p, shrink, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def _as_key(p, WIDE: tl.constexpr, PLAIN: tl.constexpr):
    """Probabilities in the type of the keys: the release rounds them to bfloat16, but not the denominator."""
    if WIDE:
        return p
    elif PLAIN:
        return rounded(p)
    else:
        return p.to(tl.bfloat16)


@triton.jit
def _finish(out, cos, sin, n, head, pair, H, even, odd, peak, total, sink, PAIRS: tl.constexpr, TURNED: tl.constexpr,
            PLANAR: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Divide by the denominator with the sink, rotate back, write (`PLANAR`: as two planes of bfloat16)."""
    logit = tl.load(sink + head, mask=head < H, other=0.0) * LOG2_E
    # The best key alone weighs more than 1/2: a sum of 0 means no key (and NaN is not 0).
    any_key = total != 0
    total = total + tl.exp2(logit - peak)
    even = tl.where(any_key[:, None], even / total[:, None], 0.0)
    odd = tl.where(any_key[:, None], odd / total[:, None], 0.0)
    mask = (head < H)[:, None] & (pair < PAIRS)[None, :]
    if TURNED > 0:
        if not WIDE:
            even, odd = rounded(even), rounded(odd)
        even, odd = _turn(even, odd, cos, sin, n, pair, pair < PAIRS, PAIRS, TURNED, True, WIDE)
    if PLANAR:
        to = out + (n * H + head)[:, None] * (2 * PAIRS) + pair[None, :]
        tl.store(to, rounded(even).to(tl.bfloat16), mask=mask)
        tl.store(to + PAIRS, rounded(odd).to(tl.bfloat16), mask=mask)
    else:
        store_pairs(out, (n * H + head)[:, None] * PAIRS + pair[None, :], even, odd, mask, WIDE)


@triton.jit
def attend(
    q, planes, out, sink, cos, sin, window, window_scales, spans, slots, pages, table, topk, shares, peaks, totals,
    H, K, ring, window_stride, scale_stride, slot_stride, slot_scale_stride, table_width, page_bytes, main_codes,
    main_scales, scale, PAIRS: tl.constexpr, TURNED: tl.constexpr, HT: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, WT: tl.constexpr, W_TILES: tl.constexpr, KT: tl.constexpr, K_TILES: tl.constexpr,
    PLANAR: tl.constexpr, ROWS: tl.constexpr, PACKED_WINDOW: tl.constexpr, PACKED_ROWS: tl.constexpr,
    WIDE: tl.constexpr, PLAIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: query x share of keys x (part of channels, tile of heads). See `gpu.py` for the arguments' meaning.

    A share holds `W_TILES` tiles of `WT` window entries and `K_TILES` tiles of `KT` rows, so that all shares weigh the same.
    """
    n, split, last = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    part = last % PARTS
    head = (last // PARTS) * HT + tl.arange(0, HT)
    pair = tl.arange(0, BT)
    slot = tl.load(slots + n).to(tl.int64)
    start, stop = tl.load(spans + 2 * n).to(tl.int32), tl.load(spans + 2 * n + 1).to(tl.int32)
    peak = tl.full([HT], -1e30, tl.float32)
    total = tl.zeros([HT], tl.float32)
    acc_even = tl.zeros([HT, BT], tl.float32)
    acc_odd = tl.zeros([HT, BT], tl.float32)
    own = part * BT + pair
    if K_TILES > 0:
        # The first rows' bytes are on their way while the window is attended.
        page, row, valid = _lookup(
            topk, table, n, slot, split * K_TILES * KT + tl.arange(0, KT), K, table_width, page_bytes, ROWS, PACKED_ROWS
        )
        if PACKED_ROWS:
            code, code_scale = _row_bytes(pages, main_codes, main_scales, page, row, valid, own, part * BT, PAIRS, BT)
    if not PLANAR:
        _prepare(q, planes, cos, sin, n, head, H, PAIRS, TURNED, HT, BT, PARTS, WIDE, PLAIN)
        tl.debug_barrier()
    # A program's own channels come last: their planes are the values of the second product.
    q_even, q_odd = _queries(planes, n, head, own, H, PAIRS, PLAIN)
    if PARTS == 2:
        other_even, other_odd = _queries(planes, n, head, (1 - part) * BT + pair, H, PAIRS, PLAIN)
    ring_at, scales_at = window + slot * slot_stride, window_scales + slot * slot_scale_stride
    for i in range(W_TILES):
        entry = start + split * (W_TILES * WT) + i * WT + tl.arange(0, WT)
        here = entry < stop
        cell = (entry % ring).to(tl.int64)
        s = tl.zeros([HT, WT], tl.float32)
        if PARTS == 2:
            first = (1 - part) * BT
            k_even, k_odd = _entries(
                ring_at, scales_at, cell, here, first + pair, first, window_stride, scale_stride, PAIRS, WT, BT, PACKED_WINDOW,
                WIDE, PLAIN,
            )  # fmt: skip
            s = _multiply(other_even, tl.trans(k_even), s, WIDE)
            s = _multiply(other_odd, tl.trans(k_odd), s, WIDE)
        k_even, k_odd = _entries(
            ring_at, scales_at, cell, here, own, part * BT, window_stride, scale_stride, PAIRS, WT, BT, PACKED_WINDOW, WIDE,
            PLAIN,
        )  # fmt: skip
        s = _multiply(q_even, tl.trans(k_even), s, WIDE)
        s = _multiply(q_odd, tl.trans(k_odd), s, WIDE)
        p, shrink, peak, total = _weigh(s, here, peak, total, scale)
        p = _as_key(p, WIDE, PLAIN)
        acc_even = _multiply(p, k_even, acc_even * shrink[:, None], WIDE)
        acc_odd = _multiply(p, k_odd, acc_odd * shrink[:, None], WIDE)
    if K_TILES > 0:
        for i in range(K_TILES):
            later = split * K_TILES + i + 1
            # Beyond the share's last tile the next lookup reads nothing.
            ahead = tl.where(i + 1 < K_TILES, later * KT, K) + tl.arange(0, KT)
            next_page, next_row, next_valid = _lookup(topk, table, n, slot, ahead, K, table_width, page_bytes, ROWS, PACKED_ROWS)
            s = tl.zeros([HT, KT], tl.float32)
            if PARTS == 2:
                k_even, k_odd = _rows(
                    pages, main_codes, main_scales, page, row, valid, (1 - part) * BT, PAIRS, KT, BT, PACKED_ROWS, WIDE, PLAIN
                )
                s = _multiply(other_even, tl.trans(k_even), s, WIDE)
                s = _multiply(other_odd, tl.trans(k_odd), s, WIDE)
            if PACKED_ROWS:
                k_even, k_odd = fp4_planes(code, e4m3_scale(code_scale), KT, BT, BT // 8, PLAIN)
                code, code_scale = _row_bytes(
                    pages, main_codes, main_scales, next_page, next_row, next_valid, own, part * BT, PAIRS, BT
                )
            else:
                k_even, k_odd = _rows(
                    pages, main_codes, main_scales, page, row, valid, part * BT, PAIRS, KT, BT, PACKED_ROWS, WIDE, PLAIN
                )
            s = _multiply(q_even, tl.trans(k_even), s, WIDE)
            s = _multiply(q_odd, tl.trans(k_odd), s, WIDE)
            p, shrink, peak, total = _weigh(s, valid, peak, total, scale)
            p = _as_key(p, WIDE, PLAIN)
            acc_even = _multiply(p, k_even, acc_even * shrink[:, None], WIDE)
            acc_odd = _multiply(p, k_odd, acc_odd * shrink[:, None], WIDE)
            page, row, valid = next_page, next_row, next_valid
    if SPLITS == 1:
        _finish(out, cos, sin, n, head, own, H, acc_even, acc_odd, peak, total, sink, PAIRS, TURNED, PLANAR, WIDE)
    else:
        if OVERLAP:
            gdc_launch_dependents()
        place = (n * SPLITS + split) * H + head
        mask = (head < H)[:, None] & (own < PAIRS)[None, :]
        to = shares + (place * (2 * PAIRS))[:, None] + own[None, :]
        tl.store(to, acc_even, mask=mask)
        tl.store(to + PAIRS, acc_odd, mask=mask)
        tl.store(peaks + place, peak, mask=(head < H) & (part == 0))
        tl.store(totals + place, total, mask=(head < H) & (part == 0))


@triton.jit
def combine(
    shares, peaks, totals, out, sink, cos, sin, H, PAIRS: tl.constexpr, TURNED: tl.constexpr, SPLITS: tl.constexpr,
    HT: tl.constexpr, BT: tl.constexpr, PLANAR: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the shares of query `program 0`, heads `program 1`; all channels. `OVERLAP`: launched before `attend` has ended."""
    if OVERLAP:
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HT + tl.arange(0, HT)
    pair = tl.arange(0, BT)
    mask = (head < H)[:, None] & (pair < PAIRS)[None, :]
    highest = tl.full([HT], -1e30, tl.float32)
    for s in tl.static_range(SPLITS):
        highest = tl.maximum(highest, tl.load(peaks + (n * SPLITS + s) * H + head, mask=head < H, other=-1e30))
    total = tl.zeros([HT], tl.float32)
    even = tl.zeros([HT, BT], tl.float32)
    odd = tl.zeros([HT, BT], tl.float32)
    for s in tl.static_range(SPLITS):
        place = (n * SPLITS + s) * H + head
        weight = tl.exp2(tl.load(peaks + place, mask=head < H, other=-1e30) - highest)
        total += weight * tl.load(totals + place, mask=head < H, other=0.0)
        at = shares + (place * (2 * PAIRS))[:, None] + pair[None, :]
        even += weight[:, None] * tl.load(at, mask=mask, other=0.0)
        odd += weight[:, None] * tl.load(at + PAIRS, mask=mask, other=0.0)
    _finish(out, cos, sin, n, head, pair, H, even, odd, highest, total, sink, PAIRS, TURNED, PLANAR, WIDE)
