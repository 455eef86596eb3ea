"""One micro-batch's contribution to a step: losses, their scale, gradients, expert loads and figures.

Owns normalisation: token losses are summed and divided by the step's whole count, auxiliary losses by the number of
micro-batches. Must not know optimisers, schedules or files. Bug cases TRN-01, TRN-03, TRN-05.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.inventory import Storage
from kvist.train.network import Mode, Network, Outcome
from kvist.train.optimiser import Loads
from kvist.train.pieces import fused
from kvist.train.shapes import Batch, Geometry
from kvist.train.weights import working_weights

POSITION_BUCKETS = 8


@dataclass(frozen=True, kw_only=True)
class Share:
    """A micro-batch's part of its step: `count` counted tokens of the whole step, `parts` micro-batches on all devices."""

    count: float
    parts: int


@dataclass(kw_only=True)
class Figures:
    """Sums for the log, on the device: loss and tokens by tier [2, tiers] and by position [2, buckets], KL, recall."""

    by_tier: Tensor
    by_position: Tensor
    index_loss: Tensor
    recall: Tensor


def sequence_balance(chosen_NE: Tensor, scores_NE: Tensor, batch: int) -> Tensor:
    """Sequence-wise balance: mean over sequences of sum_e (load share times E/K) * (mean normalised score)."""
    chosen, scores = chosen_NE.float().unflatten(0, (batch, -1)), scores_NE.unflatten(0, (batch, -1))
    load = chosen.mean(1)
    load = load / load.sum(1, keepdim=True) * load.shape[1]
    return (load * (scores / scores.sum(2, keepdim=True)).mean(1)).sum(1).mean()


def contribute(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    storage: Mapping[str, Storage],
    geometry: Geometry,
    mode: Mode,
    batch: Batch,
    classes_V: Tensor | None,
    share: Share,
    loads: Loads,
    *,
    queries_n: Tensor | None,
    balance_weight: float = 1e-4,
) -> Figures:
    """Forward and backward of one micro-batch; gradients add up in the leaves."""
    used = working_weights(weights, storage, mode.dtype, quantise=mode.quantise)
    out = Network(config, used, geometry, mode, queries_n).run(batch, classes_V)
    assert out.losses_N is not None
    counted = batch.counted.flatten()
    total = (out.losses_N * counted).sum() / share.count
    if out.index_losses:
        total = total + torch.stack(list(out.index_losses.values())).mean() / share.parts
    balance = [
        fused(sequence_balance, geometry.device.type)(out.choices[prefix], out.router[prefix], geometry.batch)
        for prefix in out.choices
    ]
    total = total + balance_weight * torch.stack(balance).sum() / share.parts
    total.backward()
    for prefix, chosen in out.choices.items():
        loads.add(prefix, chosen, counted, None if batch.text is None else batch.text.flatten())
    return _figures(out, batch, geometry)


@torch.no_grad()
def _figures(out: Outcome, batch: Batch, geometry: Geometry) -> Figures:
    assert out.losses_N is not None
    losses = out.losses_N.detach().view(geometry.batch, geometry.length) * batch.counted
    counted = batch.counted.float()
    tiers = torch.nn.functional.one_hot(batch.tier, 4).float()
    by_tier = torch.stack([losses.sum(1) @ tiers, counted.sum(1) @ tiers])
    by_position = torch.stack([part.unflatten(1, (POSITION_BUCKETS, -1)).sum((0, 2)) for part in (losses, counted)])
    zero = losses.new_zeros(())
    index_loss = torch.stack(list(out.index_losses.values())).mean().detach() if out.index_losses else zero
    recall = torch.stack([r.mean() for r in out.recalls.values()]).mean() if out.recalls else zero
    return Figures(by_tier=by_tier, by_position=by_position, index_loss=index_loss, recall=recall)
