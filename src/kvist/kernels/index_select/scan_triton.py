"""Triton kernels of index selection: scores of packed keys and the exact best of them, without a score matrix.

A program scores a share of the keys for up to 8 queries and keeps what may still be among the k best in a small buffer: an
entry enters if it beats the k-th best so far; a full buffer is cut back to k by a search for the k-th value, bit by bit. Lists
of shares stay ascending by row, so the lower id wins a tie wherever lists are joined. Scores are kept as unsigned numbers of
the same order (-0 as 0, NaN above all, 0: none). Imported only where Triton runs; must not know requests or layers.

Shapes: R queries of a group, J heads, I channels as 2 planes of PAIRS, KT keys a tile, L list entries, K to choose.
"""

# ruff: noqa: RET505 (Triton compiles what follows an `if` of constants unless it is an `else`)
from __future__ import annotations

import triton
import triton.language as tl

from kvist.kernels.device.order_triton import k_best, ordered
from kvist.kernels.device.planes_triton import e8m0_scale, fp4_planes, value_planes


@triton.jit
def _buffered(orders, ids, at, count, CAP: tl.constexpr):
    """One query's buffer [CAP]; its writers have passed a barrier."""
    place = tl.arange(0, CAP)
    held = place < count
    order = tl.load(orders + at + place, mask=held, other=0).to(tl.uint32, bitcast=True)
    return order, tl.load(ids + at + place, mask=held, other=-1)


@triton.jit
def _cut_back(orders, ids, at, count, least, K: tl.constexpr, R: tl.constexpr, CAP: tl.constexpr):
    """Keep the K best of every query's buffer, in their order. Returns the new counts and what a newcomer must beat."""
    member = tl.arange(0, R)
    tl.debug_barrier()
    # Query by query: all buffers at once would not fit the registers.
    for r in range(R):
        mine = member == r
        order, entry = _buffered(orders, ids, at + r * CAP, tl.sum(tl.where(mine, count, 0), 0), CAP)
        tl.debug_barrier()
        kept, cut = k_best(order, K)
        place = at + r * CAP + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(orders + place, order.to(tl.int32, bitcast=True), mask=kept)
        tl.store(ids + place, entry, mask=kept)
        count = tl.where(mine, tl.sum(kept.to(tl.int32), 0), count)
        least = tl.where(mine, cut, least)
    tl.debug_barrier()
    return count, least


@triton.jit
def _write_list(out_orders, out_ids, to, order, entry, kept, K: tl.constexpr, WRITE_ORDERS: tl.constexpr, L: tl.constexpr):
    """Write the kept of [L] as a list of K at `to`, in their order, filled up with (0, -1). K <= L."""
    at = to + tl.cumsum(kept.to(tl.int32), 0) - 1
    fill = tl.arange(0, L)
    empty = (fill >= tl.sum(kept.to(tl.int32), 0)) & (fill < K)
    tl.store(out_ids + at, entry, mask=kept)
    tl.store(out_ids + to + fill, tl.zeros_like(entry) - 1, mask=empty)
    if WRITE_ORDERS:
        tl.store(out_orders + at, order.to(tl.int32, bitcast=True), mask=kept)
        tl.store(out_orders + to + fill, tl.zeros_like(entry), mask=empty)


@triton.jit
def _queries(q, weights, line, alive, pair, J, PAIRS: tl.constexpr, R: tl.constexpr, JP: tl.constexpr, PLAIN: tl.constexpr):
    """Planes [PB,R*JP] of the queries and their head weights float32 [R*JP]; what does not exist is 0."""
    head = tl.arange(0, JP)[None, :]
    at = tl.reshape((line[:, None] * J + head), [R * JP])
    real = tl.reshape(alive[:, None] & (head < J), [R * JP])
    place = q + at[None, :] * (2 * PAIRS) + 2 * pair[:, None]
    mask = real[None, :] & (pair < PAIRS)[:, None]
    even, odd = tl.load(place, mask=mask, other=0.0), tl.load(place + 1, mask=mask, other=0.0)
    if PLAIN:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
    return even, odd, tl.load(weights + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _keys(keys, table, slot, row, valid, pair, table_width, page_bytes, key_codes, key_scales, ROWS: tl.constexpr,
          PAIRS: tl.constexpr, KT: tl.constexpr, PB: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr,
          PLAIN: tl.constexpr):  # fmt: skip
    """Planes [KT,PB] of keys: MXFP4 rows in pages, or values."""
    row = tl.where(valid, row, 0)
    mask = valid[:, None] & (pair < PAIRS)[None, :]
    if PACKED:
        page = tl.load(table + slot * table_width + row // ROWS, mask=valid, other=0).to(tl.int64) * page_bytes
        inside = row % ROWS
        code = tl.load(keys + (page + key_codes + inside * PAIRS)[:, None] + pair[None, :], mask=mask, other=0)
        group = tl.arange(0, PB // 16)
        real = valid[:, None] & (group * 16 < PAIRS)[None, :]
        at = (page + key_scales + inside * (PAIRS // 16))[:, None] + group[None, :]
        return fp4_planes(code, e8m0_scale(tl.load(keys + at, mask=real, other=0)), KT, PB, PB // 16, PLAIN)
    else:
        return value_planes(keys, row.to(tl.int64)[:, None] * PAIRS + pair[None, :], mask, WIDE, PLAIN)


@triton.jit
def _scores(k_even, k_odd, q_even, q_odd, weight, R: tl.constexpr, JP: tl.constexpr, KT: tl.constexpr, WIDE: tl.constexpr):
    """[R,KT] float32: the weighted sum over heads of positive products."""
    s = tl.zeros([KT, R * JP], tl.float32)
    if WIDE:
        s = tl.dot(k_even, q_even, s, input_precision="ieee")
        s = tl.dot(k_odd, q_odd, s, input_precision="ieee")
    else:
        s = tl.dot(k_even, q_even, s)
        s = tl.dot(k_odd, q_odd, s)
    s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    return tl.trans(tl.sum(tl.reshape(s, [KT, R, JP]), 2))


@triton.jit
def scan(
    q, weights, keys, table, slots, groups, visible, pool, buffer_orders, buffer_ids, out_orders, out_ids, block_orders,
    J, chunk, table_width, page_bytes, key_codes, key_scales, pool_blocks, block_stride,
    PAIRS: tl.constexpr, PB: tl.constexpr, R: tl.constexpr, JP: tl.constexpr, KT: tl.constexpr, K: tl.constexpr,
    CAP: tl.constexpr, BS: tl.constexpr, POOLED: tl.constexpr, PUBLISH: tl.constexpr, WRITE_ORDERS: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """One program: a group of queries that share keys x a share of `chunk` keys (or of the query's candidate rows).

    Writes the share's K best as a list; `PUBLISH`: also the best score of each block of `BS` rows, the newest one highest.
    """
    group, share, shares = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, members = tl.load(groups + 2 * group), tl.load(groups + 2 * group + 1)
    member = tl.arange(0, R)
    alive = member < members
    line = (first + tl.where(alive, member, 0)).to(tl.int64)
    slot = tl.load(slots + first).to(tl.int64)
    sees = tl.where(alive, tl.load(visible + line), 0).to(tl.int32)
    pair = tl.arange(0, PB)
    q_even, q_odd, weight = _queries(q, weights, line, alive, pair, J, PAIRS, R, JP, PLAIN)
    buffer = (group * shares + share) * (R * CAP)
    count = tl.zeros([R], tl.int32)
    least = tl.zeros([R], tl.uint32)
    at = share * chunk
    end = at + chunk
    if POOLED:
        end = tl.minimum(end, pool_blocks * BS)
    else:
        end = tl.minimum(end, tl.max(sees, 0))
    while at < end:
        place = at + tl.arange(0, KT)
        row = place
        here = place < end
        if POOLED:
            block = tl.load(pool + first.to(tl.int64) * pool_blocks + place // BS, mask=here, other=-1).to(tl.int32)
            row = block * BS + place % BS
            here = here & (block >= 0)
        here = here & (row < tl.max(sees, 0))
        k_even, k_odd = _keys(
            keys, table, slot, row, here, pair, table_width, page_bytes, key_codes, key_scales, ROWS, PAIRS, KT, PB,
            PACKED, WIDE, PLAIN,
        )  # fmt: skip
        scores = _scores(k_even, k_odd, q_even, q_odd, weight, R, JP, KT, WIDE)
        order = ordered(scores, here[None, :] & (row[None, :] < sees[:, None]))
        if PUBLISH:
            best = tl.max(tl.reshape(order.to(tl.uint32), [R, KT // BS, BS]), 2)
            number = at // BS + tl.arange(0, KT // BS)[None, :]
            newest = (number == (sees - 1)[:, None] // BS) & (sees > 0)[:, None]
            best = tl.where(newest, 0xFFFFFFFF, best).to(tl.uint32)
            inside = alive[:, None] & (number * BS < sees[:, None])
            tl.store(block_orders + line[:, None] * block_stride + number, best.to(tl.int32, bitcast=True), mask=inside)
        enters = order > least[:, None]
        to = buffer + (member * CAP + count)[:, None] + tl.cumsum(enters.to(tl.int32), 1) - 1
        tl.store(buffer_orders + to, order.to(tl.int32, bitcast=True), mask=enters)
        tl.store(buffer_ids + to, tl.broadcast_to(row[None, :], [R, KT]), mask=enters)
        count += tl.sum(enters.to(tl.int32), 1)
        if tl.max(count, 0) > CAP - KT:
            count, least = _cut_back(buffer_orders, buffer_ids, buffer, count, least, K, R, CAP)
        at += KT
    tl.debug_barrier()
    for r in range(R):
        if r < members:
            order, entry = _buffered(buffer_orders, buffer_ids, buffer + r * CAP, tl.sum(tl.where(member == r, count, 0), 0), CAP)
            kept, _ = k_best(order, K)
            to = ((first + r).to(tl.int64) * shares + share) * K
            _write_list(out_orders, out_ids, to, order, entry, kept, K, WRITE_ORDERS, CAP)


@triton.jit
def join(
    orders, ids, limits, out_orders, out_ids, length, L: tl.constexpr, K: tl.constexpr, NUMBERED: tl.constexpr,
    WRITE_ORDERS: tl.constexpr,
):  # fmt: skip
    """The K best of `L` entries of line `program 0`, segment `program 1`, as an ascending list.

    `NUMBERED`: entries have ids; otherwise an entry's id is its place, and only those below `limits` of the line count.
    """
    line, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    place = segment * L + tl.arange(0, L)
    held = place < length
    if not NUMBERED:
        held = held & (place < tl.load(limits + line))
    order = tl.load(orders + line * length + place, mask=held, other=0).to(tl.uint32, bitcast=True)
    entry = place
    if NUMBERED:
        entry = tl.load(ids + line * length + place, mask=held, other=-1)
    kept, _ = k_best(order, K)
    _write_list(out_orders, out_ids, (line * segments + segment) * K, order, entry, kept, K, WRITE_ORDERS, L)
