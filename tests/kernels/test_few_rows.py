"""The CUDA kernels of two to eight rows, run on a processor: every row's bits are those of the launches for one row.

What one row's launches compute is `test_row_kernels.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.row import Parts, counters
from kvist.kernels.experts import row as experts_module
from kvist.kernels.experts.row import Router, experts_row
from kvist.kernels.hyper_connections import Mix, enter
from kvist.kernels.hyper_connections import row as streams_module
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE, Head, Passed, streams_row
from kvist.kernels.linear import row as row_module
from kvist.kernels.linear import rows as rows_module
from kvist.kernels.linear.row import PIECES_SOURCE, Entry, product_of_parts, product_of_streams, product_row
from kvist.kernels.linear.rows import finish_rows, product_of_streams_rows, product_rows
from kvist.kernels.quantise import quantise
from kvist.kernels.routing import rows as router_module
from kvist.kernels.routing.rows import CHOOSE_SOURCE, route_rows
from tests.kernels.cuda_on_cpu import Together, build
from tests.kernels.expert_banks import bank_of
from tests.kernels.test_row_kernels import EPS, fp8

Builder = Callable[[torch.device], dict[str, Any]]


def builder(folder: Path, *sources: Path, kernels: tuple[str, ...]) -> Builder:
    made = build((STREAM_SOURCE, *sources), dict.fromkeys(kernels, 256), folder)
    return lambda device: made


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    own = Path(str(streams_module.__file__)).with_name("row.cu")
    return builder(tmp_path_factory.mktemp("streams"), own, kernels=("streams_row",))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    own = PIECES_SOURCE.with_name("row.cu")
    return builder(tmp_path_factory.mktemp("one"), COLLAPSE_SOURCE, PIECES_SOURCE, own, kernels=tuple(row_module.MOST_INPUTS))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    own = PIECES_SOURCE.with_name("rows.cu")
    return builder(tmp_path_factory.mktemp("several"), COLLAPSE_SOURCE, PIECES_SOURCE, own, kernels=rows_module.KERNELS)


def together(folder: Path, *sources: Path, name: str, threads: int) -> Builder:
    """A kernel whose blocks wait for each other."""
    made = build((STREAM_SOURCE, COLLAPSE_SOURCE, CHOOSE_SOURCE, *sources), {name: threads}, folder)
    return lambda device: {name: Together(kernel) for name, kernel in made.items()}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    own, folder = CHOOSE_SOURCE.with_name("rows.cu"), tmp_path_factory.mktemp("router")
    return together(folder, own, name="route_rows", threads=router_module.THREADS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    own, folder = Path(str(experts_module.__file__)).with_name("row.cu"), tmp_path_factory.mktemp("alone")
    return together(folder, own, name="experts_row", threads=experts_module.THREADS)


def of_row(out: Tensor | Parts, row: int) -> Tensor:
    """A row's outputs, whole."""
    return out[row : row + 1] if isinstance(out, Tensor) else out.whole()[row : row + 1]


def mix_of(rows: int) -> Mix:
    return Mix(torch.rand(rows, 4), torch.rand(rows, 4), torch.rand(rows, 4, 4))


def own_mix(mix: Mix, row: int) -> Mix:
    return Mix(*(part[row : row + 1] for part in mix))


def own_head(head: Head, row: int) -> Head:
    """One row's part of a pass."""
    p, blocks = head.passed, head.passed.squares.shape[1]
    sums = p.sums[32 * blocks * row : 32 * blocks * (row + 1)]
    cut = slice(row, row + 1)
    return head._replace(passed=Passed(p.x_NSD[cut], p.h_ND[cut], sums, p.squares[cut]))


def set_of(passed: Passed) -> tuple[Tensor, ...]:
    """What a pass writes: of each block's 32 sums the logits and the squares."""
    return passed.x_NSD, passed.h_ND, passed.sums.view(-1, 32)[:, :25], passed.squares


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "groups", "blocks", "whole", "near"),
    [
        (64, 64, 1, 3, True, False), (320, 192, 1, 2, True, True), (256, 128, 4, 4, True, False), (192, 640, 1, 5, False, True),
        (64, 1088, 1, 4, False, False), (320, 1600, 1, 2, False, True),
    ],
)  # fmt: skip
def test_rows_times_weight(
    rows: int, outputs: int, inputs: int, groups: int, blocks: int, whole: bool, near: bool, one: Builder, several: Builder
) -> None:
    torch.manual_seed(outputs + rows)
    weight, x = fp8(outputs, inputs), torch.randn(rows, groups * inputs).bfloat16()
    got = product_rows(x, weight, groups=groups, whole=whole, near=near, build=several, blocks=blocks)
    for row in range(rows):
        want = product_row(x[row : row + 1], weight, groups=groups, whole=whole, build=one, blocks=blocks)
        assert torch.equal(of_row(got, row), of_row(want, 0))


@pytest.mark.parametrize("form", rows_module.FORMS)
def test_forms_have_the_same_bits(form: tuple[int, int], several: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(8)
    weight, x = fp8(320, 1600), torch.randn(4, 1600).bfloat16()  # 63 chunks a block: rings fill again
    want = product_rows(x, weight, whole=False, build=several, blocks=2)
    monkeypatch.setattr(rows_module, "FORMS", (form,))
    got = product_rows(x, weight, whole=False, build=several, blocks=2)
    assert isinstance(got, Parts)
    assert isinstance(want, Parts)
    assert torch.equal(got.whole(), want.whole())


def test_outputs_are_quantised_for_the_next_product(one: Builder, several: Builder) -> None:
    torch.manual_seed(5)
    weight, x = fp8(192, 128), torch.randn(6, 128).bfloat16()
    got = product_rows(x, weight, quantise=True, build=several, blocks=2)
    for row in range(6):
        want = product_row(x[row : row + 1], weight, quantise=True, build=one, blocks=2)
        assert torch.equal(of_row(got, row), of_row(want, 0))


def test_a_row_with_nan_stays_alone(several: Builder) -> None:
    torch.manual_seed(6)
    weight, x = fp8(128, 192), torch.randn(5, 192).bfloat16()
    clean = product_rows(x, weight, build=several, blocks=2)
    x[2, 70] = float("nan")
    spoilt = product_rows(x, weight, build=several, blocks=2)
    assert isinstance(clean, Tensor)
    assert isinstance(spoilt, Tensor)
    assert bool(spoilt[2].isnan().any())
    others = [0, 1, 3, 4]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize(("d", "blocks"), [(64, 3), (320, 7), (640, 2)])
def test_streams_to_coefficients(rows: int, d: int, blocks: int, streams: Builder, one: Builder, several: Builder) -> None:
    torch.manual_seed(d + rows)
    rank, width = 192, 128
    x, y, mix = torch.randn(rows, 4, d).bfloat16(), torch.randn(rows, d).bfloat16(), mix_of(rows)
    fn, enter, query = torch.randn(24, 4 * d) * (4 * d) ** -0.5, fp8(rank + width, d), fp8(128, rank)
    passed = streams_row(y, x, mix, fn, build=streams)
    head = Head(passed, torch.randn(24), torch.rand(3), 1 + 0.1 * torch.randn(d), 20, EPS, EPS)
    parts, normed, quantised = product_of_streams_rows(head, enter, build=several, blocks=blocks)
    norms, angle = (1 + 0.1 * torch.randn(rank), 1 + 0.1 * torch.randn(width)), torch.rand(rows, 16) * 6
    places = torch.arange(rows, dtype=torch.int32) % 3, torch.arange(rows) % 5
    rings = [torch.zeros(3, 5, size, dtype=torch.uint8) for size in (width, width // 32)]
    entry = Entry(norms[1], angle.cos(), angle.sin(), rings[0], rings[1], *places)
    ranked, after = finish_rows(parts, norms[0], EPS, entry, head, build=several)
    for row in range(rows):
        cut = slice(row, row + 1)
        alone = streams_row(y[cut], x[cut], own_mix(mix, row), fn, build=streams)
        own = own_head(head, row)
        for mine, theirs in zip(set_of(own.passed), set_of(alone), strict=True):
            assert torch.equal(mine, theirs)
        own_parts, own_normed, own_quantised = product_of_streams(own, enter, build=one, blocks=blocks)
        assert torch.equal(normed[cut], own_normed)
        assert torch.equal(quantised[cut], own_quantised)
        assert torch.equal(of_row(parts, row), own_parts.whole())
        again = [torch.zeros_like(ring) for ring in rings]
        own_entry = Entry(norms[1], angle.cos()[cut], angle.sin()[cut], again[0], again[1], places[0][cut], places[1][cut])
        _, own_rank, own_after = product_of_parts(own_parts, norms[0], EPS, query, own_entry, own, build=one, blocks=2)
        assert torch.equal(ranked[cut], own_rank)
        slot, cell = int(places[0][row]), int(places[1][row])
        assert all(torch.equal(ring[slot, cell], other[slot, cell]) for ring, other in zip(rings, again, strict=True))
        for mine, theirs in zip(after, own_after, strict=True):
            assert torch.equal(mine[cut], theirs)


def test_streams_are_left_by_parts(streams: Builder) -> None:
    torch.manual_seed(1)
    rows, d, chunks, share = 3, 192, 10, 4
    x, mix, sums = torch.randn(rows, 4, d).bfloat16(), mix_of(rows), torch.randn(4, rows, d)
    got = streams_row(Parts(sums, chunks, share), x, mix, None, build=streams).x_NSD
    for row in range(rows):
        cut = slice(row, row + 1)
        alone = Parts(sums[:, row].contiguous(), chunks, share)
        assert torch.equal(got[cut], streams_row(alone, x[cut], own_mix(mix, row), None, build=streams).x_NSD)


def test_rows_that_do_not_fit_are_refused(several: Builder) -> None:
    weight = fp8(64, 64)
    for rows in (1, 9):
        with pytest.raises(ValueError, match="one launch takes 2 to 8 rows"):
            product_rows(torch.zeros(rows, 64).bfloat16(), weight, build=several, blocks=1)
    with pytest.raises(ValueError, match="a block would span groups"):
        product_rows(torch.zeros(2, 128).bfloat16(), fp8(128, 64), groups=2, build=several, blocks=1)


@pytest.mark.parametrize(("rows", "d", "experts", "k", "blocks"), [(2, 128, 12, 3, 12), (5, 256, 4, 2, 8), (8, 384, 24, 4, 8)])
def test_router_of_rows(
    rows: int, d: int, experts: int, k: int, blocks: int, streams: Builder, router: Builder, alone: Builder
) -> None:
    torch.manual_seed(d)
    x, mix, fn = torch.randn(rows, 4, d).bfloat16(), mix_of(rows), torch.randn(24, 4 * d) * (4 * d) ** -0.5
    head = Head(
        streams_row(None, x, mix, fn, build=streams), torch.randn(24), torch.rand(3), 1 + 0.1 * torch.randn(d), 20, EPS, EPS
    )
    gate, text = torch.randn(experts, d).bfloat16(), torch.arange(rows) % 2 == 0
    biases = torch.randn(experts) * 0.1, torch.randn(experts) * 0.1
    numbers: dict[str, Any] = {"k": k, "temperature": 1.3, "normalise": True, "scale": 1.5}
    got = route_rows(head, gate, *biases, text, **numbers, build=router, blocks=blocks)
    assert not counters(gate, 1).any()
    routed = bank_of("fp4", d, 128, experts)
    for row in range(rows):
        own = own_head(head, row)
        want = experts_row(
            own,
            Router(gate, *biases, k, 1.3, True, 1.5),
            text[row : row + 1],
            routed,
            None,
            limit=2.0,
            build=alone,
            blocks=blocks,
        )
        assert torch.equal(got.ids_NK[row], want.ids_NK[0])
        assert torch.equal(got.weights_NK[row], want.weights_NK[0])
        for mine, theirs in zip(got.mix, want.mix, strict=True):
            assert torch.equal(mine[row : row + 1], theirs)
    h, _ = enter(
        head.passed.x_NSD,
        mix.pre_NS,
        fn,
        head.base_F,
        head.scale_3,
        head.norm_D,
        iterations=20,
        hc_eps=EPS,
        norm_eps=EPS,
        impl="wide",
    )
    assert float((got.quantised_ND.float() - quantise(h, "fp8").float()).norm() / h.float().norm()) < 4e-3
