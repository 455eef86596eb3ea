"""Many rows times panels on Hopper (`device/panel_rows.cu`): experts and linear layers against float64, tiles of every width.

Runs on a Hopper card only (inline matrix instructions); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight, pack_fp4_panels, pack_fp8_panels, stack_panels, unpack_panels
from kvist.kernels.experts import ResidentBank, Triple, experts
from kvist.kernels.linear import linear
from kvist.kernels.quantise import quantise
from kvist.quant import quantise_fp4_weight, quantise_fp8_weight

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not HOPPER, reason="needs Triton and a GPU of compute capability 9.0"
)


def panels(form: str, outputs: int, inputs: int, *, paired: bool = False) -> PanelWeight:
    """A random weight on the device whose groups differ in size by many powers of two."""
    pack, cut = (pack_fp4_panels, quantise_fp4_weight) if form == "fp4" else (pack_fp8_panels, quantise_fp8_weight)

    def stored() -> tuple[Tensor, Tensor]:
        return cut(torch.randn(outputs, inputs) * torch.exp2(torch.randint(-8, 1, (outputs, 1)).float()))

    weight = pack(*stored(), up=stored()) if paired else pack(*stored())
    return weight._replace(codes=weight.codes.cuda(), scales=weight.scales.cuda())


class Unpacked(ResidentBank):
    """Experts of panels as the reference reads them."""

    def __init__(self, gate_up: PanelWeight, down: PanelWeight) -> None:
        self.gate_up, self.down = gate_up, down

    def expert(self, index: int) -> Triple:
        both = unpack_panels(self.gate_up, index).bfloat16()
        return both[0::2].contiguous(), unpack_panels(self.down, index).bfloat16(), both[1::2].contiguous()


@pytest.mark.parametrize("rows", [65, 128, 190, 220, 250, 517])
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_linear_equals_float64(form: str, rows: int) -> None:
    torch.manual_seed(rows)
    for outputs, inputs, groups in ((128, 128, 1), (512, 640, 2)):
        weight = panels(form, outputs, inputs)
        x = quantise((torch.randn(rows, groups * inputs) * 3).bfloat16(), "fp8").cuda()
        got = linear(x, weight, groups=groups, impl="gpu")
        want = linear(x, unpack_panels(weight).bfloat16(), groups=groups, impl="wide")
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-3
        assert torch.equal(got, linear(x, weight, groups=groups, impl="gpu"))


@pytest.mark.parametrize(("rows", "count"), [(70, 5), (300, 2), (900, 3)])
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_experts_equal_float64(form: str, rows: int, count: int) -> None:
    """Narrow and wide tiles, an expert without rows, rows without experts, a NaN row that stays alone."""
    from kvist.kernels.experts.gpu import GpuBank

    torch.manual_seed(rows)
    gate_up = stack_panels([panels(form, 384, 256, paired=True) for _ in range(count)])
    down = stack_panels([panels(form, 256, 384) for _ in range(count)])
    device_bank, values = GpuBank(gate_up, down), Unpacked(gate_up, down)
    x = quantise((torch.randn(rows, 256) * 2).bfloat16(), "fp8").cuda()
    ids = torch.stack([torch.randperm(count - 1)[:2].sort().values for _ in range(rows)]).cuda()
    ids[rows // 2, 0:] = -1
    weights = torch.rand(ids.shape).cuda()
    got = experts(x, ids, weights, device_bank, limit=10.0, form="fp8", impl="gpu")
    want = experts(x, ids, weights, values, limit=10.0, form="fp8", impl="wide")
    assert float((got - want).norm() / want.norm()) < 5e-3
    assert bool((got[rows // 2] == 0).all())
    assert torch.equal(got, experts(x, ids, weights, device_bank, limit=10.0, form="fp8", impl="gpu"))
    x[3, 5] = float("nan")
    broken = experts(x, ids, weights, device_bank, limit=10.0, form="fp8", impl="gpu")
    keep = torch.arange(rows, device="cuda") != 3
    assert bool(broken[3].isnan().all())
    assert torch.equal(broken[keep], got[keep])
