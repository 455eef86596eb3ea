"""How close a forward pass came to choosing otherwise: selection, routing, rounding and argmax margins by position.

Owns `MarginRecorder`, which watches a model through its own operators. A flip between two correct paths is allowed only
at or after a position where one of these margins is tiny.
"""

from __future__ import annotations

from types import TracebackType
from unittest import mock

import torch
from torch import Tensor

from kvist.kernels import quantise as quantise_op
from kvist.kernels.index_select import ref as index_ref
from kvist.kernels.routing import ref as routing_ref
from kvist.model.transformer import Transformer

# Sums of this toy in another order differ by well under 5e-7 of a group's largest value. A row has thousands of values,
# so a rounding margin is recorded in units in which that noise is the 1e-5 of the other margins.
ROUNDING_UNITS = 20.0


class MarginRecorder:
    """Context manager: run ONE request in ONE pass inside it, then ask for the first position with a margin below a bound."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.margins: list[Tensor] = []

    def __enter__(self) -> MarginRecorder:
        original_top, original_fake = index_ref.top_rows, quantise_op._REFERENCES["fp8"]

        def top_rows(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
            self._note(_choice_margin(scores, allowed, k))
            return original_top(scores, allowed, k)

        def fake_fp8(x: Tensor) -> Tensor:
            self._note(_rounding_margin(x))
            return original_fake(x)

        self._patches = [
            mock.patch.object(index_ref, "top_rows", top_rows),
            mock.patch.object(routing_ref, "top_rows", top_rows),
            mock.patch.dict(quantise_op._REFERENCES, {"fp8": fake_fp8}),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for patch in self._patches:
            patch.stop()

    def _note(self, margin_N: Tensor) -> None:
        self.margins.append(margin_N)

    def first_position_below(self, bound: float) -> int:
        """The first position whose smallest margin is below the bound; a large number if none is."""
        length = max(len(m) for m in self.margins)
        smallest = torch.full((length,), float("inf"))
        for margin in self.margins:
            if len(margin) == length:
                smallest = torch.minimum(smallest, margin)
        low = (smallest < bound).nonzero()
        return int(low[0]) if len(low) else 1 << 30


def _choice_margin(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    masked = scores.float().masked_fill(~allowed, float("-inf"))
    if masked.shape[1] <= k:
        return torch.full((len(masked),), float("inf"))
    best = masked.topk(k + 1, dim=1).values
    gap = best[:, k - 1] - best[:, k]
    # ReLU makes exact zeros: equal on every path, and the lower index wins.
    gap = torch.where((best[:, k - 1] == 0) & (best[:, k] == 0), float("inf"), gap)
    return torch.where(torch.isfinite(best[:, k]), gap, float("inf")).nan_to_num(nan=float("inf"))


def _rounding_margin(x: Tensor) -> Tensor:
    """Distance of each row's nearest value to an E4M3 rounding boundary, relative to the group's scale step."""
    flat = x.float().reshape(len(x), -1, 32)
    peak = flat.abs().amax(2, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 448)))
    y = (flat / scale).abs()
    step = torch.exp2(torch.floor(torch.log2(y.clamp_min(2.0**-6))) - 3)
    off = ((y / step) % 1.0 - 0.5).abs() * step
    # A value exactly on a boundary is one that arithmetic did not touch (zeros, table values): no path moves it.
    off = torch.where(off == 0, float("inf"), off)
    off = torch.where(y == 0, float("inf"), off)
    # Where the scale itself is about to change, everything in the group is.
    edge = (torch.log2(peak / 448) - torch.round(torch.log2(peak / 448))).abs()
    edge = torch.where((peak <= 1e-4) | (edge == 0), float("inf"), edge)
    return ROUNDING_UNITS * torch.minimum((off * scale / peak).amin((1, 2)), edge.amin((1, 2)))
