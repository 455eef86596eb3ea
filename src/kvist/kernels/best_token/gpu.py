"""The best id of each row on a GPU: programs own shares of the ids and join their maxima by atomics, whose order changes nothing.

A score and its id are one number, so the lower id wins among equals; the last program to arrive writes the ids and leaves the
counters as they were. Must not know sampling. Shapes: N rows, V ids, M rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import interpreted, require_gpu
from kvist.kernels.device.arrivals import refuse_capture
from kvist.kernels.device.gpu import begin, early, operand, rounded
from kvist.kernels.device.order_triton import ordered

PLAIN = interpreted()
SHARE = 4096
"""Ids a program of plain rows owns."""
TILE, RANK_STEP = 128, 64
"""Ids a program of biased rows owns, and channels of the bias it multiplies at a time."""
MOST_ROWS = 64
"""Biased rows a program holds."""
_joined: dict[tuple[torch.device, int], Tensor] = {}


@triton.jit
def _numbered(value, id, inside):
    """Scores and ids as one int64 each, larger for the better; 0 for what is nobody's."""
    order = ordered(value, inside & (value == value)).to(tl.int64)
    return tl.where(order > 0, (order << 31) | (0x7FFFFFFF - id).to(tl.int64), 0)


@triton.jit
def _finish(joined, arrived, out, n, alive, programs):
    """The last program of a group of rows writes their ids and clears what was joined."""
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == programs - 1:
        key = tl.load(joined + n, mask=alive, other=0, cache_modifier=".cg")
        tl.store(out + n, tl.where(key > 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), 0), mask=alive)
        tl.store(joined + n, tl.zeros_like(key), mask=alive)
        tl.store(arrived, 0)


@triton.jit
def _best(logits, joined, arrived, out, V, SHARE: tl.constexpr, PLAIN: tl.constexpr):
    """A share of one row."""
    share, row = tl.program_id(0), tl.program_id(1)
    begin(PLAIN)
    id = share * SHARE + tl.arange(0, SHARE)
    value = tl.load(logits + row.to(tl.int64) * V + id, mask=id < V, other=0.0)
    best = tl.max(_numbered(value, id, id < V), 0)
    n = row + tl.arange(0, 1)
    tl.atomic_max(joined + n, best + tl.zeros([1], tl.int64), sem="relaxed")
    _finish(joined, arrived + row, out, n, n >= 0, tl.num_programs(0))


@triton.jit
def _best_biased(logits, embedded, head, joined, arrived, out, N_ROWS, V, stride, M: tl.constexpr, TILE: tl.constexpr,
                 ROWS: tl.constexpr, STEP: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """A tile of ids for ROWS rows."""
    tile, group = tl.program_id(0), tl.program_id(1)
    begin(PLAIN)
    id = tile * TILE + tl.arange(0, TILE)
    n = group * ROWS + tl.arange(0, ROWS)
    inside, alive = id < V, n < N_ROWS
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for step in range(M // STEP):
        m = step * STEP + tl.arange(0, STEP)
        weight = tl.load(head + id.to(tl.int64)[:, None] * M + m[None, :], mask=inside[:, None], other=0.0)
        row = tl.load(embedded + n[None, :] * M + m[:, None], mask=alive[None, :], other=0.0)
        acc = tl.dot(operand(weight, PLAIN), operand(row, PLAIN), acc)
    here = inside[:, None] & alive[None, :]
    value = tl.load(logits + n.to(tl.int64)[None, :] * stride + id[:, None], mask=here, other=0.0) + rounded(acc, PLAIN)
    best = tl.max(_numbered(value, tl.broadcast_to(id[:, None], (TILE, ROWS)), here), 0)
    tl.atomic_max(joined + n, best, mask=alive, sem="relaxed")
    _finish(joined, arrived + group, out, n, alive, tl.num_programs(0))


def _counters(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """Zeros that every call leaves zero: a joined number and a counter a row. Their users must be ordered."""
    key = (device, 1 << (rows - 1).bit_length())
    if key not in _joined:
        refuse_capture(device)
        _joined[key] = torch.zeros(2 * key[1], dtype=torch.int64, device=device)
    return _joined[key][: key[1]], _joined[key][key[1] :].view(torch.int32)


def best_token_gpu(logits_NV: Tensor, low_rank: tuple[Tensor, Tensor] | None, out: Tensor | None = None) -> Tensor:
    """See `best_token`; rows of `logits_NV` may lie apart. `out`: int64 [N] to write to. Calls must follow one another.

    Raises ValueError for logits that are not float32, or a rank that is not a multiple of 64.
    """
    require_gpu()
    n, size = logits_NV.shape
    if logits_NV.dtype is not torch.float32 or logits_NV.stride(1) != 1:
        raise ValueError(f"logits are {logits_NV.dtype} with ids {logits_NV.stride(1)} apart; float32, one beside the other")
    out = torch.empty(n, dtype=torch.int64, device=logits_NV.device) if out is None else out
    if not n:
        return out
    joined, arrived = _counters(logits_NV.device, n)
    if low_rank is None:
        logits_NV = logits_NV.contiguous()
        _best[(triton.cdiv(size, SHARE), n)](logits_NV, joined, arrived, out, size, SHARE=SHARE, PLAIN=PLAIN, num_warps=4,
                                             **early(PLAIN))  # fmt: skip
        return out
    embedded_NM, head_VM = low_rank
    rank = head_VM.shape[1]
    step = min(RANK_STEP, rank)
    if rank % RANK_STEP and rank not in (16, 32):
        raise ValueError(f"a bias of rank {rank}; impl 'gpu' takes 16, 32 or a multiple of {RANK_STEP}")
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(n)))
    _best_biased[(triton.cdiv(size, TILE), triton.cdiv(n, rows))](
        logits_NV, embedded_NM.contiguous(), head_VM.contiguous(), joined, arrived, out, n, size, logits_NV.stride(0), M=rank,
        TILE=TILE, ROWS=rows, STEP=step, PLAIN=PLAIN, num_warps=4, **early(PLAIN),
    )  # fmt: skip
    return out
