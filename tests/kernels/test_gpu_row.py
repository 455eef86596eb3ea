"""The launches for one row, and for experts of many rows, on a Hopper GPU at released widths, beside the operators for any rows.

Elsewhere it skips and says so; the same sources run on a processor in `test_row_kernels.py` and `test_grouped_experts.py`.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)


def test_projections_of_one_row() -> None:
    from benchmarks.gpu_row_cases import Projections, case

    case("projections", [Projections(0)]).check()


def test_experts_of_one_row() -> None:
    from benchmarks.gpu_row_cases import Experts, case

    case("experts", [Experts(0)]).check()


def test_one_row_chooses_among_many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of the router a block, twelve experts a lane of the warp that chooses."""
    from benchmarks import gpu_row_cases

    monkeypatch.setattr(gpu_row_cases, "EXPERTS", 384)
    monkeypatch.setattr(gpu_row_cases, "F", 256)
    gpu_row_cases.case("experts", [gpu_row_cases.Experts(0)]).check()


@pytest.mark.parametrize("experts", [3, 128])
def test_given_experts_of_one_row(experts: int) -> None:
    """Beside the launches for any rows; one choice of none; the same bits in 20 runs."""
    from benchmarks.gpu_weights import random_panels, random_rows
    from kvist.kernels.experts.gpu import DECODE, GpuBank, down_gpu, gate_up_gpu, plan_rows
    from kvist.kernels.experts.row import given_experts_row

    d, f, k = 5120, 2304, 3
    bank = GpuBank(random_panels("fp4", 2 * f, d, experts=experts, paired=True), random_panels("fp4", d, f, experts=experts))
    for seed in range(3):
        source = torch.Generator("cuda").manual_seed(seed)
        x, weights = random_rows(1, d, seed), torch.rand(1, k, device="cuda", generator=source)
        ids = torch.rand(1, experts, device="cuda", generator=source).topk(k, 1).indices.sort(1).values
        ids[0, seed] = -1
        plan = plan_rows(ids, experts, DECODE.tile)
        want = down_gpu(gate_up_gpu(x, weights, plan, bank.gate_up, 10.0, "fp8", DECODE), ids, plan, bank.down, DECODE)
        got = given_experts_row(x, ids, weights, bank, limit=10.0)
        assert float((got - want).norm() / want.norm()) < 5e-3
        assert all(torch.equal(given_experts_row(x, ids, weights, bank, limit=10.0), got) for _ in range(20))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (77, 64), (900, 64), (900, 112)])
def test_experts_of_many_rows(rows: int, width: int) -> None:
    from benchmarks.gpu_weights import random_panels, random_rows
    from kvist.kernels.experts.gpu import GROUPED, GpuBank, down_gpu, gate_up_gpu, plan_rows, sum_choices
    from kvist.kernels.experts.grouped import run_grouped

    d, f, count = 1024, 512, 8
    bank = GpuBank(random_panels("fp4", 2 * f, d, experts=count, paired=True), random_panels("fp4", d, f, experts=count))
    x, source = random_rows(rows, d, 1), torch.Generator("cuda").manual_seed(rows)
    ids = torch.rand(rows, count, device="cuda", generator=source).topk(3, 1).indices.sort(1).values
    ids[rows // 2, 0] = -1
    weights = torch.rand(rows, 3, device="cuda", generator=source)
    plan = plan_rows(ids, count, GROUPED.tile)
    want = down_gpu(gate_up_gpu(x, weights, plan, bank.gate_up, 10.0, "fp8", GROUPED), ids, plan, bank.down, GROUPED)
    for _ in range(20):
        got = sum_choices(run_grouped(x, ids, weights, bank, 10.0, width=width), ids)
        assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize(
    "files",
    [("routing/choose.cuh", "experts/row.cu"), ("linear/pieces.cuh", "linear/row.cu"), ("linear/pieces.cuh", "linear/rows.cu")],
)
def test_no_policy_beside_an_address_in_two_parts(files: tuple[str, ...]) -> None:
    """ptxas encodes a copy with an L2 policy whose shared address has a uniform part as an illegal instruction (`copy_once`)."""
    from kvist.kernels.device.cuda_source import built
    from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE
    from tests.kernels.hopper import Built

    sources = (STREAM_SOURCE, COLLAPSE_SOURCE, *(STREAM_SOURCE.parents[1] / file for file in files))
    cubin = built("".join(path.read_text() for path in sources), sources[-1].name, "sm_90a")
    sass = Built(name=files[-1], registers=0, local_bytes=0, shared_bytes=0, cubin=cubin).sass()
    copies = [line for line in sass.splitlines() if "LDGSTS" in line]
    assert copies and not [line for line in copies if "+UR" in line]
