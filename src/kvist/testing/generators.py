"""Seeded inputs that make quantisers and kernels go wrong: ties, their neighbours, floors, saturation, signed zeros.

Owns the kinds of rows and their mixture. Must not use the quantisers: inputs follow from the formats' numbers.
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

_E2M1_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)


def generator(seed: int) -> Generator:
    """A CPU random generator with this seed."""
    return torch.Generator().manual_seed(seed)


def _signs(dim: int, random: Generator) -> Tensor:
    return torch.randint(0, 2, (dim,), generator=random).to(torch.float32) * 2 - 1


def _power(low: int, high: int, random: Generator) -> float:
    return 2.0 ** int(torch.randint(low, high + 1, (1,), generator=random))


def _pick(values: Tensor, dim: int, random: Generator) -> Tensor:
    return values[torch.randint(0, len(values), (dim,), generator=random)]


def _normal(dim: int, random: Generator) -> Tensor:
    return torch.randn(dim, generator=random) * _power(-12, 12, random)


def _zeros(dim: int, random: Generator) -> Tensor:
    return torch.zeros(dim) * _signs(dim, random)


def _below_floors(dim: int, random: Generator) -> Tensor:
    return torch.randn(dim, generator=random) * _power(-140, -8, random)


def _huge(dim: int, random: Generator) -> Tensor:
    return torch.randn(dim, generator=random).clamp(-3, 3) * _power(8, 124, random)


def _spike(dim: int, random: Generator) -> Tensor:
    row = torch.randn(dim, generator=random) * 1e-3
    row[:: max(dim // 4, 1)] = _power(-6, 10, random)
    return row


def _e2m1_ties(dim: int, random: Generator) -> Tensor:
    """Values and midpoints of E2M1 times a power of two, a 6 in every 16 values, so that scales are exact."""
    row = _pick(torch.tensor(_E2M1_STEPS), dim, random)
    row[::16] = 6.0
    return row * _signs(dim, random) * _power(-9, 9, random)


def _e4m3_ties(dim: int, random: Generator) -> Tensor:
    """Five-bit significands over the whole exponent range of E4M3: values and midpoints, 448 present in every 32."""
    significand = torch.randint(16, 32, (dim,), generator=random).to(torch.float32)
    row = significand * torch.exp2(torch.randint(-16, 4, (dim,), generator=random).to(torch.float32))
    row[::32] = 448.0
    return row * _signs(dim, random) * _power(-9, 9, random)


def _neighbours(ties: Callable[[int, Generator], Tensor]) -> Callable[[int, Generator], Tensor]:
    """Rows of `ties` moved to the next float32 up or down (lost on the way to bfloat16, where ties stay ties)."""

    def rows(dim: int, random: Generator) -> Tensor:
        exact = ties(dim, random)
        moved = torch.nextafter(exact, exact * torch.where(_signs(dim, random) > 0, 2.0, 0.0))
        anchors = torch.arange(dim) % 16 == 0
        return torch.where(anchors, exact, moved)

    return rows


def _bit_patterns(dim: int, random: Generator) -> Tensor:
    bits = torch.randint(0, 1 << 32, (dim,), generator=random)
    values = (bits - (1 << 31)).to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), values, 0.0)


_ROW_KINDS: tuple[Callable[[int, Generator], Tensor], ...] = (
    _normal,
    _zeros,
    _below_floors,
    _huge,
    _spike,
    _e2m1_ties,
    _neighbours(_e2m1_ties),
    _e4m3_ties,
    _neighbours(_e4m3_ties),
    _bit_patterns,
)


def quantiser_rows(rows: int, dim: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Finite values [rows, dim] on CPU; rows take turns through all kinds of difficult input. Same seed, same bits."""
    random = generator(seed)
    made = [_ROW_KINDS[row % len(_ROW_KINDS)](dim, random) for row in range(rows)]
    values = torch.stack(made) if made else torch.empty(0, dim)
    converted = values.to(dtype)
    return torch.where(converted.isfinite(), converted, torch.zeros_like(converted))


def poisoned(x: Tensor, *, seed: int, fraction: float = 0.01) -> Tensor:
    """A copy of float x with about this fraction (at least one) of its values replaced by NaN or an infinity."""
    if not x.numel():
        return x.clone()
    random = generator(seed)
    count = max(1, round(fraction * x.numel()))
    where = torch.randperm(x.numel(), generator=random)[:count].to(x.device)
    bad = _pick(torch.tensor([float("nan"), float("inf"), float("-inf")]), count, random)
    flat = x.detach().clone().flatten()
    flat[where] = bad.to(dtype=x.dtype, device=x.device)
    return flat.reshape(x.shape)
