"""The released quantisers in a form that a compiler can fuse, straight-through: values of `kvist.quant`, gradients of 1.

Owns fused activation and cache formats, and the weight formats for many matrices at once. Must not know layers.
Equality with `kvist.quant` is tested; facts section 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvist.inventory import BLOCK, Storage
from kvist.quant import (
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    quantise_fp4_weight,
    quantise_fp8_rows,
    quantise_fp8_weight,
    straight_through,
    unpack_fp8,
)

_EXPONENT = 0x7F800000
_BELOW_TWO = 2.0 - 2.0**-23


def _power_ceiling(value: Tensor) -> Tensor:
    """Smallest power of two >= value, float32 (normal numbers only)."""
    return ((value * _BELOW_TWO).view(torch.int32) & _EXPONENT).view(torch.float32)


def _round_e2m1(value: Tensor) -> Tensor:
    magnitude = value.abs().clamp_max(6.0)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, value)


def _pass_gradient(x: Tensor, rounded: Tensor) -> Tensor:
    # The sum rounds back to the representable value: its distance from it is far below the last bit of the format.
    return x + (rounded.to(x.dtype) - x).detach()


def fp8(x: Tensor) -> Tensor:
    """`kvist.quant.fake_fp8`, straight-through."""
    groups = x.detach().float().unflatten(-1, (-1, 32))
    scale = _power_ceiling(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448.0))
    return _pass_gradient(x, ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2))


def mxfp4(x: Tensor) -> Tensor:
    """`kvist.quant.fake_mxfp4`, straight-through."""
    groups = x.detach().float().unflatten(-1, (-1, 32))
    scale = _power_ceiling(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * (1 / 6.0))
    return _pass_gradient(x, (_round_e2m1(groups / scale) * scale).flatten(-2))


def main_fp4(x: Tensor) -> Tensor:
    """`kvist.quant.fake_main_fp4`, straight-through."""
    groups = x.detach().float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (amax / 6.0).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    return _pass_gradient(x, (_round_e2m1(groups / scale) * scale).flatten(-2))


def _through_fp8(blocks: Tensor) -> Tensor:
    return dequantise_fp8_weight(*quantise_fp8_weight(blocks), blocks.dtype)


def _through_fp4(groups: Tensor) -> Tensor:
    return dequantise_fp4_weight(*quantise_fp4_weight(groups), groups.dtype)


def _through_rows(rows: Tensor) -> Tensor:
    codes, scales = quantise_fp8_rows(rows)
    return unpack_fp8(codes, scales, rows.dtype)


def _fp8_all(weights: Sequence[Tensor]) -> list[Tensor]:
    """Blocks of all matrices in one column of 32x32 blocks: a few launches instead of a few for each matrix."""
    tiles = [w.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).reshape(-1, BLOCK) for w in weights]
    rounded = straight_through(_through_fp8, torch.cat(tiles)).split([len(tile) for tile in tiles])
    return [
        part.view(w.shape[0] // BLOCK, w.shape[1] // BLOCK, BLOCK, BLOCK).transpose(1, 2).reshape(w.shape)
        for part, w in zip(rounded, weights, strict=True)
    ]


def _rows_all(weights: Sequence[Tensor], fn: object) -> list[Tensor]:
    flat = torch.cat([w.reshape(-1, BLOCK) for w in weights])
    through = _through_fp4 if fn is Storage.FP4 else _through_rows
    parts = straight_through(through, flat).split([w.numel() // BLOCK for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]


def quantised_weights(weights: Mapping[str, Tensor], storage: Mapping[str, Storage]) -> dict[str, Tensor]:
    """The named weights as their stored formats hold them, straight-through. Both sides of a matrix: multiples of 32."""
    out = dict(weights)
    for kind in (Storage.FP8, Storage.FP4, Storage.TABLE):
        names = [name for name in weights if storage[name] is kind]
        if not names:
            continue
        chosen = [weights[name] for name in names]
        bad = [n for n, w in zip(names, chosen, strict=True) if w.shape[-1] % BLOCK or (kind is Storage.FP8 and len(w) % BLOCK)]
        if bad:
            raise ValueError(f"{bad[0]} has shape {list(weights[bad[0]].shape)}; training in formats needs multiples of {BLOCK}")
        out |= zip(names, _fp8_all(chosen) if kind is Storage.FP8 else _rows_all(chosen, kind), strict=True)
    return out
