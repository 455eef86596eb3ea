"""Number formats against independent tables and hand-worked values; the failures of other projects as named cases.

The tables here are computed from the bit fields in plain Python and share nothing with the implementation.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

import kvist.quant as q
from kvist.quant.elements import _e2m1_values
from kvist.testing import bit_equal, first_difference, poisoned, quantiser_rows

E2M1_TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
FORMATS = {
    "fp8": (q.fake_fp8, q.pack_fp8, q.unpack_fp8, 32),
    "mxfp4": (q.fake_mxfp4, q.pack_mxfp4, q.unpack_mxfp4, 32),
    "main_fp4": (q.fake_main_fp4, q.pack_main_fp4, q.unpack_main_fp4, 16),
}
FAKES = {name: functions[0] for name, functions in FORMATS.items()}


def e4m3_value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_TABLE = [e4m3_value(byte) for byte in range(256)]


def all_bytes() -> Tensor:
    return torch.arange(256, dtype=torch.uint8)


def nearest_code(value: float, table: list[float]) -> int:
    """Code of the nearest non-negative entry, the even code at a tie; doubles hold all quantities here exactly."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - value), code % 2))


def neighbours(values: list[float]) -> Tensor:
    """Each value with the float32 below and above it."""
    exact = torch.tensor(values)
    down, up = torch.nextafter(exact, torch.tensor(-1e9)), torch.nextafter(exact, torch.tensor(1e9))
    return torch.cat((exact, down, up))


# --- E4M3


def test_e4m3_decodes_all_256_bytes():
    assert first_difference(q.decode_e4m3(all_bytes()), torch.tensor(E4M3_TABLE)) == "equal"


def test_e4m3_table_decoding_equals_the_cast_used_on_gpu():
    many = all_bytes().repeat(16)  # long enough for the table
    assert bit_equal(q.decode_e4m3(many), many.view(torch.float8_e4m3fn).to(torch.float32))
    assert bit_equal(q.decode_e4m3(many)[:256], q.decode_e4m3(all_bytes()))


def test_e4m3_codes_return_to_themselves():
    codes = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    assert bit_equal(q.encode_e4m3(q.decode_e4m3(codes)), codes)


def test_e4m3_rounds_every_midpoint_and_its_neighbours():
    positive = E4M3_TABLE[:127]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(positive)]
    values = neighbours(middles)
    wanted = torch.tensor([nearest_code(value, positive) for value in values.tolist()], dtype=torch.uint8)
    assert bit_equal(q.encode_e4m3(values), wanted)
    assert bit_equal(q.encode_e4m3(-values), wanted | 0x80)


def test_e4m3_saturates_and_keeps_the_sign_of_zero():
    values = torch.tensor([448.0, 463.9, 464.0, 465.0, 1e30, torch.inf, -465.0, -torch.inf, 0.0, -0.0, -1e-9])
    wanted = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x00, 0x80, 0x80]
    assert q.encode_e4m3(values).tolist() == wanted
    assert q.encode_e4m3(torch.tensor([torch.nan])).item() & 0x7F == 0x7F


# --- E8M0


def test_e8m0_decodes_all_256_bytes():
    wanted = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
    assert first_difference(q.decode_e8m0(all_bytes()), wanted) == "equal"


# --- E2M1


def test_e2m1_decodes_both_nibbles_of_every_byte():
    wanted = torch.tensor([[E2M1_TABLE[byte & 15], E2M1_TABLE[byte >> 4]] for byte in range(256)])
    assert first_difference(q.decode_e2m1_pairs(all_bytes()[:, None]), wanted) == "equal"


def test_e2m1_arithmetic_decoding_used_on_gpu_equals_the_table():
    assert bit_equal(_e2m1_values(torch.arange(16, dtype=torch.uint8)), torch.tensor(E2M1_TABLE))


def test_e2m1_all_16_codes_return_to_themselves():
    assert q.encode_e2m1(torch.tensor(E2M1_TABLE)).tolist() == list(range(16))
    assert bit_equal(q.round_e2m1(torch.tensor(E2M1_TABLE)), torch.tensor(E2M1_TABLE))


def test_qnt_02_no_low_bit_is_lost_next_to_a_midpoint():
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    values = neighbours(middles)
    wanted = torch.tensor([nearest_code(value, E2M1_TABLE[:8]) for value in values.tolist()], dtype=torch.uint8)
    assert wanted[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]  # the even code of each pair
    assert wanted[14] == 1  # 0.25000003 is 0.5, not 0
    assert wanted[7] == 0
    for sign, bit in ((1, 0), (-1, 8)):
        assert bit_equal(q.encode_e2m1(sign * values), wanted | bit)
        assert bit_equal(q.round_e2m1(sign * values), sign * torch.tensor(E2M1_TABLE)[wanted.int()])


def test_e2m1_saturates_and_keeps_the_sign_of_zero():
    values = torch.tensor([6.0, 6.5, 7.0, 1e38, torch.inf, -7.0, -torch.inf, -0.0, -0.1, -1e-40])
    assert q.encode_e2m1(values).tolist() == [7, 7, 7, 7, 7, 15, 15, 8, 8, 8]
    assert bit_equal(q.round_e2m1(values), torch.tensor([6.0, 6, 6, 6, 6, -6, -6, -0.0, -0.0, -0.0]))
    assert q.round_e2m1(torch.tensor([torch.nan])).isnan().all()


def test_even_index_lies_in_the_low_nibble():
    packed = q.pack_nibbles(torch.tensor([[1, 2, 3, 12]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0xC3]]
    assert q.unpack_nibbles(packed).tolist() == [[1, 2, 3, 12]]


# --- group formats


def group_of(amax: float, size: int, rest: float = 0.0) -> Tensor:
    group = torch.full((size,), rest)
    group[3] = amax
    return group


@pytest.mark.parametrize(
    ("values", "scale_byte", "code", "value"),
    [
        (torch.zeros(16), 0x01, 0, 0.0),
        (-torch.zeros(16), 0x01, 8, -0.0),
        (torch.full((16,), 0.0058), 0x01, 5, 3 * 2.0**-9),
        (group_of(0.0003, 16), 0x01, 0, 0.0),
        (group_of(-0.0003, 16), 0x01, 8, -0.0),
        (group_of(0.0117, 16), 0x01, 7, 6 * 2.0**-9),
        (group_of(2688.0, 16), 0x7E, 7, 2688.0),
        (group_of(3000.0, 16), 0x7E, 7, 2688.0),
        (group_of(3e38, 16), 0x7E, 7, 2688.0),
    ],
)
def test_qnt_04_scale_floor_and_saturation_of_the_main_entry(values, scale_byte, code, value):
    packed, scales = q.pack_main_fp4(values)
    assert scales.tolist() == [scale_byte]
    assert q.unpack_nibbles(packed)[3].item() == code
    restored = q.unpack_main_fp4(packed, scales, torch.float32)
    assert bit_equal(restored[3], torch.tensor(value))
    assert bit_equal(q.fake_main_fp4(values), restored)


def test_qnt_04_subnormal_scales_decode_as_subnormals():
    scales = torch.tensor([[0x01], [0x07], [0x08], [0x7E], [0x7F]], dtype=torch.uint8)
    packed = torch.full((5, 8), 0x22, dtype=torch.uint8)  # every code is 1.0
    values = q.unpack_main_fp4(packed, scales, torch.float32)[:, 0]
    assert bit_equal(values, torch.tensor([2.0**-9, 7 * 2.0**-9, 2.0**-6, 448.0, math.nan]))


def test_main_entry_scale_is_a_true_division_by_6():
    """Just below six times a midpoint of E4M3, a product with float32(1/6) rounds up to it; a division does not."""
    amax = torch.nextafter(torch.tensor(6 * 9.5 * 2.0**-9), torch.tensor(0.0))
    assert q.pack_main_fp4(group_of(amax.item(), 16))[1].tolist() == [9]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(0.0, 105), (1e-4, 105), (448.0, 127), (448.001, 128), (224.0, 126), (896.0, 128), (1e30, 127 + 91)],
)
def test_fp8_scale_is_the_power_of_two_at_or_above_amax_over_448(amax, byte):
    assert q.pack_fp8(group_of(amax, 32))[1].tolist() == [byte]


@pytest.mark.parametrize(("amax", "byte"), [(0.0, 1), (1e-45, 1), (6.0, 127), (6.000001, 128), (3.0, 126), (12.0, 128)])
def test_mxfp4_scale_is_the_power_of_two_at_or_above_amax_over_6(amax, byte):
    assert q.pack_mxfp4(group_of(amax, 32))[1].tolist() == [byte]


def reference_scale(kind: str, amax: float) -> float:
    """The scale rules in double precision, float32 rounding made explicit; independent of bit tricks."""

    def f32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()

    if kind == "main_fp4":
        quotient = f32(max(amax, 6 * 2.0**-9) / 6)
        positive = E4M3_TABLE[:127]
        return positive[nearest_code(min(quotient, 448.0), positive)]
    floor, top = {"fp8": (f32(1e-4), 448.0), "mxfp4": (6 * 2.0**-126, 6.0)}[kind]
    product = f32(max(amax, floor) * f32(1 / top))
    mantissa, exponent = math.frexp(product)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_agree_with_a_plain_python_quantiser(kind, dtype):
    fake, group = FAKES[kind], FORMATS[kind][3]
    x = quantiser_rows(60, 64, seed=11, dtype=dtype)
    positive = E4M3_TABLE[:127] if kind == "fp8" else E2M1_TABLE[:8]
    wanted = []
    for values in x.float().reshape(-1, group).tolist():
        scale = reference_scale(kind, max(abs(value) for value in values))
        for value in values:
            quotient = torch.tensor(abs(value) / scale, dtype=torch.float64).to(torch.float32).item()
            magnitude = positive[nearest_code(min(quotient, positive[-1]), positive)] * scale
            wanted.append(math.copysign(magnitude, value))
    expected = torch.tensor(wanted, dtype=torch.float64).to(torch.float32).reshape(x.shape).to(dtype)
    assert first_difference(fake(x), expected) == "equal"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_non_finite_value_makes_its_group_nan_and_no_other(kind):
    fake, pack, unpack, group = FORMATS[kind]
    clean = quantiser_rows(40, 128, seed=3)
    x = poisoned(clean, seed=4, fraction=0.005)
    finite = x.reshape(40, -1, group).isfinite().all(dim=-1)
    result, expected = fake(x).reshape(40, -1, group), fake(clean).reshape(40, -1, group)
    assert not bool(finite.all())
    assert bool(result[~finite].isnan().all())
    assert bit_equal(result[finite], expected[finite])
    scales = pack(x)[1]
    assert bool((scales[~finite] == (0x7F if kind == "main_fp4" else 0xFF)).all())
    assert bit_equal(unpack(*pack(x), torch.float32), fake(x))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_size_that_is_no_multiple_of_the_group_is_refused_by_name(kind):
    fake, pack, unpack, group = FORMATS[kind]
    for function in (fake, pack):
        with pytest.raises(ValueError, match=f"is {group + 8}, not a multiple of the group size {group}"):
            function(torch.zeros(2, group + 8))
        with pytest.raises(ValueError, match=r"torch\.float16"):
            function(torch.zeros(2, group, dtype=torch.float16))
        with pytest.raises(ValueError, match="is 0"):
            function(torch.tensor(1.0))
    codes, scales = pack(torch.zeros(2, 4 * group))
    with pytest.raises(ValueError, match="need scales of shape"):
        unpack(codes, scales[:, :2], torch.float32)
    with pytest.raises(ValueError, match=r"scales has dtype torch\.float32"):
        unpack(codes, scales.float(), torch.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_empty_strided_and_many_dimensional_inputs(kind):
    fake, pack, unpack, group = FORMATS[kind]
    assert fake(torch.zeros(0, 64)).shape == (0, 64)
    assert unpack(*pack(torch.zeros(0, 64)), torch.float32).shape == (0, 64)
    x = quantiser_rows(24, 128, seed=5)
    strided = x.reshape(4, 6, 128).transpose(0, 1)
    assert bit_equal(fake(strided), fake(strided.contiguous()))
    assert bit_equal(fake(x[::2, :group]), fake(x)[::2, :group])
    before = x.clone()
    codes, scales = pack(x)
    assert bit_equal(x, before)
    assert bit_equal(unpack(codes[::3], scales[::3], torch.float32), fake(x)[::3])


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_compile_as_one_graph_and_keep_their_bits(kind):
    fake, pack, unpack, _ = FORMATS[kind]
    x = quantiser_rows(30, 64, seed=9, dtype=torch.bfloat16)
    # aot_eager traces and functionalises but needs no C++ compiler; a graph break raises.
    compiled = [torch.compile(function, backend="aot_eager", fullgraph=True) for function in (fake, pack, unpack)]
    assert bit_equal(compiled[0](x), fake(x))
    codes, scales = compiled[1](x)
    assert bit_equal(codes, pack(x)[0])
    assert bit_equal(scales, pack(x)[1])
    assert bit_equal(compiled[2](codes, scales, torch.bfloat16), fake(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", FORMATS)
def test_formats_give_the_same_bits_on_gpu(kind):
    fake, pack, unpack, _ = FORMATS[kind]
    for dtype in (torch.float32, torch.bfloat16):
        x = poisoned(quantiser_rows(1000, 512, seed=10, dtype=dtype), seed=11, fraction=1e-4)
        finite = x.isfinite().all(dim=-1)
        assert first_difference(fake(x.cuda()).cpu(), fake(x)) == "equal"
        codes, scales = pack(x.cuda())
        assert first_difference(codes.cpu()[finite], pack(x)[0][finite]) == "equal"
        assert first_difference(scales.cpu(), pack(x)[1]) == "equal"
        assert first_difference(unpack(codes, scales, dtype).cpu(), fake(x)) == "equal"


# --- stored weights


def e8m0(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def test_qnt_06_scales_stored_as_u8_mean_the_same_as_e8m0():
    weight = torch.full((32, 32), 1.5).to(torch.float8_e4m3fn)
    as_u8 = q.dequantise_fp8_weight(weight, e8m0([119]), torch.float32)
    as_e8m0 = q.dequantise_fp8_weight(weight, e8m0([119]).view(torch.float8_e8m0fnu), torch.float32)
    assert bit_equal(as_u8, as_e8m0)
    assert bit_equal(as_u8, torch.full((32, 32), 1.5 * 2.0**-8))
    packed = torch.full((2, 16), 0x33, dtype=torch.int8)
    assert bit_equal(
        q.dequantise_fp4_weight(packed, e8m0([119], [127]), torch.float32),
        q.dequantise_fp4_weight(packed.view(torch.uint8), e8m0([119], [127]).view(torch.float8_e8m0fnu), torch.float32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_qnt_06_wider_scales_are_refused(dtype):
    with pytest.raises(ValueError, match=f"scale has dtype {dtype}"):
        q.dequantise_fp8_weight(torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.ones(1, 1, dtype=dtype), dtype)


def test_qnt_08_partial_last_blocks_keep_their_own_scales():
    weight = torch.ones(100, 70).to(torch.float8_e4m3fn)
    scale = (120 + torch.arange(12, dtype=torch.uint8)).reshape(4, 3)
    values = q.dequantise_fp8_weight(weight, scale, torch.float32)
    for row, column in [(31, 31), (32, 32), (95, 63), (96, 64), (99, 69), (25, 0)]:
        assert values[row, column] == 2.0 ** (120 + 3 * (row // 32) + column // 32 - 127)
    with pytest.raises(ValueError, match=r"needs scales of shape \[4, 3\].*got \[4, 2\]"):
        q.dequantise_fp8_weight(weight, scale[:, :2], torch.float32)


def test_partial_last_blocks_of_quantised_weights():
    weight = torch.randn(100, 70, generator=torch.Generator().manual_seed(0))
    weight[96:] *= 1000
    codes, scale = q.quantise_fp8_weight(weight)
    assert (codes.shape, codes.dtype) == ((100, 70), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((4, 3), torch.float8_e8m0fnu)
    restored = q.dequantise_fp8_weight(codes, scale, torch.float32)
    # Half a step of a 3-bit mantissa, or half the smallest subnormal times the block's scale.
    step = q.decode_e8m0(scale.view(torch.uint8)).repeat_interleave(32, 0)[:100].repeat_interleave(32, 1)[:, :70]
    assert bool(((restored - weight).abs() <= torch.maximum(weight.abs() / 16, step * 2.0**-10)).all())
    packed, scale = q.quantise_fp4_weight(weight)
    assert (packed.shape, packed.dtype, scale.shape) == ((100, 35), torch.int8, (100, 3))
    assert bit_equal(q.dequantise_fp4_weight(packed, scale, torch.float32)[:, :64], q.fake_mxfp4(weight[:, :64]))
    with pytest.raises(ValueError, match="69 inputs"):
        q.quantise_fp4_weight(weight[:, :69])


def test_qnt_10_fusing_quantised_weights_equals_fusing_values():
    random = torch.Generator().manual_seed(1)
    w1, w3 = (torch.randn(64, 96, generator=random) * torch.tensor([1.0, 8.0]).repeat_interleave(32)[:, None] for _ in "13")
    (codes1, scale1), (codes3, scale3) = q.quantise_fp8_weight(w1), q.quantise_fp8_weight(w3 * 100)
    parts = [q.dequantise_fp8_weight(*pair, torch.float32) for pair in ((codes1, scale1), (codes3, scale3))]
    codes = torch.cat((codes1.view(torch.uint8), codes3.view(torch.uint8)))
    scale = torch.cat((scale1.view(torch.uint8), scale3.view(torch.uint8)))
    assert len(scale.unique()) > 2
    assert bit_equal(q.dequantise_fp8_weight(codes, scale, torch.float32), torch.cat(parts))


def test_qnt_10_a_cut_inside_a_block_is_refused():
    codes, scale = q.quantise_fp8_weight(torch.ones(64, 64))
    with pytest.raises(ValueError, match="needs scales of shape"):
        q.dequantise_fp8_weight(codes[:48], scale[:1], torch.float32)
    with pytest.raises(ValueError, match="expected a matrix"):
        q.dequantise_fp8_weight(codes[0], scale, torch.float32)


def test_weights_without_any_value_stay_zero_and_broken_ones_show():
    zeros = q.dequantise_fp8_weight(*q.quantise_fp8_weight(torch.zeros(33, 5)), torch.float32)
    assert bit_equal(zeros, torch.zeros(33, 5))
    weight = torch.ones(64, 64)
    weight[40, 3] = torch.inf
    restored = q.dequantise_fp8_weight(*q.quantise_fp8_weight(weight), torch.float32)
    assert bool(restored[32:, :32].isnan().all())
    assert bit_equal(restored[:32], weight[:32])
    assert bit_equal(restored[32:, 32:], weight[32:, 32:])


# --- rows, gradient


@pytest.mark.parametrize(
    ("row_format", "dim", "row_bytes"),
    [
        (q.MAIN_ENTRY, 512, 288),
        (q.INDEX_KEY, 128, 68),
        (q.WINDOW_ENTRY, 512, 528),
        (q.MAIN_ENTRY, 16, 9),
        (q.INDEX_KEY, 32, 17),
        (q.WINDOW_ENTRY, 64, 66),
    ],
)
def test_row_sizes_and_round_trip(row_format, dim, row_bytes):
    assert row_format.row_bytes(dim) == row_bytes == row_format.code_bytes(dim) + row_format.scale_bytes(dim)
    x = quantiser_rows(20, dim, seed=6, dtype=torch.bfloat16)
    rows = row_format.to_bytes(x)
    assert (rows.shape, rows.dtype) == ((20, row_bytes), torch.uint8)
    assert bit_equal(row_format.from_bytes(rows, torch.bfloat16), row_format.unpack(*row_format.pack(x), torch.bfloat16))


@pytest.mark.parametrize("row_format", [q.MAIN_ENTRY, q.INDEX_KEY, q.WINDOW_ENTRY])
def test_rows_of_impossible_size_are_refused(row_format):
    for dim in (0, -32, row_format.group + 1):
        with pytest.raises(ValueError, match=f"{row_format.name}: row dimension {dim} "):
            row_format.row_bytes(dim)
    with pytest.raises(ValueError, match="rows of 10 elements"):
        row_format.from_bytes(torch.zeros(2, 10, dtype=torch.uint8), torch.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_straight_through_passes_gradients_unchanged(kind):
    x = quantiser_rows(10, 64, seed=7).clamp(-1e3, 1e3).requires_grad_()
    upstream = torch.randn(10, 64, generator=torch.Generator().manual_seed(8))
    y = q.straight_through(FAKES[kind], x)
    assert bit_equal(y.detach(), FAKES[kind](x.detach()))
    y.backward(upstream)
    assert x.grad is not None
    assert bit_equal(x.grad, upstream)
    assert not FAKES[kind](x).requires_grad


def test_straight_through_refuses_a_function_that_changes_the_shape():
    with pytest.raises(ValueError, match="must keep both"):
        q.straight_through(lambda x: x[:1], torch.zeros(2, 32))
