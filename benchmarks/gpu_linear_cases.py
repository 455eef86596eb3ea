"""Cases of `gpu-linear` (imported only where Triton is): released FP8 projections for one to 4,096 rows.

Weights are rotated so that L2 holds none; the peer, cuBLAS on bfloat16, reads twice our bytes and decodes nothing. One row to
eight on Hopper are what decode steps run (`linear/row.cu`, `rows.cu`): sums stay in parts where whole panels would not fill the
card evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases import Options, TimedCase
from benchmarks.gpu_timing import calls_for, copies_for, floor_us, graphed, require_equal, require_near
from benchmarks.gpu_weights import random_panels, random_rows
from kvist.kernels.device import PanelWeight, unpack_panels
from kvist.kernels.device.pages import multiprocessors
from kvist.kernels.device.row import Parts, on_hopper
from kvist.kernels.linear.gpu import ONE, Cut, cut_for, linear_gpu, product_gpu
from kvist.kernels.linear.row import product_row
from kvist.kernels.linear.rows import fits, product_rows

SHAPES = {
    "wq_a + wkv": (1792, 5120, 1),
    "wq_b": (32768, 1280, 1),
    "wo_a, 8 groups": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1),
    "engram wkv": (25600, 6144, 1),
    "shared w1 + w3": (4608, 5120, 1),
    "shared w2": (5120, 2304, 1),
}
CUTS = {1: [ONE._replace(programs=264)], 4096: [Cut(128, 2, 0, 8, 3)]}


def call(groups: int, cut: Cut) -> Callable[[tuple[Tensor, PanelWeight]], Tensor]:
    """One product cut as given."""
    return lambda item: product_gpu(item[0], item[1], groups, cut)


def chosen(groups: int, rows: int) -> Callable[[tuple[Tensor, PanelWeight]], Tensor | Parts]:
    """The product as a pass of so many rows runs it."""

    def run(item: tuple[Tensor, PanelWeight]) -> Tensor | Parts:
        x_NI, weight = item
        panels, blocks = weight.codes.shape[1], multiprocessors(x_NI.device)
        whole = groups > 1 or panels > 0.9 * blocks * -(-panels // blocks)
        if rows == 1 and on_hopper(x_NI):
            return product_row(x_NI, weight, groups=groups, whole=whole)
        if on_hopper(x_NI) and fits(rows, weight, blocks, whole=whole):
            return product_rows(x_NI, weight, groups=groups, whole=whole)
        return linear_gpu(x_NI, weight, None, groups)

    return run


def summed(out: Tensor | Parts) -> Tensor:
    """The outputs, where they are in parts."""
    return out.whole() if isinstance(out, Parts) else out


def cublas(groups: int) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """The same product on a bfloat16 matrix."""

    def run(item: tuple[Tensor, Tensor]) -> Tensor:
        x_NI, w_OI = item
        if groups == 1:
            return F.linear(x_NI, w_OI)
        return torch.einsum("ngi,goi->ngo", x_NI.unflatten(1, (groups, -1)), w_OI.unflatten(0, (groups, -1)))

    return run


def case(name: str, shape: tuple[int, int, int], rows: int) -> TimedCase:
    """A projection for a number of rows, our cuts and the peer."""
    outputs, inputs, groups = shape
    nbytes = outputs * inputs * (1 + 4 / 4096) + 2 * rows * (outputs + groups * inputs)
    flops = 2.0 * rows * outputs * inputs
    floor = floor_us(nbytes, flops)
    calls = calls_for(floor)
    count = min(calls, copies_for(outputs * inputs)) if rows <= 64 else 2
    x = random_rows(rows * groups, inputs, 1).view(rows, -1)
    items = [(x, random_panels("fp8", outputs, inputs, seed=seed)) for seed in range(count)]
    cuts = [cut_for(rows, items[0][1], groups), *CUTS.get(rows, [])]
    runs: dict[str, Callable[[tuple[Tensor, PanelWeight]], Tensor | Parts]] = {"kvist": chosen(groups, rows)}
    runs |= {str(tuple(cut)): call(groups, cut) for cut in cuts}
    few = [(x, unpack_panels(weight).bfloat16()) for _, weight in items[: max(2, count // 2)]]

    def check() -> None:
        want = cublas(groups)((few[0][0].double(), few[0][1].double())).flatten(1)
        for name, run in runs.items():
            got = summed(run(items[0]))
            require_near(name, got, want, 4e-3)
            for _ in range(20):
                require_equal(f"{name}: repeated", summed(run(items[0])), got)

    variants: dict[str, Callable[[], object]] = {name: graphed(run, items, calls) for name, run in runs.items()}
    variants["cuBLAS bf16"] = graphed(cublas(groups), few, calls)
    return TimedCase(
        name=f"{name} {outputs} x {inputs}, {rows} rows", variants=variants, subject="kvist", check=check, floor=floor,
        moved_bytes=nbytes, flops=flops, calls=calls,
    )  # fmt: skip


def build(options: Options) -> Iterator[TimedCase]:
    """Every projection at every number of rows; quick: two projections, one row."""
    for name, shape in list(SHAPES.items())[: 2 if options.quick else None]:
        for rows in (1,) if options.quick else (1, 2, 4, 8, 16, 64, 4096):
            yield case(name, shape, rows)
