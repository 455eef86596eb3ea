"""Cases of `gpu-streams` (imported only where Triton is): hyper-connections in one pass, the router, cache rows.

Floors are bytes; for one row each of these is a matter of latency. Nothing fused is published for Hopper, so the peer is
torch, launch by launch in the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.cases import Options, TimedCase, WrongResult
from benchmarks.gpu_timing import calls_for, copies_for, floor_us, graphed, require_equal, require_near
from kvist.kernels import hyper_connections
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import FEW, MANY, ONE, Cut, pass_gpu
from kvist.kernels.quantise.gpu import write_rows
from kvist.kernels.routing import route
from kvist.quant import INDEX_KEY, MAIN_ENTRY, WINDOW_ENTRY

D = 5120
CUTS = {
    1: [ONE._replace(step=32, programs=160)],
    64: [FEW._replace(programs=640)],
    4096: [MANY._replace(programs=512)],
}
Pass = tuple[Tensor, Tensor, Mix, tuple[Tensor, ...]]


def inputs(rows: int, seed: int) -> Pass:
    """An output, streams, coefficients and the weights of the next sublayer."""
    source = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=source)

    mix = Mix(normal(rows, 4).sigmoid(), 2 * normal(rows, 4).sigmoid(), normal(rows, 4, 4).softmax(2))
    weights = normal(24, 4 * D) * 0.02, normal(24), normal(3).abs() + 0.5, normal(D).abs()
    return normal(rows, D).bfloat16(), normal(rows, 4, D).bfloat16(), mix, weights


def call(cut: Cut | None) -> Callable[[Pass], tuple[Tensor, ...]]:
    """Leave and enter, with the normed input and its FP8 form."""

    def run(item: Pass) -> tuple[Tensor, ...]:
        y, x, mix, weights = item
        done = pass_gpu(y, x, mix, *weights, iterations=20, hc_eps=1e-6, norm_eps=1e-20, quantised=True, cut=cut)
        assert done.quantised_ND is not None
        return done.x_NSD, done.h_ND, done.quantised_ND, *done.mix

    return run


def reference(item: Pass) -> tuple[Tensor, ...]:
    """The same by torch."""
    y, x, mix, weights = item
    streams, h, after = hyper_connections.step(y, x, mix, *weights, iterations=20, hc_eps=1e-6, norm_eps=1e-20)
    return streams, h, *after


def streams_case(rows: int) -> TimedCase:
    """One sublayer's pass; its weight is float32 and 1.97 MB."""
    nbytes = 24 * 4 * D * 4 + rows * 2 * D * (4 + 1 + 4 + 1 + 1)
    floor = floor_us(nbytes)
    calls = calls_for(floor) // 8 * 8
    items = [inputs(rows, seed) for seed in range(min(calls, copies_for(nbytes)))]
    runs = {"kvist": call(None)} | {str(tuple(cut)): call(cut) for cut in CUTS[rows]}

    def check() -> None:
        for name, run in runs.items():
            got = run(items[0])
            y, x, mix, weights = items[0]
            streams = hyper_connections.leave(y, x, mix)
            require_near(f"{name}: streams", got[0], streams, 2e-3)
            h, want = hyper_connections.enter(
                got[0], mix.pre_NS, *weights, iterations=20, hc_eps=1e-6, norm_eps=1e-20, impl="wide"
            )
            require_near(f"{name}: input", got[1], h, 4e-3)
            for mine, theirs in zip(got[3:], want, strict=True):
                require_near(f"{name}: coefficients", mine, theirs, 1e-4)
            for _ in range(20):
                for first, again in zip(got, run(items[0]), strict=True):
                    require_equal(f"{name}: repeated", again, first)

    variants: dict[str, Callable[[], object]] = {name: graphed(run, items, calls) for name, run in runs.items()}
    few = graphed(reference, items[:2], 8)
    variants["torch"] = lambda: [few() for _ in range(calls // 8)]
    return TimedCase(
        name=f"hyper-connections, {rows} rows", variants=variants, subject="kvist", check=check, floor=floor, moved_bytes=nbytes,
        calls=calls,
    )  # fmt: skip


def router_case(rows: int, experts: int) -> TimedCase:
    """Scores, choice and weights; the gate is bfloat16."""
    source = torch.Generator("cuda").manual_seed(rows)
    nbytes = 2 * D * (experts + rows)
    floor = floor_us(nbytes)
    calls = calls_for(floor)
    gates = [
        (torch.randn(experts, D, device="cuda", generator=source) * 0.02).bfloat16()
        for _ in range(min(calls, copies_for(nbytes)))
    ]
    x = torch.randn(rows, D, device="cuda", generator=source).bfloat16()
    bias = torch.randn(experts, device="cuda", generator=source) * 0.1
    text = torch.ones(rows, dtype=torch.bool, device="cuda")

    def choose(impl: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def run(gate: Tensor) -> tuple[Tensor, Tensor]:
            return route(x, gate, bias, bias, text, k=6, temperature=1.0, normalise=True, scale=1.5, impl=impl)

        return run

    def check() -> None:
        """Other experts only where the scores of the reference are within rounding of each other."""
        ids, weights = choose("gpu")(gates[0])
        want_ids, want = choose("wide")(gates[0])
        same = (ids == want_ids).all(1)
        if float(same.float().mean()) < 0.99:
            raise WrongResult(f"router: {int((~same).sum())} of {rows} rows choose other experts")
        require_near("router weights", weights[same], want[same], 1e-4)

    variants: dict[str, Callable[[], object]] = {"kvist": graphed(choose("gpu"), gates, calls)}
    logits = graphed(lambda gate: (x @ gate.T).float().topk(6, 1), gates, calls)
    variants["cuBLAS logits + torch.topk"] = logits
    return TimedCase(
        name=f"router, {rows} rows, {experts} experts", variants=variants, subject="kvist", check=check, floor=floor,
        moved_bytes=nbytes, calls=calls,
    )  # fmt: skip


def rows_case(rows: int) -> TimedCase:
    """A window entry (528 bytes), a main row (288) and an index key (68) of every row: norm, rotation, format, write."""
    source = torch.Generator("cuda").manual_seed(rows)
    formats = {"fp8": (WINDOW_ENTRY, 512), "main_fp4": (MAIN_ENTRY, 512), "mxfp4": (INDEX_KEY, 128)}
    nbytes = rows * sum(2 * width + form.row_bytes(width) for form, width in formats.values())
    calls = calls_for(floor_us(nbytes))
    angle = torch.rand(rows, 32, device="cuda", generator=source) * 100
    table = angle.cos(), angle.sin()
    page = torch.arange(rows, device="cuda", dtype=torch.int32) // 128
    at = torch.arange(rows, device="cuda", dtype=torch.int32) % 128
    made = {}
    for name, (form, width) in formats.items():
        x = torch.randn(rows, width, device="cuda", generator=source).bfloat16()
        weight = torch.rand(width, device="cuda", generator=source)
        shape = (-(-rows // 128), 128)
        codes, scales = (
            torch.zeros(*shape, size, dtype=torch.uint8, device="cuda")
            for size in (form.code_bytes(width), form.scale_bytes(width))
        )
        made[name] = x, weight, codes, scales

    def run(_: int) -> None:
        for name, (x, weight, codes, scales) in made.items():
            write_rows(x, codes, scales, page, at, form=name, norm=(weight, 1e-20), table=table)

    def check() -> None:
        for name, (form, width) in formats.items():
            x, _, codes, scales = made[name]
            write_rows(x, codes, scales, page, at, form=name)
            want = form.to_bytes(x)
            got = torch.cat((codes.flatten(0, 1)[:rows], scales.flatten(0, 1)[:rows]), 1)
            require_equal(f"{name} rows of {width}", got, want)

    return TimedCase(
        name=f"cache rows, {rows} rows x 3 formats", variants={"kvist": graphed(run, [0, 1], calls)}, subject="kvist",
        check=check, floor=floor_us(nbytes), moved_bytes=nbytes, calls=calls,
    )  # fmt: skip


def build(options: Options) -> Iterator[TimedCase]:
    """One, 64 and 4,096 rows of each."""
    for rows in (1, 64) if options.quick else (1, 64, 4096):
        yield streams_case(rows)
        for experts in (128, 384):
            yield router_case(rows, experts)
        yield rows_case(rows)
