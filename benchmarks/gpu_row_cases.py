"""Cases of `gpu-row` (imported only where Triton is): one row, weights in turn so that L2 holds none, old launches beside.

The experts' half: pass over the streams, norm, router, six of 128 experts, the shared one. The projections: pass, wq_a + wkv,
window entry, wq_b, wo_a, wo_b, without the attention between. Hopper only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Options, TimedCase
from benchmarks.gpu_timing import calls_for, floor_us, graphed, require_equal, require_near
from benchmarks.gpu_weights import random_panels, random_rows
from kvist.kernels.device import PanelWeight
from kvist.kernels.device.row import Parts
from kvist.kernels.experts.gpu import GpuBank, run_bank, run_shared
from kvist.kernels.experts.row import Router, experts_row
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import Entered, pass_gpu
from kvist.kernels.hyper_connections.row import Head, streams_row
from kvist.kernels.linear.gpu import linear_gpu
from kvist.kernels.linear.row import Entry, product_of_parts, product_of_streams, product_row
from kvist.kernels.quantise.gpu import rows_gpu, write_rows
from kvist.kernels.routing.gpu import route_gpu

D, F, EXPERTS, K, RANK, ENTRY, LIMIT, EPS = 5120, 2304, 128, 6, 1280, 512, 10.0, 1e-6
ITERATIONS, GROUPS, PAIRS = 20, 8, 32


@dataclass(frozen=True, kw_only=True)
class Before:
    """What a half is given: streams, the output to fold in, coefficients."""

    x_NSD: Tensor
    y_ND: Tensor
    mix: Mix


class Source:
    """Random tensors of one seed on the device."""

    def __init__(self, seed: int) -> None:
        self.seed, self.source = seed, torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """float32."""
        return torch.randn(*shape, device="cuda", generator=self.source)

    def norm(self, width: int) -> Tensor:
        """Norm weights near one."""
        return 1 + 0.05 * self.normal(width)


class Sublayer:
    """Hyper-connection weights of one sublayer."""

    def __init__(self, source: Source) -> None:
        self.fn = source.normal(24, 4 * D) * (4 * D) ** -0.5
        self.base, self.scale, self.norm = source.normal(24) * 0.5, source.norm(3), source.norm(D)

    def head(self, before: Before) -> Head:
        """By the launch for one row."""
        passed = streams_row(before.y_ND, before.x_NSD, before.mix, self.fn)
        return Head(passed, self.base, self.scale, self.norm, ITERATIONS, EPS, EPS)

    def entered(self, before: Before) -> Entered:
        """By the launches for any rows."""
        return pass_gpu(
            before.y_ND, before.x_NSD, before.mix, self.fn, self.base, self.scale, self.norm, iterations=ITERATIONS, hc_eps=EPS,
            norm_eps=EPS, quantised=True,
        )  # fmt: skip


class Experts(Sublayer):
    """The experts' half of a layer."""

    def __init__(self, seed: int) -> None:
        source = Source(seed)
        super().__init__(source)
        up, down = (2 * F, D), (D, F)
        self.routed = GpuBank(
            random_panels("fp4", *up, experts=EXPERTS, paired=True, seed=seed),
            random_panels("fp4", *down, experts=EXPERTS, seed=seed),
        )
        self.shared = GpuBank(random_panels("fp8", *up, paired=True, seed=seed), random_panels("fp8", *down, seed=seed))
        bias = source.normal(EXPERTS) * 0.02
        self.router = Router((source.normal(EXPERTS, D) * D**-0.5).bfloat16(), bias, bias, K, 1.0, True, 1.5)
        self.text = torch.ones(1, dtype=torch.bool, device="cuda")

    @property
    def nbytes(self) -> float:
        """Bytes that one row reads."""
        chosen = K * (self.routed.gate_up.nbytes + self.routed.down.nbytes) / EXPERTS
        return chosen + self.shared.gate_up.nbytes + self.shared.down.nbytes + self.fn.nbytes + self.router.gate_ED.nbytes

    def fused(self, before: Before) -> tuple[Tensor, Tensor, Parts]:
        """Ids, weights, and the output in parts."""
        out = experts_row(self.head(before), self.router, self.text, self.routed, self.shared, limit=LIMIT)
        return out.ids_NK, out.weights_NK, out.parts

    def apart(self, before: Before) -> tuple[Tensor, Tensor, Tensor]:
        """The same by operators that take any rows."""
        at, r = self.entered(before), self.router
        assert at.quantised_ND is not None
        ids, weights = route_gpu(
            at.h_ND, r.gate_ED, r.bias_text_E, r.bias_image_E, self.text, k=K, temperature=1.0, normalise=True, scale=1.5
        )
        routed = run_bank(at.quantised_ND, ids, weights, self.routed, LIMIT, "fp8")
        out = torch.add(routed, run_shared(at.quantised_ND, self.shared, LIMIT, "fp8"), out=torch.empty_like(at.h_ND))
        return ids, weights, out


class Projections(Sublayer):
    """The attention half of a layer without attention."""

    def __init__(self, seed: int) -> None:
        source = Source(seed)
        super().__init__(source)
        self.enter, self.query = self._panels(RANK + ENTRY, D), self._panels(32768, RANK)
        self.out_a, self.out_b = self._panels(8192, 4096), self._panels(D, 8192)
        angle = source.normal(1, PAIRS)
        codes, scales = (torch.zeros(2, 128, size, dtype=torch.uint8, device="cuda") for size in (ENTRY, ENTRY // 32))
        slot, cell = torch.ones(1, dtype=torch.int32, device="cuda"), torch.full((1,), 77, device="cuda")
        self.rank_norm = source.norm(RANK)
        self.entry = Entry(source.norm(ENTRY), angle.cos(), angle.sin(), codes, scales, slot, cell)

    def _panels(self, outputs: int, inputs: int) -> PanelWeight:
        return random_panels("fp8", outputs, inputs, seed=outputs + inputs)

    @property
    def nbytes(self) -> float:
        """Bytes that one row reads."""
        return sum(w.nbytes for w in (self.enter, self.query, self.out_a, self.out_b)) + self.fn.nbytes

    def fused(self, before: Before) -> tuple[Tensor, Tensor, Parts]:
        """Query, rank, and the output in parts."""
        head = self.head(before)
        parts, _, _ = product_of_streams(head, self.enter)
        query, rank, _ = product_of_parts(parts, self.rank_norm, EPS, self.query, self.entry, head)
        narrow = product_row(query, self.out_a, groups=GROUPS, quantise=True)
        assert isinstance(narrow, Tensor)
        out = product_row(narrow, self.out_b, whole=False)
        assert isinstance(out, Parts)
        return query, rank, out

    def apart(self, before: Before) -> tuple[Tensor, Tensor, Tensor]:
        """The same by operators that take any rows."""
        at, e = self.entered(before), self.entry
        assert at.quantised_ND is not None
        both = linear_gpu(at.quantised_ND, self.enter, None, 1)
        rank = rows_gpu(both[:, :RANK], form="fp8", norm=(self.rank_norm, EPS))
        query = linear_gpu(rank, self.query, None, 1)
        write_rows(
            both[:, RANK:], e.codes, e.scales, e.slot_N, e.cell_N, form="fp8", norm=(e.norm_C, EPS), table=(e.cos_NP, e.sin_NP)
        )
        return query, rank, linear_gpu(linear_gpu(query, self.out_a, None, GROUPS), self.out_b, "fp8", 1)


def case(name: str, halves: list[Experts] | list[Projections]) -> TimedCase:
    """One half, its weights in turn."""
    mix = Mix(*(torch.rand(1, *shape, device="cuda") / 4 for shape in ((4,), (4,), (4, 4))))
    before = Before(x_NSD=random_rows(4, D, 1).view(1, 4, D), y_ND=random_rows(1, D, 2), mix=mix)
    floor = floor_us(halves[0].nbytes)
    calls = calls_for(floor)

    def check() -> None:
        want, got = halves[0].apart(before), halves[0].fused(before)
        parts: list[tuple[str, Tensor, Tensor]] = [
            ("first", got[0], want[0]), ("second", got[1], want[1]), ("output", got[2].whole(), want[2]),
        ]  # fmt: skip
        for part, mine, theirs in parts:
            require_near(f"{name}: {part}", mine.float(), theirs.float(), 3e-3)
        for _ in range(20):
            require_equal(f"{name}: repeated", halves[0].fused(before)[2].whole(), got[2].whole())

    def run(how: str) -> Callable[[], None]:
        return graphed(lambda half: getattr(half, how)(before), halves, calls)

    return TimedCase(
        name=name, variants={"kvist": run("fused"), "operators for any rows": run("apart")}, subject="kvist", check=check,
        floor=floor, moved_bytes=halves[0].nbytes, calls=calls,
    )  # fmt: skip


def build(options: Options) -> Iterator[TimedCase]:
    """Both halves; quick: the projections."""
    yield case("projections of a layer, one row", [Projections(seed) for seed in range(8)])
    if not options.quick:
        yield case("experts' half of a layer, one row", [Experts(seed) for seed in range(4)])
