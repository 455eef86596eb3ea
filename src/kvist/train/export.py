"""Trained values into a checkpoint folder of the released format, cut into files of a given size.

Must not know training; the formats are `kvist.checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvist.checkpoint import save_checkpoint
from kvist.config import ModelConfig
from kvist.train.weights import released

SHARD_BYTES = 12_500_000
"""Keeps every file of the shipped model below 16 MiB and the two of `nano` about equal."""


def export(
    config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Path | None, out: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write config.json, the tokenizer and the quantised weights; returns the weight files."""
    state = {name: value.detach().float().cpu() for name, value in released(weights, config).items()}
    return save_checkpoint(config, state, tokenizer, out, shard_bytes=shard_bytes)
