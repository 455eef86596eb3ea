"""The trained values: one flat dictionary of float32 leaves under released names, experts of a layer stacked.

Owns start values, the stacked form and its way back to released names, and the cast to what a step computes with.
Must not know layers' arithmetic or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.inventory import Parameter, Storage, parameters
from kvist.train.quantisers import quantised_weights

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")
Weights = dict[str, Tensor]


def stacked_name(name: str) -> str:
    """`layers.0.ffn.experts.3.w1.weight` -> `layers.0.ffn.experts.w1`; other names stay."""
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}.{match[3]}" if match else name


def storages(config: ModelConfig) -> dict[str, Storage]:
    """The stored format of every entry of the dictionary."""
    return {stacked_name(p.name): p.storage for p in parameters(config)}


def stacked(state: Mapping[str, Tensor]) -> Weights:
    """Released names -> the dictionary: experts of a layer as [E, out, in]."""
    lists: dict[str, list[Tensor]] = {}
    out: Weights = {}
    for name, value in state.items():
        match = _EXPERT.fullmatch(name)
        if match:
            lists.setdefault(f"{match[1]}.{match[3]}", []).append(value)
        else:
            out[name] = value
    return out | {name: torch.stack(values) for name, values in lists.items()}


def released(weights: Mapping[str, Tensor], config: ModelConfig) -> Weights:
    """The dictionary -> released names, in the order of the inventory."""
    out: Weights = {}
    for parameter in parameters(config):
        match = _EXPERT.fullmatch(parameter.name)
        held = weights[stacked_name(parameter.name)].detach()
        out[parameter.name] = held[int(match[2])] if match else held
    return out


def start_values(config: ModelConfig, seed: int) -> Weights:
    """Seeded start values, float32 on the CPU, not yet requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    return stacked({p.name: _start(config, p, generator) for p in parameters(config)})


def _start(config: ModelConfig, p: Parameter, generator: torch.Generator) -> Tensor:
    name, shape = p.name, p.shape
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return _mixing_base(config, 2 * p.layer + (".hc_ffn" in name))
    if name.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return torch.full(shape, 0.1)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.zeros(shape)
    noise = torch.nn.init.trunc_normal_(torch.empty(shape), std=1.0, a=-3, b=3, generator=generator)
    if name == "embed.weight":
        return noise * 0.5
    if p.storage is Storage.TABLE:
        return noise * 0.1
    if "markov_head" in name or name == "head.weight":
        return noise * 0.02
    # Outputs into the residual streams start small, so that depth adds little noise at first.
    small = 0.2 if name.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")) else 1.0
    return noise * (small / math.sqrt(shape[-1]))


def _mixing_base(config: ModelConfig, sublayer: int) -> Tensor:
    """Each sublayer reads mostly one stream, in turn; it writes to all with weight 1; streams mostly keep to themselves."""
    s = config.hc_mult
    pre = torch.full((s,), -3.0)
    pre[(sublayer + 1) % s] = 2.0
    return torch.cat([pre, torch.zeros(s), (4.0 * torch.eye(s)).flatten()])


def working_weights(
    weights: Mapping[str, Tensor], storage: Mapping[str, Storage], dtype: torch.dtype, *, quantise: bool
) -> Weights:
    """What a step computes with: matrices in `dtype`, through their stored formats if asked; vectors stay float32.

    Router, head and hyper-connection maps stay float32 too, as in the model.
    """
    used = quantised_weights(weights, storage) if quantise else dict(weights)
    return {name: value if _kept_wide(name, value) else value.to(dtype) for name, value in used.items()}


def _kept_wide(name: str, value: Tensor) -> bool:
    return value.dim() == 1 or name.endswith((".gate.weight", "_fn")) or name in ("head.weight",)
