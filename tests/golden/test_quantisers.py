"""The golden case `quantisers`: codes, scales, values, stored weights and quantised linear layers of the official code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvist.quant as q
from kvist.testing import first_difference

FORMATS = {
    "fp8": (q.fake_fp8, q.pack_fp8, q.unpack_fp8),
    "mxfp4": (q.fake_mxfp4, q.pack_mxfp4, q.unpack_mxfp4),
    "main_fp4": (q.fake_main_fp4, q.pack_main_fp4, q.unpack_main_fp4),
}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def load(case: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return load_file(case / "inputs.safetensors"), load_file(case / "expected.safetensors")


@pytest.mark.golden_cases("quantisers")
@pytest.mark.parametrize("dt", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_cache_quantisers_are_exact(golden_case, kind, dt):
    inputs, expected = load(golden_case)
    fake, pack, unpack = FORMATS[kind]
    x = inputs[f"{kind}.{dt}/x"]
    assert x.dtype == DTYPES[dt]
    codes, scales = pack(x)
    values = expected[f"{kind}.{dt}/dequantised"]
    assert first_difference(codes, expected[f"{kind}.{dt}/codes"]) == "equal"
    assert first_difference(scales, expected[f"{kind}.{dt}/scales"]) == "equal"
    assert first_difference(unpack(codes, scales, torch.float32), values) == "equal"
    assert first_difference(fake(x), values.to(x.dtype)) == "equal"


@pytest.mark.golden_cases("quantisers")
def test_row_bytes_are_codes_then_scales(golden_case):
    inputs, expected = load(golden_case)
    for row_format, kind in ((q.MAIN_ENTRY, "main_fp4"), (q.INDEX_KEY, "mxfp4"), (q.WINDOW_ENTRY, "fp8")):
        rows = row_format.to_bytes(inputs[f"{kind}.bf16/x"])
        parts = [expected[f"{kind}.bf16/codes"], expected[f"{kind}.bf16/scales"]]
        assert first_difference(rows, torch.cat(parts, dim=-1)) == "equal"
        values = row_format.from_bytes(rows, torch.float32)
        assert first_difference(values, expected[f"{kind}.bf16/dequantised"]) == "equal"


def stored_weight(inputs: dict[str, Tensor], kind: str, dtype: torch.dtype) -> Tensor:
    read = {"fp8": q.dequantise_fp8_weight, "fp4": q.dequantise_fp4_weight}[kind]
    return read(inputs[f"weight_{kind}/weight"], inputs[f"weight_{kind}/scale"], dtype)


@pytest.mark.golden_cases("quantisers")
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_stored_weights_are_exact(golden_case, kind):
    inputs, expected = load(golden_case)
    values = expected[f"weight_{kind}/dequantised"]
    assert first_difference(stored_weight(inputs, kind, torch.float32), values) == "equal"


@pytest.mark.golden_cases("quantisers")
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_linear_float32(golden_case, kind):
    inputs, expected = load(golden_case)
    limit = json.loads((golden_case / "case.json").read_text())["tolerances"]["all"]["linear_*/y.f32"]["max_abs"]
    x = q.fake_fp8(inputs["linear/x"].to(torch.float32))
    y = torch.nn.functional.linear(x, stored_weight(inputs, kind, torch.float32))
    wanted = expected[f"linear_{kind}/y.f32"]
    # The case gives the limit relative to the row's largest value; a row of zeros must then be exact.
    assert bool(((y - wanted).abs() <= limit * wanted.abs().amax(dim=-1, keepdim=True)).all())


def ordered(x: Tensor) -> Tensor:
    """bfloat16 -> int32 that counts representable values, so that neighbours differ by one and -0 equals +0."""
    bits = x.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.golden_cases("quantisers")
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_linear_bfloat16(golden_case, kind):
    inputs, expected = load(golden_case)
    limit = json.loads((golden_case / "case.json").read_text())["tolerances"]["all"]["linear_*/y.bf16"]["max_bf16_steps"]
    x = q.fake_fp8(inputs["linear/x"]).to(torch.float32)
    y = torch.nn.functional.linear(x, stored_weight(inputs, kind, torch.float32)).to(torch.bfloat16)
    steps = (ordered(y) - ordered(expected[f"linear_{kind}/y.bf16"])).abs()
    assert int(steps.max()) <= limit
