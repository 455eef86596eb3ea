"""The CUDA kernels of one row, run on a processor: what each launch reads of the one before, sums in parts, the router's choice.

Arithmetic, layouts, rings and barriers between blocks are the sources' own (`cuda_on_cpu.py`); only timing is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight, pack_fp8_panels, unpack_panels
from kvist.kernels.device.row import Parts, counters
from kvist.kernels.experts import experts
from kvist.kernels.experts import row as experts_row_module
from kvist.kernels.experts.row import Router, experts_row, given_experts_row
from kvist.kernels.hyper_connections import Mix, enter, leave
from kvist.kernels.hyper_connections import row as streams_module
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE, Head, Passed, streams_row
from kvist.kernels.linear import linear
from kvist.kernels.linear import row as linear_module
from kvist.kernels.linear.row import Entry, product_of_parts, product_of_streams, product_row
from kvist.kernels.quantise import quantise
from kvist.kernels.routing import route
from kvist.kernels.routing.rows import CHOOSE_SOURCE
from kvist.quant import pack_fp8, quantise_fp8_weight
from tests.kernels.cuda_on_cpu import OnCpu, Together, build
from tests.kernels.expert_banks import Values, bank_of

Builder = Callable[[torch.device], dict[str, Any]]
EPS = 1e-6


def _built(folder: Path, module: str, threads: dict[str, int]) -> dict[str, OnCpu]:
    own = Path(module)
    pieces = {"linear": (linear_module.PIECES_SOURCE,), "experts": (CHOOSE_SOURCE,)}.get(own.parent.name, ())
    return build((STREAM_SOURCE, COLLAPSE_SOURCE, *pieces, own.with_name("row.cu")), threads, folder)


@pytest.fixture(scope="module")
def streams_kernel(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    made = _built(tmp_path_factory.mktemp("streams"), str(streams_module.__file__), {"streams_row": streams_module.THREADS})
    return lambda device: made


@pytest.fixture(scope="module")
def linear_kernels(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    threads = dict.fromkeys(linear_module.MOST_INPUTS, linear_module.THREADS)
    made = _built(tmp_path_factory.mktemp("linear"), str(linear_module.__file__), threads)
    return lambda device: made


@pytest.fixture(scope="module")
def experts_kernel(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    threads = {"experts_row": experts_row_module.THREADS}
    made = _built(tmp_path_factory.mktemp("experts"), str(experts_row_module.__file__), threads)
    return lambda device: {name: Together(kernel) for name, kernel in made.items()}


def fp8(outputs: int, inputs: int) -> PanelWeight:
    return pack_fp8_panels(*quantise_fp8_weight(torch.randn(outputs, inputs) * inputs**-0.5))


def near(got: Tensor, want: Tensor, bound: float = 4e-3) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert float((got.double() - want.double()).norm() / want.double().norm()) < bound


def mix_of() -> Mix:
    return Mix(torch.rand(1, 4), torch.rand(1, 4), torch.rand(1, 4, 4))


def head_of(d: int, passed: Passed) -> Head:
    return Head(passed, torch.randn(24), torch.rand(3), 1 + 0.1 * torch.randn(d), 20, EPS, EPS)


def entry_of(width: int) -> Entry:
    """Slot 2, cell 3 of empty rings."""
    angle = torch.rand(1, 16) * 6
    codes, scales = (torch.zeros(3, 5, size, dtype=torch.uint8) for size in (width, width // 32))
    slot, cell = torch.tensor([2], dtype=torch.int32), torch.tensor([3])
    return Entry(1 + 0.1 * torch.randn(width), angle.cos(), angle.sin(), codes, scales, slot, cell)


def passed_of(d: int, streams_kernel: Builder) -> tuple[Passed, Mix, Tensor]:
    x, mix, fn = torch.randn(1, 4, d).bfloat16(), mix_of(), torch.randn(24, 4 * d) * (4 * d) ** -0.5
    return streams_row(None, x, mix, fn, build=streams_kernel), mix, fn


@pytest.mark.parametrize("d", [64, 320])
def test_streams_are_left_and_entered(d: int, streams_kernel: Builder, linear_kernels: Builder) -> None:
    torch.manual_seed(d)
    x, y, mix = torch.randn(1, 4, d).bfloat16(), torch.randn(1, d).bfloat16(), mix_of()
    fn = torch.randn(24, 4 * d) * (4 * d) ** -0.5
    passed = streams_row(y, x, mix, fn, build=streams_kernel)
    want = leave(y, x, mix)
    near(passed.x_NSD, want)
    head = head_of(d, passed)
    weight, second = fp8(128, d), fp8(64, 64)
    parts, normed, quantised = product_of_streams(head, weight, build=linear_kernels, blocks=3)
    h, coefficients = enter(
        passed.x_NSD, mix.pre_NS, fn, head.base_F, head.scale_3, head.norm_D, iterations=20, hc_eps=EPS, norm_eps=EPS, impl="wide"
    )
    near(normed, h)
    assert torch.equal(quantised, quantise(normed, "fp8"))
    near(parts.whole(), linear(quantised.float(), unpack_panels(weight)))
    entry = entry_of(64)
    after = product_of_parts(parts, torch.ones(64), EPS, second, entry, head, build=linear_kernels, blocks=1)[2]
    for mine, theirs in zip(after, coefficients, strict=True):
        near(mine, theirs, 1e-4)


def test_streams_are_left_by_parts(streams_kernel: Builder) -> None:
    torch.manual_seed(1)
    d, chunks, share = 192, 10, 4
    x, mix, sums = torch.randn(1, 4, d).bfloat16(), mix_of(), torch.full((4, d), float("nan"))
    for panel in range(d // 64):
        last = (panel * chunks + chunks - 1) // share - panel * chunks // share
        sums[: last + 1, panel * 64 : panel * 64 + 64] = torch.randn(last + 1, 64)
    y = Parts(sums, chunks, share)
    got = streams_row(y, x, mix, None, build=streams_kernel).x_NSD
    near(got, leave(y.whole(), x, mix))


@pytest.mark.parametrize(
    ("outputs", "inputs", "groups", "blocks", "whole"),
    [(64, 64, 1, 3, True), (320, 192, 1, 2, True), (256, 128, 4, 4, True), (192, 640, 1, 5, False), (64, 1088, 1, 4, False)],
)
@pytest.mark.parametrize("quantised", [True, False])
def test_row_times_weight(
    outputs: int, inputs: int, groups: int, blocks: int, whole: bool, quantised: bool, linear_kernels: Builder
) -> None:
    torch.manual_seed(outputs)
    weight, x = fp8(outputs, inputs), torch.randn(1, groups * inputs).bfloat16()
    out = product_row(x, weight, groups=groups, quantised=quantised, whole=whole, build=linear_kernels, blocks=blocks)
    want = linear(x.float(), unpack_panels(weight), form=None if quantised else "fp8", groups=groups)
    near(out if isinstance(out, Tensor) else out.whole(), want)


def test_outputs_are_quantised_for_the_next_product(linear_kernels: Builder) -> None:
    torch.manual_seed(5)
    weight, x = fp8(192, 128), torch.randn(1, 128).bfloat16()
    plain, quantised = (product_row(x, weight, quantise=q, build=linear_kernels, blocks=2) for q in (False, True))
    assert isinstance(plain, Tensor)
    assert isinstance(quantised, Tensor)
    assert torch.equal(quantised, quantise(plain, "fp8"))


def test_products_are_exact_where_inputs_differ_widely(linear_kernels: Builder) -> None:
    torch.manual_seed(7)
    weight, x = fp8(64, 640), torch.randn(1, 640) * torch.ldexp(torch.ones(640), torch.randint(-14, 15, (640,)))
    x[0, 64:96], x[0, 97] = 0.0, 3e-30
    parts = product_row(x.bfloat16(), weight, whole=False, build=linear_kernels, blocks=1)
    assert isinstance(parts, Parts)
    want = x.bfloat16().double() @ unpack_panels(weight).double().t()
    sizes = x.bfloat16().double().abs() @ unpack_panels(weight).double().abs().t()
    assert float(((parts.sums[:1].double() - want).abs() / sizes).max()) < 2e-7


def test_stages_filled_behind_the_inputs_change_no_bit(linear_kernels: Builder) -> None:
    torch.manual_seed(6)
    weight, x = fp8(320, 1600), torch.randn(1, 1600).bfloat16()  # 63 chunks a block: rings of eight warps fill again
    early, late = (product_row(x, weight, near=soon, whole=False, build=linear_kernels, blocks=2) for soon in (False, True))
    assert isinstance(early, Parts)
    assert isinstance(late, Parts)
    assert torch.equal(early.whole(), late.whole())
    near(late.whole(), linear(x.float(), unpack_panels(weight)))


def test_blocks_do_not_span_groups(linear_kernels: Builder) -> None:
    with pytest.raises(ValueError, match="a block would span groups"):
        product_row(torch.zeros(1, 128).bfloat16(), fp8(128, 64), groups=2, build=linear_kernels, blocks=1)


def test_rank_and_window_entry(streams_kernel: Builder, linear_kernels: Builder) -> None:
    torch.manual_seed(2)
    rank, width = 192, 128
    first, second, entry = fp8(rank + width, 640), fp8(320, rank), entry_of(width)
    x, norm = torch.randn(1, 640).bfloat16(), 1 + 0.1 * torch.randn(rank)
    parts = product_row(x, first, whole=False, build=linear_kernels, blocks=7)
    assert isinstance(parts, Parts)
    head = head_of(640, passed_of(640, streams_kernel)[0])
    q, ranked, _ = product_of_parts(parts, norm, EPS, second, entry, head, build=linear_kernels, blocks=2)
    both = parts.whole().float()
    normed = [
        (v * torch.rsqrt(v.square().mean(1, keepdim=True) + EPS) * w).bfloat16()
        for v, w in zip(both.split((rank, width), 1), (norm, entry.norm_C), strict=True)
    ]
    near(ranked, quantise(normed[0], "fp8"))
    near(q, linear(ranked.float(), unpack_panels(second)))
    turned = normed[1].float()
    even, odd, cos, sin = turned[:, -32::2].clone(), turned[:, -31::2].clone(), entry.cos_NP, entry.sin_NP
    turned[:, -32::2], turned[:, -31::2] = even * cos - odd * sin, even * sin + odd * cos
    want_codes, want_scales = pack_fp8(turned.bfloat16())
    assert torch.equal(entry.scales[2, 3], want_scales.view(torch.uint8)[0])
    assert int((entry.codes[2, 3] != want_codes.view(torch.uint8)[0]).sum()) <= 1
    entry.codes[2, 3] = entry.scales[2, 3] = 0
    assert not entry.codes.any()
    assert not entry.scales.any()


@pytest.mark.parametrize(
    ("d", "f", "count", "k", "blocks", "with_shared"),
    [(128, 128, 5, 2, 2, True), (384, 256, 8, 3, 3, True), (256, 128, 3, 1, 3, True), (256, 128, 4, 2, 2, False)],
)
def test_experts_of_one_row(
    d: int, f: int, count: int, k: int, blocks: int, with_shared: bool, streams_kernel: Builder, experts_kernel: Builder
) -> None:
    torch.manual_seed(d)
    passed, mix, fn = passed_of(d, streams_kernel)
    head, routed, shared = head_of(d, passed), bank_of("fp4", d, f, count), bank_of("fp8", d, f, 1) if with_shared else None
    router = Router(torch.randn(count, d).bfloat16(), torch.randn(count) * 0.1, torch.randn(count) * 0.1, k, 1.3, True, 1.5)
    text = torch.tensor([True])
    got = experts_row(head, router, text, routed, shared, limit=2.0, build=experts_kernel, blocks=blocks)
    h, coefficients = enter(
        passed.x_NSD, mix.pre_NS, fn, head.base_F, head.scale_3, head.norm_D, iterations=20, hc_eps=EPS, norm_eps=EPS, impl="wide"
    )
    for mine, theirs in zip(got.mix, coefficients, strict=True):
        near(mine, theirs, 1e-4)
    ids, weights = route(
        h.float(), router.gate_ED.float(), router.bias_text_E, router.bias_image_E, text, k=k, temperature=1.3, normalise=True,
        scale=1.5,
    )  # fmt: skip
    assert torch.equal(got.ids_NK, ids)
    near(got.weights_NK, weights, 1e-3)
    x = quantise(h, "fp8")
    triple = None if shared is None else Values(shared).expert(0)
    want = experts(x, ids, weights, Values(routed), limit=2.0, form="fp8", shared=triple, impl="wide")
    near(got.parts.whole(), want, 5e-3)
    again = experts_row(head, router, text, routed, shared, limit=2.0, build=experts_kernel, blocks=blocks)
    assert torch.equal(again.parts.whole(), got.parts.whole())
    assert not counters(routed.gate_up.codes, 1).any()


def test_equal_scores_choose_lower_experts(streams_kernel: Builder, experts_kernel: Builder) -> None:
    torch.manual_seed(3)
    passed, _, _ = passed_of(128, streams_kernel)
    routed, shared = bank_of("fp4", 128, 128, 6), bank_of("fp8", 128, 128, 1)
    bias = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0, 0.0])
    router = Router(torch.zeros(6, 128).bfloat16(), torch.zeros(6), bias, 3, 1.0, False, 1.0)
    got = experts_row(
        head_of(128, passed), router, torch.tensor([False]), routed, shared, limit=5.0, build=experts_kernel, blocks=2
    )
    assert got.ids_NK.tolist() == [[1, 2, 3]]


def test_banks_that_do_not_fit_are_refused(streams_kernel: Builder, experts_kernel: Builder) -> None:
    passed, _, _ = passed_of(128, streams_kernel)
    bank = bank_of("fp4", 128, 128, 2)
    router = Router(torch.zeros(2, 128).bfloat16(), torch.zeros(2), torch.zeros(2), 1, 1.0, True, 1.0)
    with pytest.raises(ValueError, match="do not fit one launch"):
        experts_row(head_of(128, passed), router, torch.tensor([True]), bank, bank, limit=5.0, build=experts_kernel, blocks=2)


@pytest.mark.parametrize(("d", "f", "k", "blocks"), [(128, 128, 3, 1), (256, 128, 2, 3), (384, 256, 4, 5), (128, 384, 6, 7)])
def test_given_experts_of_one_row(d: int, f: int, k: int, blocks: int, experts_kernel: Builder) -> None:
    torch.manual_seed(d + f)
    routed = bank_of("fp4", d, f, 8)
    x, weights = quantise(torch.randn(1, d).bfloat16(), "fp8"), torch.rand(1, k)
    ids = torch.randperm(8)[:k].sort().values.view(1, k)
    for _ in range(2):
        got = given_experts_row(x, ids, weights, routed, limit=2.0, build=experts_kernel, blocks=blocks)
        near(got, experts(x, ids, weights, Values(routed), limit=2.0, form="fp8", impl="wide"), 5e-3)
        assert not counters(routed.gate_up.codes, 1).any()
        ids[0, 1] = -1
