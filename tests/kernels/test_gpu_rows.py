"""GPU row operators against `kvist.quant` and the reference: quantisers bit for bit, rows written into pages, norm, rotation.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvist.kernels.quantise import quantise
from kvist.kernels.rms_norm import rms_norm
from kvist.kernels.rotary import rotate
from kvist.quant import INDEX_KEY, MAIN_ENTRY, WINDOW_ENTRY, RowFormat

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
FORMATS = {"fp8": WINDOW_ENTRY, "main_fp4": MAIN_ENTRY, "mxfp4": INDEX_KEY}


def rows(n: int, width: int, group: int) -> Tensor:
    """Rows of very different sizes, with ties, zeros of both signs, tiny and huge groups, and broken groups in the last two."""
    torch.manual_seed(n * width)
    x = torch.randn(n, width) * torch.logspace(-6, 4, n).unsqueeze(1)
    x[0] = (x[0] * 1e6 * 8).round() / 8
    x[1, :group], x[1, group : 2 * group] = 0.0, -0.0
    x[2, : min(8, group)] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[2, 8:group] = -x[2, : group - 8].repeat(2)[: group - 8] if group > 8 else x[2, 8:group]
    x[3, :group] = 2.0**-130
    x[-2, 0], x[-1, width - 1] = float("nan"), float("inf")
    return x.bfloat16()


@pytest.mark.parametrize("width", [32, 96, 512])
@pytest.mark.parametrize("form", FORMATS)
def test_quantisers_are_the_reference_bit_for_bit(form: str, width: int) -> None:
    x = rows(9, width, FORMATS[form].group)
    got, want = quantise(x.to(DEVICE), form, impl="gpu").cpu(), quantise(x, form)
    finite = torch.isfinite(want)
    assert torch.equal(got[finite].view(torch.int16), want[finite].view(torch.int16))
    assert not torch.isfinite(got[~finite]).any()
    assert 0 < int((~finite).sum()) <= 2 * FORMATS[form].group


def planes(form: RowFormat, width: int, pages: int, rows_each: int) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of pages full of 0xA5 in which both planes of a format lie apart, as in a page."""
    code, scale = form.code_bytes(width), form.scale_bytes(width)
    pool = torch.full((pages, 64 + rows_each * (code + scale)), 0xA5, dtype=torch.uint8, device=DEVICE)
    codes = pool[:, 32 : 32 + rows_each * code].unflatten(1, (rows_each, code))
    scales = pool[:, 64 + rows_each * code :].unflatten(1, (rows_each, scale))
    return pool, codes, scales


@pytest.mark.parametrize("width", [32, 96, 128, 512])
@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_packed_into_their_places_and_nothing_else_changes(form: str, width: int) -> None:
    from kvist.kernels.quantise.gpu import write_rows

    x = rows(7, width, FORMATS[form].group)[:5]
    pool, codes, scales = planes(FORMATS[form], width, pages=4, rows_each=3)
    page, row = torch.tensor([2, 0, 3, -1, 2], device=DEVICE), torch.tensor([1, 2, 0, 0, 0], device=DEVICE)
    write_rows(x.to(DEVICE), codes, scales, page, row, form=form)
    want_codes, want_scales = FORMATS[form].pack(x)
    want_pool, at_codes, at_scales = planes(FORMATS[form], width, pages=4, rows_each=3)
    for n in (0, 1, 2, 4):
        at_codes[page[n], row[n]], at_scales[page[n], row[n]] = want_codes[n].to(DEVICE), want_scales[n].to(DEVICE)
    assert torch.equal(pool, want_pool)


def test_norm_rotation_and_packing_in_one_pass() -> None:
    """A window entry (512 + 16 bytes) and an index key as a layer makes them; a rare flip where a rounding was near a tie."""
    from kvist.kernels.quantise.gpu import rows_gpu, write_rows

    torch.manual_seed(3)
    n = 6
    for form, width in (("fp8", 512), ("main_fp4", 512), ("mxfp4", 128)):
        x, weight = (torch.randn(n, width) * 3).bfloat16(), torch.rand(width) + 0.5
        angle = torch.rand(n, 32) * 100
        table = angle.cos(), angle.sin()
        turned = rotate(rms_norm(x, weight, 1e-20), table)
        on = [t.to(DEVICE) for t in (x, weight, *table)]
        got = rows_gpu(on[0], norm=(on[1], 1e-20), table=(on[2], on[3])).cpu()
        assert float((got != turned).float().mean()) < 0.01
        assert float((got.float() - turned.float()).norm() / turned.float().norm()) < 1e-3
        _, codes, scales = planes(FORMATS[form], width, pages=2, rows_each=n)
        page, row = torch.ones(n, dtype=torch.int32, device=DEVICE), torch.arange(n, dtype=torch.int32, device=DEVICE)
        write_rows(on[0], codes, scales, page, row, form=form, norm=(on[1], 1e-20), table=(on[2], on[3]))
        want_codes, want_scales = FORMATS[form].pack(got)
        assert torch.equal(codes[1].cpu(), want_codes)
        assert torch.equal(scales[1].cpu(), want_scales)


def test_norm_equals_the_reference() -> None:
    torch.manual_seed(4)
    x, weight = (torch.randn(3, 4, 1280) * 5).bfloat16(), torch.rand(1280)
    got = rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-20, impl="gpu").cpu()
    want = rms_norm(x, weight, 1e-20)
    assert float((got != want).float().mean()) < 0.01
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 1e-3


def test_rows_that_do_not_fit_are_named() -> None:
    from kvist.kernels.quantise.gpu import write_rows

    with pytest.raises(ValueError, match="not a multiple of the group size 32"):
        quantise(torch.zeros(2, 40, dtype=torch.bfloat16, device=DEVICE), "fp8", impl="gpu")
    with pytest.raises(ValueError, match="takes bfloat16"):
        quantise(torch.zeros(2, 64, device=DEVICE), "fp8", impl="gpu")
    _, codes, scales = planes(WINDOW_ENTRY, 64, 1, 2)
    place = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="take 32 code and 2 scale bytes"):
        write_rows(torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE), codes, scales, place, place, form="mxfp4")
