"""Engram: hashed n-gram memory. Hashing of token classes, table lookup through a reader, gates on the four streams.

Must not know where table rows live (an `EngramReader` brings them) or what tokens mean (classes come from the tokenizer).
Report 2.4.2; facts section 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kvist.config import ModelConfig
from kvist.kernels.elementwise import sigmoid
from kvist.model.layers import QuantLinear
from kvist.model.numerics import Numerics


class EngramReader(Protocol):
    """Table rows of one Engram layer, dequantised."""

    def rows(self, ids: Tensor) -> Tensor:
        """int64 ids [...] -> values [..., engram_head_dim]. Raises a named error if they cannot be read."""
        ...

    def prefetch(self, ids: Tensor) -> None:
        """These rows will be asked for soon. Never waits and never fails; a reader with nothing to fetch ignores it."""
        ...


@dataclass(frozen=True, kw_only=True)
class HashPlan:
    """Moduli, row offsets and multipliers: `primes` and `offsets` int64 [layers, orders, heads], `multipliers` [layers, n]."""

    primes: np.ndarray
    offsets: np.ndarray
    multipliers: np.ndarray


def _is_prime(n: int) -> bool:
    if n < 2 or any(n % p == 0 and n != p for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)):
        return False
    odd, shift = n - 1, 0
    while odd % 2 == 0:
        odd, shift = odd // 2, shift + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, n)
        if base % n == 0 or x in (1, n - 1):
            continue
        for _ in range(shift - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=16)
def hash_plan(config: ModelConfig) -> HashPlan:
    """Consecutive unused primes from `engram_vocab_size` up, and multipliers seeded by the layer index. Pure integers."""
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    layers = config.engram_layer_ids
    primes: list[int] = []
    candidate = config.engram_vocab_size
    while len(primes) < len(layers) * orders * heads:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    table = np.array(primes, dtype=np.int64).reshape(len(layers), orders, heads)
    ends = table.reshape(len(layers), -1).cumsum(1)
    offsets = (ends - table.reshape(len(layers), -1)).reshape(table.shape)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = np.stack(
        [
            np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, np.int64) * 2 + 1
            for layer in layers
        ]
    )
    return HashPlan(primes=table, offsets=offsets, multipliers=multipliers)


def hash_rows(config: ModelConfig, classes_T: Tensor, text_T: Tensor, pad_class: int, start: int = 0) -> Tensor:
    """Table rows of positions start..T-1 of one sequence: int64 [layers, T - start, columns].

    `classes_T` int64 classes of all tokens from position 0; `text_T` bool, False inside an image span. A place before
    position 0 or inside an image, and everything further back, counts as the pad class. Raises ValueError for classes
    outside the compressed vocabulary.
    """
    if classes_T.shape != text_T.shape or text_T.dtype != torch.bool:
        raise ValueError(f"text mask must be bool of shape {tuple(classes_T.shape)}, got {text_T.dtype} {tuple(text_T.shape)}")
    size = config.engram_compressed_vocab_size
    if classes_T.numel() and not 0 <= int(classes_T.min()) <= int(classes_T.max()) < size:
        raise ValueError(f"token classes must lie in 0..{size - 1}, got {int(classes_T.min())}..{int(classes_T.max())}")
    plan, n = hash_plan(config), config.engram_max_ngram_size
    primes, offsets, multipliers = (
        torch.from_numpy(a).to(classes_T.device) for a in (plan.primes, plan.offsets, plan.multipliers)
    )
    at_N = torch.arange(start, len(classes_T), device=classes_T.device)
    open_N = torch.ones(len(at_N), dtype=torch.bool, device=classes_T.device)
    mixed_LN: Tensor | None = None
    columns = []
    for back in range(n):
        place_N = (at_N - back).clamp_min(0)
        open_N = open_N & (at_N >= back) & text_T[place_N]
        term_LN = torch.where(open_N, classes_T[place_N], pad_class) * multipliers[:, back : back + 1]
        mixed_LN = term_LN if mixed_LN is None else mixed_LN ^ term_LN
        if back:
            rest_LNX = mixed_LN.unsqueeze(2) % primes[:, back - 1].unsqueeze(1)
            columns.append(rest_LNX + offsets[:, back - 1].unsqueeze(1))
    return torch.cat(columns, 2)


def engram_gate(x_NSD: Tensor, key_NSD: Tensor, weight_SD: Tensor, text_N: Tensor, eps: float) -> Tensor:
    """Gates [N,S] in float32; 0 at image positions. Raises ValueError unless the mask is bool of length N."""
    if text_N.dtype != torch.bool or text_N.shape != x_NSD.shape[:1]:
        raise ValueError(f"text mask must be bool of shape {tuple(x_NSD.shape[:1])}, got {text_N.dtype} {tuple(text_N.shape)}")
    x, key = x_NSD.float(), key_NSD.float()
    dot_NS = (x * weight_SD * key).sum(2)
    dot_NS = dot_NS * torch.rsqrt(x.square().mean(2) + eps) * torch.rsqrt(key.square().mean(2) + eps) * x.shape[2] ** -0.5
    gate_NS = sigmoid(torch.copysign(dot_NS.abs().clamp_min(1e-6).sqrt(), dot_NS))
    return gate_NS * text_N.unsqueeze(1)


class Engram(nn.Module):
    """One Engram layer: gathered rows -> a key for each stream and one value, added through the gates."""

    reader: EngramReader | None

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.reader = config, None
        self.wkv = QuantLinear(config.engram_columns * config.engram_head_dim, (config.hc_mult + 1) * config.dim, numerics)
        self.q_weight = nn.Parameter(torch.ones(config.hc_mult, config.dim))
        self.k_weight = nn.Parameter(torch.ones(config.hc_mult, config.dim))

    def forward(self, x_NSD: Tensor, ids_NX: Tensor, text_N: Tensor) -> Tensor:
        """Streams [N,S,D] and table rows [N,columns] -> streams with the memory added where the gates open."""
        if not len(ids_NX):
            return x_NSD
        gate_NS, value_N1D = self.gates(x_NSD, ids_NX, text_N)
        return (x_NSD.float() + gate_NS.unsqueeze(2) * value_N1D.float()).to(x_NSD.dtype)

    def gates(self, x_NSD: Tensor, ids_NX: Tensor, text_N: Tensor) -> tuple[Tensor, Tensor]:
        """How far each stream opens to the memory, float32 [N,S] in 0..1, and what the memory says [N,1,D]."""
        if self.reader is None:
            raise ValueError("this Engram layer has no table reader; attach one before running the model")
        found_NX = self.reader.rows(ids_NX).to(x_NSD.dtype).flatten(1)
        kv_NSD = self.wkv(found_NX).unflatten(1, (self.config.hc_mult + 1, self.config.dim))
        weight_SD = self.q_weight.float() * self.k_weight.float()
        return engram_gate(x_NSD, kv_NSD[:, :-1], weight_SD, text_N, self.config.norm_eps), kv_NSD[:, -1:]
