"""The small parts every mechanism is built from: RMSNorm, linear layers with the released numerics, rotary tables.

Must not know attention, experts or caches. Facts sections 2, 3 and 7.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from kvist.config import LayerSpec, ModelConfig
from kvist.kernels.linear import linear
from kvist.kernels.rms_norm import rms_norm
from kvist.model.numerics import Numerics


class RMSNorm(nn.Module):
    """x * rsqrt(mean x^2 + eps) * weight in float32, rounded once to the dtype of x. `impl`: see `kernels.rms_norm`."""

    def __init__(self, width: int, eps: float, impl: str = "ref") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.impl = eps, impl

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, impl=self.impl)


class Linear(nn.Module):
    """An unquantised linear layer without bias. `wide` ones are kept and computed in float32 (gate, head, compressor)."""

    def __init__(self, inputs: int, outputs: int, numerics: Numerics, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32 if wide else numerics.dtype))
        self.numerics, self.wide = numerics, wide

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]; float32 if `wide`."""
        weight = self.weight.float() if self.wide else self.weight.to(x.dtype)
        impl = self.numerics.wide_impl if self.wide else self.numerics.product_impl
        return linear(x.float() if self.wide else x, weight, impl=impl)


class QuantLinear(nn.Module):
    """A linear layer stored in FP8 32x32 whose input is quantised to FP8 per row and 32 channels.

    In memory the weight is dequantised: an FP8 value times a power of two is exact in bfloat16 and float32, so the
    product equals the released one up to the order of sums.
    """

    def __init__(self, inputs: int, outputs: int, numerics: Numerics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=numerics.dtype))
        self.numerics = numerics

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs] in the dtype of x."""
        weight = self.numerics.fp8_weight(self.weight).to(x.dtype)
        return linear(x, weight, form=self.numerics.activation_form, impl=self.numerics.product_impl)

    def product(self, quantised: Tensor) -> Tensor:
        """The product alone, for callers that share one quantised input."""
        weight = self.numerics.fp8_weight(self.weight).to(quantised.dtype)
        return linear(quantised, weight, quantised=self.numerics.quantise, impl=self.numerics.product_impl)


def embedding(rows: int, width: int, dtype: torch.dtype) -> nn.Embedding:
    """An embedding whose values are given later. Torch would draw random ones, which takes it seconds of imports on the
    meta device."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, dtype=dtype))


def inverse_frequencies(config: ModelConfig, spec: LayerSpec) -> Tensor:
    """Rotary frequencies of one layer, float32 [rope_head_dim / 2]; YaRN for every layer with a ratio (facts section 3).

    Layers with equal frequencies get the same tensor, so that a batch computes their table once. Do not write to it.
    """
    return _frequencies(config, spec.rope_theta, spec.yarn)


@lru_cache(maxsize=64)
def _frequencies(config: ModelConfig, theta: float, yarn: bool) -> Tensor:
    width = config.rope_head_dim
    # The device is named because modules may be created on the meta device, where values do not exist.
    freq = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
    if not yarn:
        return freq

    def correction(rotations: float) -> float:
        turns = config.original_seq_len / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(config.beta_fast)), 0)
    high = min(math.ceil(correction(config.beta_slow)), width - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return freq / config.rope_factor * ramp + freq * (1 - ramp)


def rotary_table(positions_N: Tensor, freq_P: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of float32(position) * frequency, the product itself rounded to float32. Each [N, P]."""
    angle_NP = positions_N.float().unsqueeze(1) * freq_P
    return angle_NP.cos(), angle_NP.sin()
