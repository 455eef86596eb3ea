"""From logits to a token: greedy, or Gumbel noise keyed by (seed, position) after temperature, top-k, top-p and min-p.

Owns `SamplingParams` and `sample`. Must not know requests or text. The same seed and position always meet the same noise,
whatever shares the batch, so sampled output depends on a request alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.engine.errors import NonFiniteLogits


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ValueError(f"temperature must lie in 0..100, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in 0..1, got {self.min_p}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must lie in 0..2^64-1, got {self.seed}")


def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """float32 [size] Gumbel noise that depends on (seed, position) only."""
    uniform = np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64))).random(size)
    return torch.from_numpy(-np.log(-np.log(np.clip(uniform, 1e-300, 1 - 1e-16)))).float()


def filter_logits(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Logits divided by the temperature, -inf for what top-k, then top-p, then min-p leave out; one entry always stays."""
    scaled_V = logits_V.double() / params.temperature
    order_V = torch.sort(scaled_V, descending=True, stable=True).indices
    probs_V = torch.softmax(scaled_V, 0)[order_V]
    keep_V = torch.ones_like(probs_V, dtype=torch.bool)
    if params.top_k:
        keep_V[params.top_k :] = False
        probs_V = torch.where(keep_V, probs_V, 0.0)
        probs_V = probs_V / probs_V.sum()
    if params.top_p < 1:
        keep_V &= probs_V.cumsum(0) - probs_V < params.top_p
    if params.min_p > 0:
        keep_V &= probs_V >= params.min_p * probs_V[0]
    keep_V[0] = True
    return scaled_V.masked_fill(~torch.zeros_like(keep_V).scatter(0, order_V, keep_V), float("-inf"))


def sample(logits_V: Tensor, params: SamplingParams, position: int) -> int:
    """The token for `position` from float32 logits [V]. Equal logits: the lower id wins. Raises NonFiniteLogits."""
    if not bool(torch.isfinite(logits_V).all()):
        raise NonFiniteLogits(f"logits for position {position} are not finite; the request cannot go on")
    if params.temperature == 0:
        return int(logits_V.argmax())
    noisy_V = filter_logits(logits_V, params).cpu() + gumbel_noise(params.seed, position, len(logits_V)).double()
    return int(noisy_V.argmax())
