"""Values back to the codes of their stored format, exactly: what a model in memory needs to be packed into panels.

Must not know layers. A value that the format does not hold is refused by name: packing it would change the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.quant import (
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    quantise_fp4_weight,
    quantise_fp8_weight,
)

Codes = tuple[Tensor, Tensor]


class NotReleasedFormat(ValueError):
    """A weight whose values its released format cannot hold: packing would change the model."""


def bf16(weight: Tensor, name: str) -> Tensor:
    """The weight as bfloat16, if that holds it. Raises `NotReleasedFormat`."""
    short = weight.detach().bfloat16()
    if not torch.equal(short.float(), weight.detach().float()):
        raise NotReleasedFormat(f"{name} has values that bfloat16 cannot hold; the release stores it so")
    return short


def fp8_codes(weight: Tensor, name: str) -> Codes:
    """Codes and scales of values that FP8 with 32x32 scales holds exactly. Raises `NotReleasedFormat`."""
    codes, scales = quantise_fp8_weight(weight)
    if not torch.equal(dequantise_fp8_weight(codes, scales, torch.float32), weight.detach().float()):
        raise NotReleasedFormat(f"{name} has values that FP8 with a scale for 32 x 32 cannot hold; convert the checkpoint first")
    return codes, scales


def fp4_codes(weight: Tensor, name: str) -> Codes:
    """Codes and scales of values that FP4 with 1x32 scales holds exactly. Raises `NotReleasedFormat`."""
    codes, scales = quantise_fp4_weight(weight)
    if not torch.equal(dequantise_fp4_weight(codes, scales, torch.float32), weight.detach().float()):
        raise NotReleasedFormat(f"{name} has values that FP4 with a scale for 32 cannot hold; convert the checkpoint first")
    return codes, scales
