"""A model whose weights of one token are many times the cache: the roles of `nano` at larger widths, random packed weights.

Owns the configuration, the weights and the count of bytes that a decode step must read. Must not know how it is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.config import ModelConfig, replace
from kvist.kernels.experts import PackedBank
from kvist.kernels.native import Packed, pack_fp4, packed_fp4_bytes
from kvist.model.block import Block
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset


def wide() -> ModelConfig:
    """Six layers in all four roles, 1.1 GB of weights a token; no Engram, no drafts."""
    return replace(
        preset("nano"),
        dim=4096,
        n_layers=6,
        n_heads=32,
        head_dim=128,
        q_lora_rank=1024,
        o_lora_rank=512,
        o_groups=4,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layers=(1, 3),
        index_source_layers=(1, 3, 5),
        candidate_source_layers=(3,),
        index_n_heads=8,
        moe_inter_dim=2048,
        n_routed_experts=12,
        n_activated_experts=6,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
    )


def _triple(config: ModelConfig, random: torch.Generator) -> tuple[Packed, Packed, Packed]:
    d, f = config.dim, config.moe_inter_dim
    parts = []
    for outputs, inputs in ((f, d), (d, f), (f, d)):
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
        scales = torch.randint(118, 121, (outputs, inputs // 32), generator=random, dtype=torch.uint8)
        parts.append(pack_fp4(codes, scales))
    return parts[0], parts[1], parts[2]


def _short(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Values that bfloat16 holds, as every stored format's are."""
    values = torch.empty(shape).uniform_(-1, 1, generator=random)
    return values.mul_(shape[-1] ** -0.5).bfloat16().float()


def wide_model(seed: int = 1) -> Transformer:
    """Random weights: experts as FP4 codes, the rest as values."""
    config, random = wide(), torch.Generator().manual_seed(seed)
    model = Transformer(config, Numerics(impl="cpu"), own_experts=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(_short(parameter.shape, random))
            elif name.endswith(("norm.weight", "_scale")):
                parameter.fill_(1.0)
            else:
                parameter.zero_()
    model.attach_experts(
        {layer: PackedBank([_triple(config, random) for _ in range(config.n_routed_experts)]) for layer in range(config.n_layers)}
    )
    return model


def active_bytes(model: Transformer) -> float:
    """Bytes of one token's weights in memory: two a value (four where values are float32 by nature), FP4 experts packed."""
    c = model.config
    total = float(c.n_activated_experts * 3 * packed_fp4_bytes(c.moe_inter_dim, c.dim) * c.n_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.startswith("embed"):
            total += parameter.numel() * (4 if ".hc_" in name else 2)
    return total


def is_whole(model: Transformer) -> bool:
    """Whether every block runs as one call."""
    return all(isinstance(block, Block) and block.servable for block in model.layers)
