"""The three group formats of activations and cache rows: fp8, mxfp4 and main_fp4, each as fake, pack and unpack.

Owns the scale rules (floors, rounding) and the promise that fake(x) == unpack(pack(x)) bit for bit.
Must not know rows of bytes, weights, pages or the model. Source: reference facts, section 11.

Common to all functions: x is float32 or bfloat16 [..., d], d a multiple of the group; arithmetic is float32; results
carry no gradient (see `straight_through`). Non-finite input: one NaN or infinity in a group makes the stored scale the
NaN of its format and the whole dequantised group NaN, so that a broken value is never hidden by saturation; the codes
of such a group mean nothing. Finite values near 2^128 may round up to infinity when dequantised.
"""

import torch
from torch import Tensor

from kvist.quant.elements import (
    E2M1_MAX,
    E4M3_MAX,
    as_bytes,
    decode_e2m1_pairs,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e8m0,
    pack_nibbles,
    power_of_two_ceiling,
    reciprocal_f32,
    round_e2m1,
)

FP8_GROUP = 32
MXFP4_GROUP = 32
MAIN_FP4_GROUP = 16

FP8_AMAX_FLOOR = 1e-4
MXFP4_AMAX_FLOOR = 6 * 2.0**-126
MAIN_FP4_AMAX_FLOOR = 6 * 2.0**-9

_FP8_RECIPROCAL = reciprocal_f32(E4M3_MAX)
_MXFP4_RECIPROCAL = reciprocal_f32(E2M1_MAX)

_VALUE_DTYPES = (torch.float32, torch.bfloat16)


def _to_groups(x: Tensor, group: int) -> Tensor:
    """x [..., d] -> float32 [..., d/group, group], detached."""
    if x.dtype not in _VALUE_DTYPES:
        raise ValueError(f"cannot quantise dtype {x.dtype}; convert to float32 or bfloat16 first")
    size = x.shape[-1] if x.dim() else 0
    if size % group or not x.dim():
        raise ValueError(f"last dimension is {size}, not a multiple of the group size {group}; pad it with zeros")
    return _split_groups(x.detach().to(torch.float32), group)


def _split_groups(values: Tensor, group: int) -> Tensor:
    """[..., d] -> [..., d/group, group]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group)


def _from_groups(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [..., groups, group] -> dtype [..., d]."""
    if dtype not in _VALUE_DTYPES:
        raise ValueError(f"cannot dequantise to {dtype}; ask for float32 or bfloat16")
    flat = values.flatten(-2)
    return flat if dtype == torch.float32 else flat.to(dtype)


def _check_scales(size: int, scales: Tensor, codes: Tensor, group: int) -> None:
    expected = (*codes.shape[:-1], size // group)
    if size % group or tuple(scales.shape) != expected:
        raise ValueError(
            f"codes for {size} values in groups of {group} need scales of shape {expected}, got {tuple(scales.shape)}"
        )


def _group_amax(groups: Tensor) -> Tensor:
    """float32 [..., groups, group] -> largest magnitude [..., groups, 1]; NaN wins."""
    return groups.abs().amax(dim=-1, keepdim=True)


def _power_scale(groups: Tensor, floor: float, reciprocal: Tensor) -> Tensor:
    """float32 [..., groups, 1] = 2^ceil(log2(max(amax, floor) * reciprocal)); infinity if the group is not finite."""
    return power_of_two_ceiling(_group_amax(groups).clamp_min_(floor).mul_(reciprocal))


def fake_fp8(x: Tensor) -> Tensor:
    """Round x [..., d] to FP8 E4M3 with one power-of-two scale per 32 values; same shape and dtype.

    Used for linear activations and window KV. amax floor 1e-4. Raises ValueError if d is not a multiple of 32.
    """
    groups = _to_groups(x, FP8_GROUP)
    scale = _power_scale(groups, FP8_AMAX_FLOOR, _FP8_RECIPROCAL)
    # No clamp: the scale is at least amax / 448 up to rounding, so quotients stay below 464, where a cast may overflow.
    elements = decode_e4m3((groups / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    return _from_groups(elements.mul_(scale), x.dtype)


def pack_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] -> E4M3 codes u8 [..., d] and E8M0 scale bytes u8 [..., d/32]; rounding as `fake_fp8`."""
    groups = _to_groups(x, FP8_GROUP)
    scale = _power_scale(groups, FP8_AMAX_FLOOR, _FP8_RECIPROCAL)
    codes = (groups / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), encode_e8m0(scale).squeeze(-1)


def unpack_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes [..., d] and E8M0 scales [..., d/32] (bytes, or their float8 views) -> values dtype [..., d].

    Also reads the rows of an Engram table. Raises ValueError if the shapes do not belong together.
    """
    code_bytes, scale_bytes = as_bytes(codes, "codes"), as_bytes(scales, "scales")
    _check_scales(code_bytes.shape[-1], scale_bytes, code_bytes, FP8_GROUP)
    groups = _split_groups(decode_e4m3(code_bytes), FP8_GROUP)
    return _from_groups(groups * decode_e8m0(scale_bytes).unsqueeze(-1), dtype)


def fake_mxfp4(x: Tensor) -> Tensor:
    """Round x [..., d] to E2M1 with one power-of-two scale per 32 values; same shape and dtype.

    Used for index queries and keys. amax floor 6 * 2^-126. Raises ValueError if d is not a multiple of 32.
    """
    groups = _to_groups(x, MXFP4_GROUP)
    scale = _power_scale(groups, MXFP4_AMAX_FLOOR, _MXFP4_RECIPROCAL)
    return _from_groups(round_e2m1(groups / scale).mul_(scale), x.dtype)


def pack_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] -> packed E2M1 u8 [..., d/2] (even index low) and E8M0 scale bytes u8 [..., d/32]."""
    groups = _to_groups(x, MXFP4_GROUP)
    scale = _power_scale(groups, MXFP4_AMAX_FLOOR, _MXFP4_RECIPROCAL)
    codes = encode_e2m1(groups / scale).flatten(-2)
    return pack_nibbles(codes), encode_e8m0(scale).squeeze(-1)


def unpack_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed E2M1 [..., d/2] and E8M0 scales [..., d/32] -> values dtype [..., d]. ValueError if shapes disagree."""
    packed_bytes, scale_bytes = as_bytes(packed, "packed codes"), as_bytes(scales, "scales")
    _check_scales(2 * packed_bytes.shape[-1], scale_bytes, packed_bytes, MXFP4_GROUP)
    groups = _split_groups(decode_e2m1_pairs(packed_bytes), MXFP4_GROUP)
    return _from_groups(groups * decode_e8m0(scale_bytes).unsqueeze(-1), dtype)


def _main_fp4_scale(groups: Tensor) -> Tensor:
    """E4M3 scales float8_e4m3fn [..., groups, 1]: max(amax, floor) / 6 to nearest, at most 448; NaN if not finite."""
    amax = _group_amax(groups)
    scale = (amax.clamp_min(MAIN_FP4_AMAX_FLOOR) / E2M1_MAX).clamp_max(E4M3_MAX)
    return scale.masked_fill(amax == torch.inf, torch.nan).to(torch.float8_e4m3fn)


def fake_main_fp4(x: Tensor) -> Tensor:
    """Round x [..., d] to E2M1 with one E4M3 scale per 16 values (true divisions, clamp to 6); same shape and dtype.

    Used for main compressed KV. amax floor 6 * 2^-9; values above 2688 saturate. ValueError if d is no multiple of 16.
    """
    groups = _to_groups(x, MAIN_FP4_GROUP)
    scale = _main_fp4_scale(groups).to(torch.float32)
    return _from_groups(round_e2m1(groups / scale).mul_(scale), x.dtype)


def pack_main_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] -> packed E2M1 u8 [..., d/2] (even index low) and E4M3 scale bytes u8 [..., d/16]."""
    groups = _to_groups(x, MAIN_FP4_GROUP)
    scale = _main_fp4_scale(groups)
    codes = encode_e2m1(groups / scale.to(torch.float32)).flatten(-2)
    return pack_nibbles(codes), scale.view(torch.uint8).squeeze(-1)


def unpack_main_fp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed E2M1 [..., d/2] and E4M3 scales [..., d/16] -> values dtype [..., d]. ValueError if shapes disagree."""
    packed_bytes, scale_bytes = as_bytes(packed, "packed codes"), as_bytes(scales, "scales")
    _check_scales(2 * packed_bytes.shape[-1], scale_bytes, packed_bytes, MAIN_FP4_GROUP)
    groups = _split_groups(decode_e2m1_pairs(packed_bytes), MAIN_FP4_GROUP)
    return _from_groups(groups * decode_e4m3(scale_bytes).unsqueeze(-1), dtype)
