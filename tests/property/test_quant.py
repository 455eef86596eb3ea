"""Properties of the quantisers over generated inputs: storage equals fake quantisation, idempotence, error and scale bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvist.quant as q
from kvist.testing import first_difference, quantiser_rows

FORMATS = {
    "fp8": (q.fake_fp8, q.pack_fp8, q.unpack_fp8, 32, q.WINDOW_ENTRY),
    "mxfp4": (q.fake_mxfp4, q.pack_mxfp4, q.unpack_mxfp4, 32, q.INDEX_KEY),
    "main_fp4": (q.fake_main_fp4, q.pack_main_fp4, q.unpack_main_fp4, 16, q.MAIN_ENTRY),
}
every_format = pytest.mark.parametrize("kind", FORMATS)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**31)


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """[rows, d], some of its values replaced by arbitrary finite float32 numbers that hypothesis can shrink."""
    dtype = draw(dtypes)
    x = quantiser_rows(draw(st.integers(1, 12)), 32 * draw(st.integers(1, 4)), seed=draw(seeds), dtype=dtype).clone()
    chosen = draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
    flat = x.view(-1)
    flat[: len(chosen)] = torch.tensor(chosen[: flat.numel()], dtype=torch.float32).to(dtype)
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


def scale_values(kind: str, scales: Tensor) -> Tensor:
    return q.decode_e4m3(scales) if kind == "main_fp4" else q.decode_e8m0(scales)


@every_format
@settings(max_examples=60, deadline=None)
@given(x=inputs())
def test_packed_storage_equals_fake_quantisation_bit_for_bit(kind, x):
    fake, pack, unpack, _, row_format = FORMATS[kind]
    expected = fake(x)
    assert expected.dtype == x.dtype
    assert first_difference(unpack(*pack(x), x.dtype), expected) == "equal"
    assert first_difference(row_format.from_bytes(row_format.to_bytes(x), x.dtype), expected) == "equal"


@every_format
@settings(max_examples=60, deadline=None)
@given(x=inputs())
def test_bfloat16_loses_nothing_that_the_codes_hold(kind, x):
    fake, *_ = FORMATS[kind]
    x = x.to(torch.bfloat16)
    x = torch.where(x.isfinite() & (x.abs() < 2.0**126), x, torch.zeros_like(x))
    # Subnormal results of mxfp4 have fewer bits in bfloat16, so the scale is kept away from its floor.
    x = torch.where(x.abs() < 2.0**-100, torch.zeros_like(x), x)
    assert first_difference(fake(x).to(torch.float32), fake(x.to(torch.float32))) == "equal"


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@settings(max_examples=60, deadline=None)
@given(x=inputs())
def test_power_of_two_formats_are_idempotent(kind, x):
    fake, *_ = FORMATS[kind]
    once = fake(torch.where(x.abs() < 2.0**120, x, torch.zeros_like(x)))
    assert first_difference(fake(once), once) == "equal"


@every_format
@settings(max_examples=60, deadline=None)
@given(x=inputs())
def test_codes_are_idempotent_under_their_own_scale(kind, x):
    """Dividing stored values by their scale gives the stored codes back: what a reader of the bytes relies on."""
    _, pack, unpack, group, _ = FORMATS[kind]
    x = torch.where(x.abs() < 2.0**120, x, torch.zeros_like(x))
    codes, scales = pack(x)
    values = unpack(codes, scales, torch.float32).reshape(*scales.shape, group)
    quotients = (values / scale_values(kind, scales)[..., None]).flatten(-2)
    again = q.encode_e4m3(quotients) if kind == "fp8" else q.pack_nibbles(q.encode_e2m1(quotients))
    assert first_difference(again, codes) == "equal"


@every_format
@settings(max_examples=60, deadline=None)
@given(x=inputs())
def test_scale_and_error_bounds(kind, x):
    fake, pack, _, group, _ = FORMATS[kind]
    x = torch.where(x.abs() < 2.0**120, x, torch.zeros_like(x)).to(torch.float32)
    top, floor = {"fp8": (448.0, 1e-4), "mxfp4": (6.0, 6 * 2.0**-126), "main_fp4": (6.0, 6 * 2.0**-9)}[kind]
    groups = x.reshape(*x.shape[:-1], -1, group).double()
    amax = groups.abs().amax(dim=-1).clamp_min(floor)
    scale = scale_values(kind, pack(x)[1]).double()
    relative = scale * top / amax
    if kind == "main_fp4":
        capped = torch.minimum(amax, torch.tensor(2688.0, dtype=torch.float64))
        # E4M3 keeps four significant bits, and three or fewer below 2^-6, where half a step is 2^-10.
        assert bool(((scale - capped / 6).abs() <= torch.maximum(capped / 6 * 2.0**-4, torch.tensor(2.0**-10))).all())
        assert bool((scale >= 2.0**-9).all())
    else:
        assert bool((relative > 1 - 2.0**-22).all())
        assert bool((relative < 2 + 2.0**-21).all())
    error = (fake(x).double().reshape(groups.shape) - groups).abs()
    half_step = {"fp8": (2.0**-4, 2.0**-10), "mxfp4": (0.25, 0.25), "main_fp4": (0.25, 0.25)}[kind]
    bound = torch.maximum(groups.abs() * half_step[0], scale[..., None] * half_step[1])
    clipped = (groups.abs() - scale[..., None] * top).clamp_min(0)
    assert bool((error <= torch.maximum(bound, clipped) * (1 + 2.0**-20)).all())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 70), half_columns=st.integers(1, 40), seed=seeds)
def test_stored_weights_requantise_to_the_same_values(rows, half_columns, seed):
    weight = quantiser_rows(rows, 2 * half_columns, seed=seed).clamp(-(2.0**100), 2.0**100)
    for quantise, dequantise in (
        (q.quantise_fp8_weight, q.dequantise_fp8_weight),
        (q.quantise_fp4_weight, q.dequantise_fp4_weight),
    ):
        once = dequantise(*quantise(weight), torch.float32)
        # A block whose largest value rounds down to half the range gets a finer scale the second time; nothing is lost.
        assert first_difference(dequantise(*quantise(once), torch.float32), once) == "equal"
