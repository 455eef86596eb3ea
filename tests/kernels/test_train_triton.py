"""Training's Triton kernels against the definitions they stand for: gathered attention with gradients, top-k, candidate blocks.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvist.kernels.index_select.ref import candidate_blocks, top_rows
from kvist.train.attention import attend_plain
from kvist.train.selection import chosen_mask

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"

ATTENTION = [(2, 37, 5, 24, 18, 9, 7), (1, 100, 8, 64, 100, 70, 66), (1, 64, 17, 64, 32, 64, 64)]
SELECTION = [(2, 37, 18, 2, 5, 4, 2), (1, 64, 64, 1, 7, 8, 3), (2, 20, 20, 1, 64, 8, 64), (1, 45, 15, 3, 4, 2, 1)]


def random_ids(batch: int, length: int, rows: int, k: int) -> Tensor:
    """Visible rows of each query in ascending order, some places left empty."""
    ids = torch.full((batch, length, k), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(length):
            visible = min(rows, (t + 1) * rows // length)
            some = torch.randperm(visible)[: max(0, min(k, visible) - t % 3)].sort().values
            ids[b, t, : len(some)] = some.int()
    return ids


@pytest.mark.parametrize("shape", ATTENTION, ids=str)
def test_gathered_attention_equals_its_definition(shape: tuple[int, ...]) -> None:
    """Outputs, totals and the gradients of queries, window, rows and sinks, float32."""
    from kvist.train.gathered import attend_gathered

    batch, length, heads, width, rows_count, k, window = shape
    torch.manual_seed(1)
    q = torch.randn(batch, length, heads, width, device=DEVICE, requires_grad=True)
    entries, rows = (torch.randn(batch, n, width, device=DEVICE, requires_grad=True) for n in (length, rows_count))
    sink = torch.randn(heads, device=DEVICE, requires_grad=True)
    ids = random_ids(batch, length, rows_count, k).to(DEVICE)
    at = torch.arange(length, device=DEVICE)
    back = at.unsqueeze(1) - at
    band = ((back >= 0) & (back < window)).expand(batch, -1, -1)
    want = attend_plain(q, torch.cat([rows, entries], 1), torch.cat([chosen_mask(ids, rows_count), band], 2), sink)
    out, total = attend_gathered(q, entries, rows, ids, sink, window)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(want.out_BTHC, [q, entries, rows, sink], grad)
    got = torch.autograd.grad(out, [q, entries, rows, sink], grad)
    # On a GPU Triton multiplies float32 tiles in tf32.
    bound = 1e-5 if DEVICE == "cpu" else 3e-3
    for mine, theirs in zip((out, total, *got), (want.out_BTHC, want.total_BHT, *wanted), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < bound


@pytest.mark.parametrize("shape", SELECTION, ids=str)
def test_selection_is_exact_with_ties_and_zeros_of_both_signs(shape: tuple[int, ...]) -> None:
    """Rows, blocks, and rows inside blocks, against the reference of inference."""
    from kvist.train.topk_triton import keep_blocks, select_rows

    batch, length, m, ratio, k, size, blocks = shape
    torch.manual_seed(2)
    scores = (torch.randn(batch, length, m) * 3).round() / 2
    scores[:, :, m // 2] = -0.0
    visible_T = (torch.arange(length) + 1) // ratio
    kept = keep_blocks(scores.to(DEVICE), ratio, blocks, size)
    free = select_rows(scores.to(DEVICE), None, ratio, k, size).cpu().long()
    pooled = select_rows(scores.to(DEVICE), kept, ratio, k, size).cpu().long()
    for b in range(batch):
        allowed = torch.arange(m) < visible_T.unsqueeze(1)
        assert torch.equal(free[b], top_rows(scores[b], allowed, k))
        wanted = chosen_mask(candidate_blocks(scores[b], visible_T, blocks=blocks, block_size=size), -(-m // size))
        assert torch.equal(kept[b].bool().cpu(), wanted)
        inside = allowed & wanted.repeat_interleave(size, 1)[:, :m]
        assert torch.equal(pooled[b], top_rows(scores[b], inside, k))
