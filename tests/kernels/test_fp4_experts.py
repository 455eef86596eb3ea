"""Products with FP4 weights that stay packed, and experts that come in portions: the bits of the unpacked, whole sum."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from kvist.kernels.experts import ResidentBank, experts
from kvist.kernels.native import library, native_or_none, pack, pack_fp4, packed_fp4_bytes
from kvist.quant import dequantise_fp4_weight
from kvist.testing import bit_equal

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")


def codes_and_scales(outputs: int, inputs: int, seed: int, low: int = 118, high: int = 126):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (outputs, inputs // 2), generator=generator, dtype=torch.int8)
    scales = torch.randint(low, high, (outputs, -(-inputs // 32)), generator=generator, dtype=torch.uint8)
    return codes, scales


class Bank(ResidentBank):
    """Experts of random FP4 codes, packed as FP4 or as the values they stand for."""

    def __init__(self, width: int, hidden: int, *, fp4: bool, **scales: int) -> None:
        self.sizes, self.fp4, self.scales = (width, hidden), fp4, scales

    def expert(self, index: int):
        d, f = self.sizes
        three = []
        for part, shape in enumerate([(f, d), (d, f), (f, d)]):
            codes, scales = codes_and_scales(*shape, seed=3 * index + part, **self.scales)
            three.append(pack_fp4(codes, scales) if self.fp4 else pack(dequantise_fp4_weight(codes, scales, torch.float32)))
        return tuple(three)


class Portioned:
    """The same experts, a few at a time."""

    def __init__(self, bank: ResidentBank, size: int) -> None:
        self.bank, self.size = bank, size

    def portions(self, ids: Sequence[int]):
        runs = [ids[start : start + self.size] for start in range(0, len(ids), self.size)]
        return [nullcontext([(index, self.bank.expert(index)) for index in run]) for run in runs]


def batch(rows: int, width: int, chosen: int = 3, count: int = 7):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).bfloat16().float()
    ids = torch.stack([torch.randperm(count, generator=generator)[:chosen].sort().values for _ in range(rows)])
    ids[1::4, 2] = -1
    return x, ids, torch.rand(rows, chosen, generator=generator)


# Widths beyond a panel of 16, a scale group, four groups; outputs that are no multiple of 16.
@pytest.mark.parametrize(("width", "hidden"), [(32, 32), (64, 96), (160, 40), (288, 72), (2080, 48)])
@pytest.mark.parametrize("rows", [1, 3, 4, 37])
@pytest.mark.parametrize("form", [None, "fp8"])
def test_packed_fp4_has_the_bits_of_its_values(width: int, hidden: int, rows: int, form: str | None) -> None:
    x, ids, weights = batch(rows, width)
    options = {"limit": 2.0, "form": form if hidden % 32 == 0 else None, "impl": "cpu"}
    expected = experts(x, ids, weights, Bank(width, hidden, fp4=False), **options)
    assert expected.abs().max() > 0
    assert bit_equal(experts(x, ids, weights, Bank(width, hidden, fp4=True), **options), expected)


@pytest.mark.parametrize(("low", "high"), [(0, 3), (1, 250), (248, 252)])
def test_extreme_scales(low: int, high: int) -> None:
    """Subnormal and huge values expand as they dequantise."""
    first, second = codes_and_scales(48, 96, 5, low, high), codes_and_scales(96, 48, 6)
    x, ids, weights = batch(5, 96, 3, 3)
    results = []
    for bank in (
        Same(pack_fp4(*first), pack_fp4(*second)),
        Same(*(pack(dequantise_fp4_weight(*codes, torch.float32)) for codes in (first, second))),
    ):
        results.append(experts(x * 1e-30, ids, weights, bank, limit=3.0e38, form=None, impl="cpu"))
    assert bool(results[0].isfinite().all())
    assert bit_equal(*results)


@pytest.mark.parametrize(("low", "high"), [(97, 158), (96, 158), (97, 159), (60, 190), (127, 128)])
@pytest.mark.parametrize("power", [0, 39, 45, -38, -60])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9])
def test_sums_in_units_of_a_scale_round_as_before(low: int, high: int, power: int, rows: int) -> None:
    """Rows that pass as pairs: scales and rows inside the range of the short way, at its border and beyond."""
    codes, scales = codes_and_scales(80, 320, 5, low, high)
    x, _, _ = batch(rows, 320)
    x = (x * 2.0**power).bfloat16().float()
    x[:, ::7] = 0
    sums = []
    native = native_or_none()
    assert native is not None
    for weight in (pack_fp4(codes, scales), pack(dequantise_fp4_weight(codes, scales, torch.float32))):
        sums.append(torch.empty(rows, 80))
        native.kvist_linear(x.data_ptr(), rows, 1, 320, weight.pointer, weight.kind, 80, sums[-1].data_ptr(), -1, True, 1)
    assert bool((sums[1] != 0).any())
    assert bit_equal(*sums)


class Same(ResidentBank):
    """Every expert the same, gate and up alike."""

    def __init__(self, wide, narrow) -> None:
        self.wide, self.narrow = wide, narrow

    def expert(self, index: int):
        return self.wide, self.narrow, self.wide


def test_a_nan_scale_poisons_its_own_outputs_only() -> None:
    class Poisoned(ResidentBank):
        def expert(self, index: int):
            first, third = codes_and_scales(32, 64, 1), codes_and_scales(32, 64, 2)
            codes, scales = codes_and_scales(64, 32, 3)
            scales[7] = 255
            return pack_fp4(*first), pack_fp4(codes, scales), pack_fp4(*third)

    x, _, weights = batch(2, 64)
    out = experts(x, torch.zeros(2, 3, dtype=torch.int64), weights, Poisoned(), limit=2.0, form=None, impl="cpu")
    assert bool(out[:, 7].isnan().all())
    assert int(out.isnan().sum()) == 2


@pytest.mark.parametrize("impl", ["cpu", "ref", "rows16"])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_portions_do_not_change_a_sum(impl: str, size: int) -> None:
    bank = Values(64, 96)
    x, ids, weights = batch(19, 64)
    for shared in (None, bank.expert(99)):
        options = {"limit": 1.5, "form": "fp8", "shared": shared, "impl": impl}
        whole = experts(x, ids, weights, bank, **options)
        assert bit_equal(experts(x, ids, weights, Portioned(bank, size), **options), whole)


class Values(ResidentBank):
    """Experts as plain tensors, made once (the operator packs a tensor as long as it lives)."""

    def __init__(self, width: int, hidden: int) -> None:
        self.sizes, self.made = (width, hidden), {}

    def expert(self, index: int):
        if index not in self.made:
            d, f = self.sizes
            self.made[index] = tuple(
                dequantise_fp4_weight(*codes_and_scales(*shape, seed=3 * index + part), torch.float32)
                for part, shape in enumerate([(f, d), (d, f), (f, d)])
            )
        return self.made[index]


@pytest.mark.parametrize("impl", ["cpu", "ref"])
@pytest.mark.parametrize("rows", [0, 4])
def test_no_expert_chosen(impl: str, rows: int) -> None:
    bank = Values(64, 96)
    x, none, weights = torch.ones(rows, 64), torch.full((rows, 2), -1), torch.ones(rows, 2)
    options = {"limit": 1.5, "form": "fp8", "impl": impl}
    assert bit_equal(experts(x, none, weights, bank, **options), torch.zeros(rows, 64))
    only_shared = experts(x, none, weights, bank, shared=bank.expert(0), **options)
    chosen = experts(x, none * 0, torch.ones(rows, 2) / 2, bank, **options) if rows else only_shared
    assert only_shared.shape == chosen.shape == (rows, 64)


def test_packed_bytes_are_little_more_than_the_stored_ones() -> None:
    for outputs, inputs in ((2304, 5120), (5120, 2304)):
        codes, scales = codes_and_scales(outputs, inputs, 0)
        assert pack_fp4(codes, scales).data.nbytes == packed_fp4_bytes(outputs, inputs)
        assert packed_fp4_bytes(outputs, inputs) <= 1.001 * (codes.nbytes + scales.nbytes)


def test_scales_of_another_shape_are_refused() -> None:
    codes, scales = codes_and_scales(16, 64, 0)
    with pytest.raises(ValueError, match=r"need a scale for every 16 bytes of a row, got \[16, 1\]"):
        pack_fp4(codes, scales[:, :1])
