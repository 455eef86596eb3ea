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


def _chosen(n: int, experts: int, k: int, kind: str) -> torch.Tensor:
    """Ids of `n` rows: each its own ("random"), all the first row's ("same"), no expert twice ("distinct"), half in common."""
    source = torch.Generator("cuda").manual_seed(n)
    ids = torch.rand(n, experts, device="cuda", generator=source).topk(k, 1).indices
    if kind == "same":
        ids = ids[:1].expand(n, k)
    elif kind == "distinct":
        ids = torch.randperm(experts, device="cuda", generator=source)[: n * k].view(n, k)
    elif kind == "half":
        others = torch.rand(n, experts - k, device="cuda", generator=source).topk(k - k // 2, 1).indices
        ids = torch.cat([torch.arange(k // 2, device="cuda").expand(n, -1), k + others], 1)
    return ids.sort(1).values.contiguous()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("n", "kind"),
    [(1, "random"), (2, "random"), (2, "same"), (3, "same"), (4, "distinct"), (5, "half"), (6, "random"), (7, "half")]
    + [(8, kind) for kind in ("random", "same")],
)
def test_experts_of_a_few_rows(n: int, kind: str, shared: bool) -> None:
    """Against sums in float64; the same bits in 20 runs, and for each row alone."""
    from benchmarks.gpu_weights import Matrices, random_panels, random_rows
    from kvist.kernels.device import unpack_panels
    from kvist.kernels.experts import experts
    from kvist.kernels.experts.few import few_experts
    from kvist.kernels.experts.gpu import GpuBank

    d, f, count, k = 2560, 1152, 40, 4
    bank = GpuBank(random_panels("fp4", 2 * f, d, experts=count, paired=True), random_panels("fp4", d, f, experts=count))
    own = GpuBank(random_panels("fp8", 2 * f, d, paired=True), random_panels("fp8", d, f)) if shared else None
    x, ids = random_rows(n, d, n), _chosen(n, count, k, kind)
    weights = torch.rand(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(n))
    if n > 2:
        ids[1, 0] = -1
    triple = None
    if own is not None:
        both = unpack_panels(own.gate_up).bfloat16()
        triple = (both[0::2], unpack_panels(own.down).bfloat16(), both[1::2])
    want = experts(x, ids, weights, Matrices(bank.gate_up, bank.down), limit=10.0, form="fp8", shared=triple, impl="wide")
    got = few_experts(x, ids, weights, bank, own, limit=10.0)
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 5e-3
    assert all(torch.equal(few_experts(x, ids, weights, bank, own, limit=10.0), got) for _ in range(20))
    for row in range(n):
        part = slice(row, row + 1)
        assert torch.equal(few_experts(x[part], ids[part], weights[part], bank, own, limit=10.0)[0], got[row])


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
