"""Element codecs: E4M3, E8M0 and E2M1, each between float32 values and bytes.

Owns the meaning of single codes and the packing of two E2M1 codes into a byte.
Must not know groups, scale rules, rows or weights.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_ONE_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_F32_EXPONENT_MASK = 0x7F800000
_F32_MANTISSA_BITS = 23

# Constants of the hot path are zero-dimensional tensors: eager torch spends about a microsecond on wrapping a number.
_JUST_BELOW_TWO = torch.tensor(2.0 - 2.0**-23, dtype=torch.float32, device="cpu")
_TWO_TO_22 = torch.tensor(2.0**22, dtype=torch.float32, device="cpu")
_EXPONENT_MASK = torch.tensor(_F32_EXPONENT_MASK, dtype=torch.int32, device="cpu")
# Below this many elements the cast from float8 costs less than the extra calls of a table look-up.
_LOOK_UP_FROM = 2048


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """Reinterpret a one-byte tensor as uint8 without copying: codes and scales are bytes under any dtype a file gives.

    Raises ValueError for wider dtypes: a scale that became a float or an int64 has lost its meaning as a byte.
    """
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype not in _ONE_BYTE_DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ONE_BYTE_DTYPES)
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected raw bytes in one of: {accepted}")
    return tensor.view(torch.uint8)


def encode_e4m3(value: Tensor) -> Tensor:
    """float32 [...] -> E4M3 codes u8 [...]: nearest, ties to even code, at most +-448; sign of zero and NaN kept."""
    # The clamp is ours because torch versions differ in what an out-of-range cast gives (NaN or 448).
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """E4M3 codes u8 [...] -> float32 [...], exact; 0x7F and 0xFF are NaN, there are no infinities."""
    if code.device.type == "cpu" and code.numel() >= _LOOK_UP_FROM:
        return _look_up(_E4M3_VALUES, code)
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def power_of_two_ceiling(value: Tensor) -> Tensor:
    """float32 [...] from 2^-126 up -> smallest power of two >= value, float32 [...]; infinity and NaN give infinity.

    Modifies its argument.
    """
    # Times the float just below 2, any mantissa but 1.0 carries into the exponent; cutting the mantissa then is "ceil".
    # No logarithm, hence nothing to round, and NaN becomes the exponent 255, which is the NaN of E8M0.
    return value.mul_(_JUST_BELOW_TWO).view(torch.int32).bitwise_and_(_EXPONENT_MASK).view(torch.float32)


def reciprocal_f32(value: float) -> Tensor:
    """1 / value as a float32 scalar tensor: the release multiplies by such constants; dividing would round otherwise."""
    return torch.tensor(1.0 / value, dtype=torch.float32, device="cpu")


def encode_e8m0(power: Tensor) -> Tensor:
    """float32 powers of two [...] (infinity allowed) -> E8M0 bytes u8 [...]: the biased exponent, 255 for infinity."""
    return (power.view(torch.int32) >> _F32_MANTISSA_BITS).to(torch.uint8)


def decode_e8m0(byte: Tensor) -> Tensor:
    """E8M0 bytes u8 [...] -> float32 [...] = 2^(byte - 127), exact for every byte; 255 is NaN."""
    exponent = byte.to(torch.int32)
    # Byte 0 is a float32 subnormal (2^-127) and byte 255 a NaN: in both the top mantissa bit is all that is missing.
    edge = ((exponent == 0) | (exponent == 255)).to(torch.int32) << (_F32_MANTISSA_BITS - 1)
    return ((exponent << _F32_MANTISSA_BITS) | edge).view(torch.float32)


def _e2m1_magic(magnitude: Tensor) -> Tensor:
    """The float32 power of two whose unit in the last place is the E2M1 step at `magnitude` (0.5, 1 or 2)."""
    return magnitude.clamp_min(1.0).view(torch.int32).bitwise_and_(_EXPONENT_MASK).view(torch.float32).mul_(_TWO_TO_22)


def round_e2m1(value: Tensor) -> Tensor:
    """float32 [...] -> nearest E2M1 value, float32 [...]: ties to even code, at most +-6; sign of zero and NaN kept.

    Adding and subtracting a large power of two lets the float32 adder do the rounding: all bits below the step count
    (no sticky bit can be lost) and a tie goes to the even multiple of the step, which is the even code.
    """
    magnitude = value.abs().clamp_max_(E2M1_MAX)
    magic = _e2m1_magic(magnitude)
    return torch.copysign((magnitude + magic).sub_(magic), value)


def encode_e2m1(value: Tensor) -> Tensor:
    """float32 [...] -> E2M1 codes u8 [...] (0..15, bit 3 is the sign), rounded as `round_e2m1`. NaN gives any code."""
    magnitude = value.abs().clamp_max_(E2M1_MAX)
    magic = _e2m1_magic(magnitude)
    steps = (magnitude + magic).view(torch.int32) & 7
    # In [2^e, 2^(e+1)) the value is steps * 2^(e-1) with steps 2 or 3 (0 to 3 if e = 0), and its code is steps + 2e.
    exponent = (magic.view(torch.int32) >> _F32_MANTISSA_BITS) - (127 + 22)
    sign = (value.view(torch.int32) >> 28) & 8
    return (((steps + 2 * exponent) & 7) | sign).to(torch.uint8)


def _e2m1_values(code: Tensor) -> Tensor:
    """E2M1 codes of any integer type [...] (0..15) -> float32 [...]: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    wide = code.to(torch.int32)
    magnitude = wide & 7
    halves = torch.where(magnitude < 2, magnitude, (2 | (magnitude & 1)) << ((magnitude >> 1) - 1).clamp_min(0))
    return torch.where(wide > 7, -0.5, 0.5) * halves.to(torch.float32)


def pack_nibbles(code: Tensor) -> Tensor:
    """Codes u8 [..., d] (0..15, d even) -> bytes u8 [..., d/2]; the even index lies in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes u8 [..., d/2] -> codes u8 [..., d]; the inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_e2m1_pairs(packed: Tensor) -> Tensor:
    """Bytes u8 [..., d/2], two E2M1 codes each -> float32 values [..., d], even index from the low nibble."""
    if packed.device.type == "cpu":
        return _look_up(_E2M1_PAIRS, packed).view(torch.float32)
    return _e2m1_values(unpack_nibbles(packed))


# On CPU a gather from 256 entries is several times faster than converting float8 or taking E2M1 apart.
_ALL_BYTES = torch.arange(256, dtype=torch.uint8, device="cpu")
_E4M3_VALUES = _ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float32)
_E2M1_PAIRS = _e2m1_values(unpack_nibbles(_ALL_BYTES[:, None])).view(torch.int64).flatten()


def _look_up(table: Tensor, byte: Tensor) -> Tensor:
    return table.index_select(0, byte.reshape(-1).to(torch.int32)).view(byte.shape)
