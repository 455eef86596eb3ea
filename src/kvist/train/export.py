"""Trained values into a checkpoint folder of the released format, cut into files of a given size, and back.

Must not know training; the formats are `kvist.checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvist.checkpoint import build_model, save_checkpoint
from kvist.config import ModelConfig
from kvist.model.block import Block
from kvist.model.numerics import Numerics
from kvist.train.weights import Weights, released, stacked

SHARD_BYTES = 12_500_000
"""Keeps every file of the shipped model below 16 MiB and the two of `nano` about equal."""


def export(
    config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Path | None, out: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write config.json, the tokenizer, that it is a base model, and the quantised weights; returns the weight files."""
    state = {name: value.detach().float().cpu() for name, value in released(weights, config).items()}
    return save_checkpoint(config, state, tokenizer, out, shard_bytes=shard_bytes, base=True)


def checkpoint_values(config: ModelConfig, folder: Path) -> Weights:
    """The values of a checkpoint as training holds them, float32 on the CPU. ValueError if it is of another configuration.

    They are what the formats kept; exporting them again keeps every value (tested;
    a scale may be half of what it was, with the codes to match).
    """
    # Nothing runs, so token classes do not matter.
    model = build_model(folder, numerics=Numerics(), engram="memory", classes=torch.zeros(config.vocab_size, dtype=torch.int64))
    if model.config != config:
        raise ValueError(f"{folder} holds another configuration than the one to be trained; name its config.json as the model")
    state = dict(model.state_dict())
    for layer in config.engram_layer_ids:
        block = model.layers[layer]
        assert isinstance(block, Block) and block.engram is not None and block.engram.reader is not None
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
        state[f"layers.{layer}.engram.embed.weight"] = block.engram.reader.rows(torch.arange(rows))
    return stacked(state)
