"""Numeric comparison of tensors, with the distinctions that matter here: signed zeros differ, NaNs are equal.

Tensors of any device go in, plain numbers come out. Must not know models or the tolerances of cases.
"""

import torch
from torch import Tensor

_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_shape(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape:
        raise ValueError(f"cannot compare shape {list(actual.shape)} with {list(expected.shape)}")
    return actual.detach(), expected.detach().to(actual.device)


def _differing(actual: Tensor, expected: Tensor) -> Tensor:
    """bool, the tensors' shape: where the bits differ, two NaNs of any payload counting as equal."""
    bits = _BITS_DTYPE[actual.element_size()]
    differing = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if actual.dtype.is_floating_point:
        differing &= ~(actual.to(torch.float32).isnan() & expected.to(torch.float32).isnan())
    return differing


def bit_equal(actual: Tensor, expected: Tensor) -> bool:
    """True if shape, dtype and every bit agree: -0 is not +0; NaN equals NaN whatever its payload. Real dtypes only."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return not bool(_differing(*_same_shape(actual, expected)).any())


def first_difference(actual: Tensor, expected: Tensor) -> str:
    """One line about the first element whose bits differ, or "equal"; for assertion messages."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {list(actual.shape)} against {expected.dtype} {list(expected.shape)}"
    actual, expected = _same_shape(actual, expected)
    where = _differing(actual, expected).nonzero()
    if not len(where):
        return "equal"
    index = tuple(where[0].tolist())
    got, wanted = actual[index].item(), expected[index].item()
    return f"{len(where)} of {actual.numel()} differ, first at {index}: {got!r}, expected {wanted!r}"


def max_abs(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in float64; 0 for empty tensors, NaN if a difference is NaN."""
    actual, expected = _same_shape(actual, expected)
    difference = (actual.double() - expected.double()).abs()
    return float(difference.max()) if difference.numel() else 0.0


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over all elements, in float64; 0 if both are 0, infinity if `expected` is."""
    actual, expected = _same_shape(actual, expected)
    error = float((actual.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / norm


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine of the angle between the flattened tensors, in float64; 1 if both are 0, 0 if only one is."""
    actual, expected = _same_shape(actual, expected)
    a, b = actual.double().flatten(), expected.double().flatten()
    norm_a, norm_b = float(a.norm()), float(b.norm())
    if norm_a == 0.0 or norm_b == 0.0:
        return 1.0 if norm_a == norm_b else 0.0
    return float((a / norm_a) @ (b / norm_b))
