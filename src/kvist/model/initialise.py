"""A model with random weights, for tests, benchmarks and figures: every mechanism does something, nothing is trained.

Weights of stored formats hold values those formats represent exactly, so that a save and a load change no bit.
Must not know training (which has its own start values) or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.model.block import Block
from kvist.model.layers import QuantLinear
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.quant import (
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    fake_fp8,
    quantise_fp4_weight,
    quantise_fp8_weight,
)


class TableInMemory:
    """An Engram table as plain values [rows, width]."""

    def __init__(self, values_RX: Tensor) -> None:
        self.values_RX = values_RX

    def rows(self, ids: Tensor) -> Tensor:
        """See `EngramReader`."""
        return self.values_RX[ids]

    def prefetch(self, ids: Tensor) -> None:
        """All rows are here already."""


def random_model(config: ModelConfig, numerics: Numerics, seed: int = 0) -> Transformer:
    """A model of any configuration with seeded random weights and in-memory Engram tables, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size | tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    model = Transformer(config, numerics)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start_value(name, normal(parameter.shape, 1.0)))
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                module.weight.copy_(_representable(module.weight.float(), "experts" in name and "shared" not in name))
    classes = torch.arange(config.vocab_size) % max(1, config.engram_compressed_vocab_size)
    readers = {}
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        block = model.layers[layer]
        assert isinstance(block, Block)
        values = fake_fp8(normal((rows, config.engram_head_dim), 0.5)).to(numerics.dtype)
        readers[layer] = TableInMemory(values)
    if readers:
        model.attach_engram(classes, readers)
    return model.requires_grad_(False)


def start_value(name: str, noise: Tensor) -> Tensor:
    """Standard normal noise of a parameter's shape -> its value: of a size that lets every mechanism matter."""
    leaf = name.rsplit(".", 2)[-2:]
    if "norm" in leaf[0] or leaf[-1] in ("q_weight", "k_weight"):
        return (1 + 0.1 * noise).bfloat16().float()
    if leaf[-1].endswith("_scale"):
        return 1 + 0.1 * noise
    if leaf[-1].startswith("hc_") and leaf[-1].endswith("_fn"):
        return noise * noise.shape[-1] ** -0.5
    if noise.dim() == 1:
        return 0.3 * noise
    return (noise * noise.shape[-1] ** -0.5 * (4.0 if "embed" in name else 1.0)).bfloat16().float()


def _representable(weight: Tensor, fp4: bool) -> Tensor:
    if fp4:
        return dequantise_fp4_weight(*quantise_fp4_weight(weight), torch.float32)
    return dequantise_fp8_weight(*quantise_fp8_weight(weight), torch.float32)
