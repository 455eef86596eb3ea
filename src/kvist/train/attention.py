"""Joint attention of training: window band and shared rows of uniform sequences in one softmax with a sink.

Owns three forms of one function: plain torch (any device, materialises scores); on CUDA flex attention where all visible rows
are attended, and a kernel that gathers rows by id where they are selected. Must not know projections or indexers.

Shapes: B sequences, T tokens, H heads, C head width, M rows, K selected, L = M + T keys (rows first), n sampled queries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvist.train.gathered import attend_gathered
from kvist.train.pieces import allow_variants
from kvist.train.selection import chosen_mask
from kvist.train.shapes import Geometry

NEGATIVE = float("-inf")


class Attended(NamedTuple):
    """Outputs [B,T,H,C] and the logarithm of each softmax's whole denominator, sink included, float32 [B,H,T]."""

    out_BTHC: Tensor
    total_BHT: Tensor


def attend(
    geometry: Geometry,
    q_BTHC: Tensor,
    window_BTC: Tensor,
    rows_BMC: Tensor | None,
    ratio: int,
    ids_BTK: Tensor | None,
    sink_H: Tensor,
) -> Attended:
    """Attend the window and, if given, rows: those with the selected ids (-1: none), or all visible ones."""
    if q_BTHC.is_cuda:
        if rows_BMC is None or ids_BTK is None:
            return _attend_flex(geometry, q_BTHC, window_BTC, rows_BMC, ratio, sink_H)
        return Attended(*attend_gathered(q_BTHC, window_BTC, rows_BMC, ids_BTK, sink_H, geometry.config.window_size))
    masks = [geometry.banded().expand(len(q_BTHC), -1, -1)]
    keys = [window_BTC]
    if rows_BMC is not None:
        keys.insert(0, rows_BMC)
        visible = geometry.visible(ratio).expand(len(q_BTHC), -1, -1)
        masks.insert(0, visible if ids_BTK is None else chosen_mask(ids_BTK, rows_BMC.shape[1]))
    return attend_plain(q_BTHC, torch.cat(keys, 1), torch.cat(masks, 2), sink_H)


def attend_plain(q_BTHC: Tensor, keys_BLC: Tensor, seen_BTL: Tensor, sink_H: Tensor) -> Attended:
    """The definition: scores in float32, the sink in the denominator only."""
    q, keys = q_BTHC.float(), keys_BLC.float()
    scores = torch.einsum("bthc,blc->bhtl", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_BTL.unsqueeze(1), NEGATIVE)
    sink = sink_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    total = torch.logsumexp(torch.cat([scores, sink], 3), 3)
    out = torch.einsum("bhtl,blc->bthc", torch.exp(scores - total.unsqueeze(3)), keys)
    return Attended(out.to(q_BTHC.dtype), total)


def _attend_flex(geometry: Geometry, q: Tensor, window: Tensor, rows: Tensor | None, ratio: int, sink: Tensor) -> Attended:
    count = 0 if rows is None else rows.shape[1]
    keys = window if rows is None else torch.cat([rows, window], 1)
    blocks = geometry.memo(("blocks", count and ratio), lambda: _block_mask(geometry, count, max(1, ratio)))
    out, total = _compiled()(q.transpose(1, 2), keys.unsqueeze(1), sink, blocks)
    return Attended(out.transpose(1, 2), total)


def _block_mask(geometry: Geometry, count: int, ratio: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    window = geometry.config.window_size

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q - (k - count)
        return torch.where(k < count, k < (q + 1) // ratio, (back >= 0) & (back < window))

    length = geometry.length
    return create_block_mask(seen, None, None, length, count + length, device=geometry.device)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    allow_variants()
    return torch.compile(_flex, dynamic=False)


def _flex(q_BHTC: Tensor, keys_B1LC: Tensor, sink_H: Tensor, blocks: Any) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    scale = q_BHTC.shape[-1] ** -0.5
    out, peak = flex_attention(q_BHTC, keys_B1LC, keys_B1LC, block_mask=blocks, scale=scale, enable_gqa=True, return_lse=True)
    total = torch.logaddexp(peak, sink_H.view(1, -1, 1))
    return (out * torch.exp(peak - total).unsqueeze(3)).to(q_BHTC.dtype), total


def row_mass(q_BnHC: Tensor, rows_BMC: Tensor, total_BHn: Tensor, visible_nM: Tensor) -> Tensor:
    """Attention that sampled queries pay to every visible row, summed over heads, float32 [B,n,M].

    Divided by the complete denominator, so that window and sink keep their share. Rows outside a query's selection get the
    mass they would have had beside it.
    """
    scores = torch.einsum("bnhc,bmc->bhnm", q_BnHC, rows_BMC).float() * q_BnHC.shape[-1] ** -0.5
    mass = torch.exp((scores - total_BHn.unsqueeze(3)).clamp_max(30.0)).sum(1)
    return mass.masked_fill(~visible_nM, 0.0)
