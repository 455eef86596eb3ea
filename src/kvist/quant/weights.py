"""Stored weights: FP8 E4M3 with an E8M0 scale per 32x32 block, FP4 E2M1 with an E8M0 scale per row per 32 inputs.

Owns both directions and the rule for partial last blocks: block boundaries lie at multiples of 32 from index 0, always.
Must not know tensor names, files or linear layers. Source: reference facts, sections 7 and 13.
"""

import torch
from torch import Tensor

from kvist.quant.cache_formats import MXFP4_GROUP, pack_mxfp4
from kvist.quant.elements import (
    E4M3_MAX,
    as_bytes,
    decode_e2m1_pairs,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0,
    power_of_two_ceiling,
    reciprocal_f32,
)

WEIGHT_BLOCK = 32

# Keeps the scale of an all-zero block a normal float32; the release does not say what it does there.
_WEIGHT_AMAX_FLOOR = E4M3_MAX * 2.0**-126


def _blocks(size: int) -> int:
    return -(-size // WEIGHT_BLOCK)


def _check_matrix(weight: Tensor, name: str) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; expected a matrix [out, in]")


def _check_scale_shape(scale: Tensor, expected: tuple[int, int], shape: tuple[int, int]) -> None:
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"weight [out, in] = {list(shape)} needs scales of shape {list(expected)} "
            f"(blocks of {WEIGHT_BLOCK}, last one may be partial), got {list(scale.shape)}"
        )


def quantise_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float [o, i] -> float8_e4m3fn [o, i] and float8_e8m0fnu [ceil(o/32), ceil(i/32)].

    Scale = 2^ceil(log2(amax * (1/448))) of the block, so nothing saturates. A non-finite value makes its block NaN.
    """
    _check_matrix(weight, "weight")
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.detach().to(torch.float32), (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    blocks = padded.reshape(_blocks(rows), WEIGHT_BLOCK, _blocks(columns), WEIGHT_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp_min(_WEIGHT_AMAX_FLOOR)
    factors = power_of_two_ceiling(amax * reciprocal_f32(E4M3_MAX))
    scaled = blocks / factors[:, None, :, None]
    codes = encode_e4m3(scaled).flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return codes.view(torch.float8_e4m3fn), encode_e8m0(factors).view(torch.float8_e8m0fnu)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn [o, i] and E8M0 scales [ceil(o/32), ceil(i/32)] -> dtype [o, i].

    Scales are bytes: dtype float8_e8m0fnu and uint8 mean the same. Raises ValueError for other dtypes or shapes.
    """
    _check_matrix(weight, "weight")
    rows, columns = weight.shape
    codes, scale_bytes = as_bytes(weight, "weight"), as_bytes(scale, "scale")
    _check_scale_shape(scale_bytes, (_blocks(rows), _blocks(columns)), (rows, columns))
    factors = decode_e8m0(scale_bytes).repeat_interleave(WEIGHT_BLOCK, dim=1)[:, :columns]
    factors = factors.repeat_interleave(WEIGHT_BLOCK, dim=0)[:rows]
    return (decode_e4m3(codes) * factors).to(dtype)


def quantise_fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float [r, d], d a multiple of 32 -> float8_e4m3fn [r, d] and float8_e8m0fnu [r, d/32]: the rows of an Engram table.

    The scale rule of `quantise_fp8_weight` for each row and 32 channels; `unpack_fp8` is the inverse. Unlike the activation
    quantiser it has no floor at 1e-4, so that every stored row survives being read and written again.
    """
    _check_matrix(rows, "table")
    if rows.shape[1] % WEIGHT_BLOCK:
        raise ValueError(f"table rows have {rows.shape[1]} channels; scales need a multiple of {WEIGHT_BLOCK}")
    groups = rows.detach().to(torch.float32).unflatten(1, (-1, WEIGHT_BLOCK))
    amax = groups.abs().amax(dim=2).clamp_min(_WEIGHT_AMAX_FLOOR)
    factors = power_of_two_ceiling(amax * reciprocal_f32(E4M3_MAX))
    codes = encode_e4m3(groups / factors.unsqueeze(2)).flatten(1)
    return codes.view(torch.float8_e4m3fn), encode_e8m0(factors).view(torch.float8_e8m0fnu)


def quantise_fp4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float [o, i], i even -> int8 [o, i/2] (two E2M1 codes, even index low) and float8_e8m0fnu [o, ceil(i/32)].

    Scale rule of `pack_mxfp4`. A non-finite value makes its group NaN.
    """
    _check_matrix(weight, "weight")
    columns = weight.shape[1]
    if columns % 2:
        raise ValueError(f"FP4 weight has {columns} inputs; two codes share a byte, so the number must be even")
    padded = torch.nn.functional.pad(weight.detach().to(torch.float32), (0, -columns % MXFP4_GROUP))
    packed, scales = pack_mxfp4(padded)
    return packed[:, : columns // 2].contiguous().view(torch.int8), scales.view(torch.float8_e8m0fnu)


def dequantise_fp4_weight(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 or uint8 [o, i/2], E8M0 scales [o, ceil(i/32)] (float8_e8m0fnu or uint8, same meaning) -> dtype [o, i]."""
    _check_matrix(packed, "packed weight")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    codes, scale_bytes = as_bytes(packed, "packed weight"), as_bytes(scale, "scale")
    _check_scale_shape(scale_bytes, (rows, _blocks(columns)), (rows, columns))
    factors = decode_e8m0(scale_bytes).repeat_interleave(MXFP4_GROUP, dim=1)[:, :columns]
    return (decode_e2m1_pairs(codes) * factors).to(dtype)
