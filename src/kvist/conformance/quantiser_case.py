"""A `quantisers` case: byte codes, scales, stored weights and quantised linear layers against `kvist.quant`.

Must not know models. Goldens README, 'quantisers'; facts section 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import functional as F

from kvist import quant
from kvist.conformance.case import Case, limit
from kvist.conformance.check import Check, judged, row_cosine, row_max_abs
from kvist.conformance.errors import CaseError

CACHE_FORMATS = {
    "fp8": (quant.fake_fp8, quant.pack_fp8, quant.unpack_fp8),
    "mxfp4": (quant.fake_mxfp4, quant.pack_mxfp4, quant.unpack_mxfp4),
    "main_fp4": (quant.fake_main_fp4, quant.pack_main_fp4, quant.unpack_main_fp4),
}
STORED = {"fp8": quant.dequantise_fp8_weight, "fp4": quant.dequantise_fp4_weight}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def quantiser_checks(case: Case) -> Iterator[Check]:
    """Every recorded tensor of the case once; a name this runner does not know fails."""
    known: set[str] = set()
    for kind in CACHE_FORMATS:
        for dt in DTYPES:
            if f"{kind}.{dt}/x" in case.inputs:
                yield from _cache_format(case, kind, dt, known)
    for kind in STORED:
        if f"weight_{kind}/weight" in case.inputs:
            yield from _stored_weight(case, kind, known)
    yield from unknown_tensors(case, known)


def unknown_tensors(case: Case, known: set[str]) -> Iterator[Check]:
    """A failed line for recorded tensors that nothing was compared with."""
    left = sorted(set(case.expected) - known)
    if left:
        yield judged(
            "recorded tensors", False, f"this runner knows no tensor called {', '.join(map(repr, left[:5]))} ({len(left)} in all)"
        )


def pattern_limits(case: Case, name: str) -> dict[str, float]:
    """The limits of `tolerances.all` whose pattern (a list of globs, comma-separated) matches a tensor's name."""
    for patterns, limits in case.limits("all").items():
        if any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(",")):
            if not isinstance(limits, dict):
                raise CaseError(f"{case.folder / 'case.json'}: tolerances.all[{patterns!r}] must be an object, got {limits!r}")
            return {key: limit(value, f"{patterns}.{key}") for key, value in limits.items() if key != "note"}
    return {}


def same_bits(name: str, got: Tensor, want: Tensor) -> Check:
    """Equality bit for bit: -0 is not 0 in a format that keeps the sign."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return judged(name, False, f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    differing = int((got.contiguous().view(bits) != want.contiguous().view(bits)).sum())
    largest = row_max_abs(got.reshape(1, -1), want.reshape(1, -1)).item() if want.numel() else 0.0
    return judged(name, differing == 0, f"{differing} of {want.numel()} values differ", max_abs=largest)


def _recorded(case: Case, name: str, known: set[str]) -> Tensor:
    known.add(name)
    if name not in case.expected:
        raise CaseError(f"{case.folder / 'expected.safetensors'} lacks the tensor {name!r}")
    return case.expected[name]


def _cache_format(case: Case, kind: str, dt: str, known: set[str]) -> Iterator[Check]:
    fake, pack, unpack = CACHE_FORMATS[kind]
    x = case.inputs[f"{kind}.{dt}/x"]
    if x.dtype != DTYPES[dt]:
        raise CaseError(f"{case.folder / 'inputs.safetensors'}: {kind}.{dt}/x has dtype {x.dtype}, its name says {DTYPES[dt]}")
    codes, scales = pack(x)
    values, kept = unpack(codes, scales, torch.float32), fake(x)
    want = _recorded(case, f"{kind}.{dt}/dequantised", known)
    yield same_bits(f"exact {kind}.{dt}/codes", codes.cpu(), _recorded(case, f"{kind}.{dt}/codes", known))
    yield same_bits(f"exact {kind}.{dt}/scales", scales.cpu(), _recorded(case, f"{kind}.{dt}/scales", known))
    yield same_bits(f"exact {kind}.{dt}/dequantised", values.cpu(), want)
    yield same_bits(f"exact {kind}.{dt}/in place", kept.cpu(), want.to(x.dtype))


def _stored_weight(case: Case, kind: str, known: set[str]) -> Iterator[Check]:
    packed, scale = (_input(case, f"weight_{kind}/{part}") for part in ("weight", "scale"))
    weight = STORED[kind](packed, scale, torch.float32)
    if f"weight_{kind}/dequantised" in case.expected:
        want = _recorded(case, f"weight_{kind}/dequantised", known)
        yield same_bits(f"exact weight_{kind}/dequantised", weight.cpu(), want)
    for dt, dtype in DTYPES.items():
        name = f"linear_{kind}/y.{dt}"
        if name in case.expected:
            x = quant.fake_fp8(_input(case, "linear/x").to(dtype))
            # Products summed in float64: what is judged is the meaning, not the order of a sum.
            y = F.linear(x.double(), weight.double()).to(dtype)
            yield _linear(case, name, y.cpu(), _recorded(case, name, known))


def _linear(case: Case, name: str, got: Tensor, want: Tensor) -> Check:
    if got.shape != want.shape or got.dtype != want.dtype:
        return judged(name, False, f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
    errors = {
        "max_abs": (row_max_abs(got, want) / want.double().abs().amax(1).clamp_min(1e-300)).max().item(),
        "max_bf16_steps": float((_ordered(got) - _ordered(want)).abs().max()),
    }
    limits = pattern_limits(case, name)
    ok = all(name in errors and errors[name] <= bound for name, bound in limits.items()) if limits else None
    text = ", ".join(f"{key} {errors[key]:.2g}; limit {bound:g}" if key in errors else key for key, bound in limits.items())
    cosine = row_cosine(got, want).min().item()
    return judged(name, ok, text or "no limit", max_abs=row_max_abs(got, want).max().item(), cosine=cosine)


def _ordered(x: Tensor) -> Tensor:
    """Rank of a bfloat16 among its kind, so that neighbours differ by one and -0 equals +0."""
    bits = x.bfloat16().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _input(case: Case, name: str) -> Tensor:
    if name not in case.inputs:
        raise CaseError(f"{case.folder / 'inputs.safetensors'} lacks the tensor {name!r}")
    return case.inputs[name]
