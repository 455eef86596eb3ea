"""Cases of `gpu-experts` (imported only where Triton is): FP4 experts at released widths, 128 of them, top 6.

A call makes the plan, gate+up with activation, weight and FP8 quantiser, and down with the sum. Bytes: 18.8 MB an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Options, TimedCase
from benchmarks.gpu_peers import humming_absent, humming_experts
from benchmarks.gpu_timing import calls_for, floor_us, graphed, require_equal, require_near
from benchmarks.gpu_weights import Matrices, random_panels, random_rows
from kvist.kernels.experts import experts
from kvist.kernels.experts.gpu import DECODE, PREFILL, GpuBank, Shape, down_gpu, gate_up_gpu, plan_rows, run_bank

D, F, EXPERTS, K, LIMIT = 5120, 2304, 128, 6, 10.0
CHECKED_ROWS = 3
CUTS = {
    "decode": [
        DECODE._replace(programs=0),
        *(DECODE._replace(stages=stages) for stages in (3, 5)),
        DECODE._replace(panels=1),
        DECODE._replace(tile=16),
        DECODE._replace(panels=4, warps=8),
    ],
    "prefill": [PREFILL, Shape(128, 2, 8, 3), Shape(32, 2, 4, 4), Shape(64, 2, 8, 4)],
}


class Batch(NamedTuple):
    """One call's inputs."""

    x_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor


def batches(rows: int) -> list[Batch]:
    """Several batches that choose different experts, ids ascending in a row."""
    made = []
    for seed in range(16 if rows <= 6 else 4 if rows <= 64 else 2):
        source = torch.Generator("cuda").manual_seed(seed)
        ids = torch.rand(rows, EXPERTS, device="cuda", generator=source).topk(K, 1).indices.sort(1).values
        weights = torch.rand(rows, K, device="cuda", generator=source)
        made.append(Batch(random_rows(rows, D, seed), ids, 1.5 * weights / weights.sum(1, keepdim=True)))
    return made


def cost(made: list[Batch]) -> tuple[float, float]:
    """Mean bytes of the experts hit and operations of a call."""
    hit = sum(len(batch.ids_NK.unique()) for batch in made) / len(made)
    return hit * 3 * D * F * (0.5 + 1 / 32), 6.0 * D * F * made[0].ids_NK.numel()


def call(bank: GpuBank, first: Shape, second: Shape) -> Callable[[Batch], Tensor]:
    """One complete call with launches cut as given."""

    def run(batch: Batch) -> Tensor:
        plan = plan_rows(batch.ids_NK, EXPERTS, first.tile)
        hidden = gate_up_gpu(batch.x_ND, batch.weights_NK, plan, bank.gate_up, LIMIT, "fp8", first)
        return down_gpu(hidden, batch.ids_NK, plan, bank.down, second)

    return run


def chosen(bank: GpuBank) -> Callable[[Batch], Tensor]:
    """One complete call with launches cut as the operator chooses."""
    return lambda batch: run_bank(batch.x_ND, batch.ids_NK, batch.weights_NK, bank, LIMIT, "fp8")


def reference(bank: GpuBank, batch: Batch) -> Tensor:
    """A few rows by float64 sums over the unpacked experts."""
    part = Batch(*(t[:CHECKED_ROWS].contiguous() for t in batch))
    return experts(*part, Matrices(bank.gate_up, bank.down), limit=LIMIT, form="fp8", impl="wide")


def check(name: str, run: Callable[[Batch], Tensor], want: Tensor, batch: Batch) -> None:
    """A few rows against the reference; 20 runs give the same bits."""
    got = run(batch)
    require_near(name, got[: len(want)], want, 5e-3)
    for _ in range(20):
        require_equal(f"{name}: repeated", run(batch), got)


Products = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]


def humming_products(bank: GpuBank) -> Products | None:
    """The peer's two products, run once; None, with the reason printed, where it is absent or does not run."""
    reason = humming_absent()
    if reason is None:
        try:
            first, second = humming_experts(bank.gate_up), humming_experts(bank.down)
            offsets = torch.ones(EXPERTS + 1, dtype=torch.int64, device="cuda").cumsum(0) - 1
            first(random_rows(EXPERTS, D, 0), offsets)
            second(random_rows(EXPERTS, F, 0), offsets)
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, ValueError, AssertionError, KeyError, AttributeError, ImportError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            return first, second
    print(f"gpu-experts: no peer: {reason}")
    return None


def humming(products: Products, made: list[Batch], calls: int) -> dict[str, Callable[[], object]]:
    """Both products of the peer on rows grouped beforehand: no plan, activation, quantiser or sum is charged to it."""
    first, second = products
    grouped = []
    for batch in made:
        order = batch.ids_NK.flatten().argsort(stable=True)
        counts = batch.ids_NK.flatten().bincount(minlength=EXPERTS)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).long()
        grouped.append((batch.x_ND[order // K].contiguous(), random_rows(len(order), F, 1), offsets))

    def run(rows: tuple[Tensor, Tensor, Tensor]) -> None:
        first(rows[0], rows[2])
        second(rows[1], rows[2])

    return {"humming, products only": graphed(run, grouped, calls)}


def cublas(bank: GpuBank, calls: int) -> dict[str, Callable[[], object]]:
    """One row through six experts as bfloat16 matrices, 24 of them in turn."""
    matrices = Matrices(bank.gate_up, bank.down)
    triples = [matrices.expert(index) for index in range(24)]
    x, hidden = random_rows(1, D, 0), random_rows(1, F, 0)

    def run(first: int) -> None:
        for gate, down, up in triples[first : first + K]:
            for row, weight in ((x, gate), (x, up), (hidden, down)):
                assert isinstance(weight, Tensor)
                torch.nn.functional.linear(row, weight)

    return {"cuBLAS bf16, products only": graphed(run, [0, 6, 12, 18], calls)}


def cases(options: Options, *, sweep: bool) -> Iterator[TimedCase]:
    """A case a number of rows."""
    bank = GpuBank(random_panels("fp4", 2 * F, D, experts=EXPERTS, paired=True), random_panels("fp4", D, F, experts=EXPERTS))
    products = None if sweep else humming_products(bank)
    for rows in (1, 64) if options.quick else (1, 2, 4, 6, 8, 16, 64, 512, 4096):
        made = batches(rows)
        nbytes, flops = cost(made)
        floor = floor_us(nbytes, flops)
        calls = calls_for(floor)
        kind = "decode" if rows <= 64 else "prefill"
        runs = {"kvist": chosen(bank)} | {str(tuple(cut)): call(bank, cut, cut) for cut in CUTS[kind] if sweep}
        want = reference(bank, made[0])

        def checked(runs: dict[str, Callable[[Batch], Tensor]] = runs, want: Tensor = want, batch: Batch = made[0]) -> None:
            for name, run in runs.items():
                check(name, run, want, batch)

        variants: dict[str, Callable[[], object]] = {name: graphed(run, made, calls) for name, run in runs.items()}
        if not sweep:
            variants |= {} if products is None else humming(products, made, calls)
            variants |= cublas(bank, calls) if rows == 1 else {}
        yield TimedCase(
            name=f"{rows} rows of {EXPERTS} experts", variants=variants, subject="kvist", check=checked, floor=floor,
            moved_bytes=nbytes, flops=flops, calls=calls,
        )  # fmt: skip
