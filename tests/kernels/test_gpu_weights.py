"""GPU products over stored FP4 and FP8 weights: panels hold the file's values, linear layers and experts equal the reference.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so. Packing is torch
alone and always runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight, pack_fp4_panels, pack_fp8_panels, stack_panels, unpack_panels
from kvist.kernels.experts import ResidentBank, Triple, experts
from kvist.kernels.linear import linear
from kvist.kernels.quantise import quantise
from kvist.quant import dequantise_fp4_weight, dequantise_fp8_weight, quantise_fp4_weight, quantise_fp8_weight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
QUANTISE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"fp4": quantise_fp4_weight, "fp8": quantise_fp8_weight}
DEQUANTISE = {"fp4": dequantise_fp4_weight, "fp8": dequantise_fp8_weight}
PACK = {"fp4": pack_fp4_panels, "fp8": pack_fp8_panels}


def stored(form: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A random weight whose groups differ in size by many powers of two."""
    spread = torch.exp2(torch.randint(-12, 1, (outputs, 1)).float())
    return QUANTISE[form](torch.randn(outputs, inputs) * spread)


def moved(weight: PanelWeight) -> PanelWeight:
    return weight._replace(codes=weight.codes.to(DEVICE), scales=weight.scales.to(DEVICE))


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (96, 64), (100, 352), (128, 32)])
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_panels_hold_the_files_values(form: str, outputs: int, inputs: int) -> None:
    weight = stored(form, outputs, inputs)
    panels = PACK[form](*weight)
    assert torch.equal(unpack_panels(panels), DEQUANTISE[form](*weight, torch.float32))
    assert panels.nbytes <= 1.07 * weight[0].nbytes or inputs % 128 or outputs % 64


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_gate_and_up_are_paired(form: str) -> None:
    gate, up = stored(form, 96, 160), stored(form, 96, 160)
    values = unpack_panels(PACK[form](*gate, up=up))
    assert torch.equal(values[0::2], DEQUANTISE[form](*gate, torch.float32))
    assert torch.equal(values[1::2], DEQUANTISE[form](*up, torch.float32))


def test_every_fp4_code_and_fp8_code_survives() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    scales = torch.full((64, 16), 127, dtype=torch.uint8)
    assert torch.equal(unpack_panels(pack_fp4_panels(codes, scales)), dequantise_fp4_weight(codes, scales, torch.float32))
    finite = codes.masked_fill((codes & 0x7F) == 0x7F, 0)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(2, 8)
    assert torch.equal(unpack_panels(pack_fp8_panels(finite, scales)), dequantise_fp8_weight(finite, scales, torch.float32))


@needs_triton
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (100, 352), (192, 640)])
def test_expanded_weights_hold_the_files_values(outputs: int, inputs: int) -> None:
    from kvist.kernels.linear.gpu import expanded

    weight = moved(pack_fp8_panels(*stored("fp8", outputs, inputs)))
    assert torch.equal(expanded(weight).float().cpu(), unpack_panels(weight).cpu())


@needs_triton
@pytest.mark.parametrize("groups", [1, 4])
def test_many_rows_by_an_expanded_weight(groups: int) -> None:
    from kvist.kernels.linear.gpu import product_expanded

    weight, x = moved(pack_fp8_panels(*stored("fp8", 256, 96))), torch.randn(70, groups * 96).bfloat16().to(DEVICE)
    want = linear(x.float().cpu(), unpack_panels(weight).cpu(), groups=groups)
    torch.testing.assert_close(product_expanded(x, weight, groups).float().cpu(), want, rtol=2e-2, atol=2e-2)


def test_weights_that_cannot_be_laid_out_are_named() -> None:
    codes, scales = stored("fp4", 64, 64)
    with pytest.raises(ValueError, match=r"scale is 2\^2; impl 'gpu' takes fp4 scales up to 2\^1"):
        pack_fp4_panels(codes, torch.full_like(scales.view(torch.uint8), 129))
    with pytest.raises(ValueError, match=r"\(NaN\)"):
        pack_fp4_panels(codes, torch.full_like(scales.view(torch.uint8), 255))
    codes, scales = stored("fp8", 64, 64)
    with pytest.raises(ValueError, match="NaN code"):
        pack_fp8_panels(codes.view(torch.uint8) | 0x7F, scales)
    with pytest.raises(ValueError, match="need a scale for every 32 x 32 block"):
        pack_fp8_panels(codes, scales[:1])


@needs_triton
@pytest.mark.parametrize(
    ("rows", "groups", "outputs", "inputs"), [(1, 1, 192, 640), (9, 2, 128, 96), (70, 1, 100, 160), (3, 1, 64, 32)]
)
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_linear_equals_float64(form: str, rows: int, groups: int, outputs: int, inputs: int) -> None:
    """With the FP8 quantiser before it, split inputs (a few rows), wide tiles (70 rows), and NaN in one row only."""
    torch.manual_seed(rows)
    weight = stored(form, outputs, inputs)
    x = (torch.randn(rows, groups * inputs) * 3).bfloat16()
    x[-1] = float("nan") if rows > 1 else x[-1]
    got = linear(x.to(DEVICE), moved(PACK[form](*weight)), form="fp8", groups=groups, impl="gpu").cpu()
    want = linear(x, DEQUANTISE[form](*weight, torch.bfloat16), form="fp8", groups=groups, impl="wide")
    assert torch.equal(got.isnan(), want.isnan())
    good = ~want.isnan()
    assert float((got[good].double() - want[good].double()).norm() / want[good].double().norm()) < 2e-3
    assert torch.equal(
        got[good], linear(x.to(DEVICE), moved(PACK[form](*weight)), form="fp8", groups=groups, impl="gpu").cpu()[good]
    )


class Values(ResidentBank):
    """Experts as the reference reads them."""

    def __init__(self, triples: list[Triple]) -> None:
        self.triples = triples

    def expert(self, index: int) -> Triple:
        return self.triples[index]


def bank(form: str, count: int, width: int, inner: int) -> tuple[ResidentBank, Values]:
    """Equal experts for both implementations."""
    from kvist.kernels.experts.gpu import GpuBank

    raw = [(stored(form, inner, width), stored(form, width, inner), stored(form, inner, width)) for _ in range(count)]
    gate_up = stack_panels([PACK[form](*w1, up=w3) for w1, _, w3 in raw])
    down = stack_panels([PACK[form](*w2) for _, w2, _ in raw])
    values = [tuple(DEQUANTISE[form](*part, torch.bfloat16) for part in triple) for triple in raw]
    return GpuBank(moved(gate_up), moved(down)), Values(values)


def choices(rows: int, count: int, k: int) -> tuple[Tensor, Tensor]:
    """Distinct ascending experts a row; some slots and one whole row are empty."""
    ids = torch.stack([torch.randperm(count)[:k].sort().values for _ in range(rows)])
    ids[0, k - 1] = -1
    ids[rows // 2, 1 if rows == 1 else 0 :] = -1
    return ids, torch.rand(rows, k)


@needs_triton
@pytest.mark.parametrize(("rows", "quantised"), [(1, True), (4, False), (19, True), (66, True)])
def test_experts_equal_the_reference(rows: int, quantised: bool) -> None:
    """Few rows, tiles that one expert overflows, and the wide tiles of prefill; FP4 experts and an FP8 shared one."""
    torch.manual_seed(rows)
    device_bank, values = bank("fp4", 5, 128, 96)
    device_shared, shared = bank("fp8", 1, 128, 96)
    form = "fp8" if quantised else None
    x = (torch.randn(rows, 128) * 2).bfloat16()
    x = quantise(x, "fp8") if quantised else x
    ids, weights = choices(rows, 5, 3)
    on = [t.to(DEVICE) for t in (x, ids, weights)]
    for mine, theirs in ((None, None), (device_shared, shared.triples[0])):
        got = experts(*on, device_bank, limit=10.0, form=form, shared=mine, impl="gpu").cpu()
        want = experts(x, ids, weights, values, limit=10.0, form=form, shared=theirs)
        wide = experts(x, ids, weights, values, limit=10.0, form=form, shared=theirs, impl="wide")
        noise = float((want - wide).norm() / wide.norm())
        assert float((got - wide).norm() / wide.norm()) < max(2 * noise, 2e-3)
        assert torch.equal(got, experts(*on, device_bank, limit=10.0, form=form, shared=mine, impl="gpu").cpu())
        if mine is None and rows > 1:
            assert bool((got[rows // 2] == 0).all())


@needs_triton
def test_one_row_that_chose_nothing_is_zero() -> None:
    device_bank, _ = bank("fp4", 3, 128, 64)
    x = torch.randn(1, 128).bfloat16().to(DEVICE)
    ids, weights = torch.full((1, 3), -1, device=DEVICE), torch.zeros(1, 3, device=DEVICE)
    for _ in range(2):
        got = experts(x, ids, weights, device_bank, limit=10.0, form="fp8", impl="gpu")
        assert bool((got == 0).all())


@needs_triton
def test_both_plans_group_alike() -> None:
    """The one-program plan of decode and the torch plan of prefill: the same tiles, the same order inside them."""
    from kvist.kernels.experts import gpu

    torch.manual_seed(2)
    ids, _ = choices(21, 9, 4)
    plans = []
    for limit in (gpu.SMALL_PLAN, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "SMALL_PLAN", limit)
            plans.append([part.cpu() for part in gpu.plan_rows(ids.to(DEVICE), 9, 4)])
    (head, expert, first, rows, order, need), other = plans
    tiles = int(head)
    assert tiles == int(other[0]) == sum(-(-int((ids == e).sum()) // 4) for e in range(9))
    for mine, theirs in ((expert, other[1]), (first, other[2]), (rows, other[3])):
        assert torch.equal(mine[:tiles], theirs[:tiles])
    used = int((ids >= 0).sum())
    assert torch.equal(order[:used], other[4][:used])
    assert torch.equal(need, other[5])
    for tile in range(tiles):
        taken = order[int(first[tile]) : int(first[tile]) + int(rows[tile])]
        assert bool((ids.flatten()[taken] == expert[tile]).all())
    assert sorted(order[:used].tolist()) == (ids.flatten() >= 0).nonzero().flatten().tolist()


@needs_triton
def test_a_nan_row_stays_alone() -> None:
    device_bank, _ = bank("fp4", 4, 128, 64)
    x = quantise(torch.randn(5, 128).bfloat16(), "fp8")
    ids, weights = torch.tensor([[0, 1]]).repeat(5, 1), torch.ones(5, 2)
    clean = experts(*(t.to(DEVICE) for t in (x, ids, weights)), device_bank, limit=10.0, form="fp8", impl="gpu").cpu()
    x[2, 3] = float("nan")
    got = experts(*(t.to(DEVICE) for t in (x, ids, weights)), device_bank, limit=10.0, form="fp8", impl="gpu").cpu()
    assert bool(got[2].isnan().all())
    keep = [0, 1, 3, 4]
    assert torch.equal(got[keep], clean[keep])


@needs_triton
def test_what_experts_cannot_take_is_named() -> None:
    device_bank, values = bank("fp4", 2, 128, 64)
    x, ids, weights = (
        torch.zeros(1, 128, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1),
    )
    with pytest.raises(ValueError, match="reads experts from a GpuBank"):
        experts(x, ids, weights, values, limit=10.0, form="fp8", impl="gpu")
    with pytest.raises(ValueError, match="takes bfloat16"):
        experts(x.float(), ids, weights, device_bank, limit=10.0, form="fp8", impl="gpu")
    with pytest.raises(ValueError, match="for impl 'gpu'"):
        experts(x, ids, weights, values, limit=10.0, form="fp8", shared=device_bank)
    with pytest.raises(ValueError, match="read by impl 'gpu'"):
        linear(x, pack_fp8_panels(*stored("fp8", 64, 128)))


def test_without_a_gpu_the_error_says_what_runs_instead() -> None:
    from kvist.kernels.device import GpuUnavailable, require_gpu

    if HAS_TRITON and (INTERPRETED or torch.cuda.is_available()):
        require_gpu()
        return
    with pytest.raises(GpuUnavailable, match="impl 'ref'"):
        quantise(torch.zeros(1, 32, dtype=torch.bfloat16), "fp8", impl="gpu")


@needs_triton
def test_a_shared_expert_of_many_rows_by_expanded_weights() -> None:
    from kvist.kernels.experts.gpu import GpuBank, run_expanded

    gate, up, down = stored("fp8", 96, 128), stored("fp8", 96, 128), stored("fp8", 128, 96)
    bank = GpuBank(moved(pack_fp8_panels(*gate, up=up)), moved(pack_fp8_panels(*down)))
    x = quantise(torch.randn(9, 128).bfloat16(), "fp8")
    values = [DEQUANTISE["fp8"](*part, torch.bfloat16) for part in (gate, down, up)]
    none = torch.full((9, 1), -1)
    triple = (values[0], values[1], values[2])
    want = experts(x, none, torch.ones(9, 1), Values([]), limit=0.5, form="fp8", shared=triple, impl="wide")
    got = run_expanded(x.to(DEVICE), bank, 0.5, "fp8").float().cpu()
    assert float((got - want).norm() / want.norm()) < 1e-2
