"""The launches for two to eight rows on a Hopper GPU at released widths: the bits of one row's launches, and float64.

Elsewhere it skips and says so; the same sources run on a processor in `test_few_rows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.gpu_row_cases import Before
    from kvist.kernels.hyper_connections.row import Head

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)

ROWS = range(2, 9)
SHAPES = {
    "wq_a + wkv": (1792, 5120, 1, False),
    "wq_b": (32768, 1280, 1, True),
    "wo_a": (8192, 4096, 8, True),
    "wo_b": (5120, 8192, 1, False),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_projections_of_rows(shape: tuple[int, int, int, bool]) -> None:
    from benchmarks.gpu_weights import random_panels, random_rows
    from kvist.kernels.device import unpack_panels
    from kvist.kernels.device.row import Parts
    from kvist.kernels.linear.row import product_row
    from kvist.kernels.linear.rows import product_rows

    outputs, inputs, groups, whole = shape
    weight = random_panels("fp8", outputs, inputs)
    values = unpack_panels(weight).double().unflatten(0, (groups, -1))

    def all_of(out: Tensor | Parts) -> Tensor:
        return out if isinstance(out, Tensor) else out.whole()

    for rows in ROWS:
        x = random_rows(rows * groups, inputs, rows).view(rows, -1)
        got = all_of(product_rows(x, weight, groups=groups, whole=whole))
        one = [all_of(product_row(x[row : row + 1], weight, groups=groups, whole=whole)) for row in range(rows)]
        assert torch.equal(got, torch.cat(one))
        want = torch.einsum("ngi,goi->ngo", x.double().unflatten(1, (groups, -1)), values).flatten(1)
        # Sums are rounded to bfloat16 once: half a unit in the last of eight bits at most.
        assert float(((got.double() - want).abs() / want.abs().clamp_min(1e-3 * float(want.abs().max()))).max()) < 2**-8
        assert all(torch.equal(all_of(product_rows(x, weight, groups=groups, whole=whole)), got) for _ in range(5))


def before(rows: int) -> Before:
    """Streams, outputs and coefficients of several rows."""
    from benchmarks.gpu_row_cases import Before, D, Source
    from kvist.kernels.hyper_connections import Mix

    source = Source(rows)
    mix = Mix(source.normal(rows, 4).sigmoid(), source.normal(rows, 4).sigmoid(), source.normal(rows, 4, 4).softmax(-1))
    return Before(x_NSD=source.normal(rows, 4, D).bfloat16(), y_ND=source.normal(rows, D).bfloat16(), mix=mix)


def own_before(many: Before, row: int) -> Before:
    from benchmarks.gpu_row_cases import Before
    from kvist.kernels.hyper_connections import Mix

    cut = slice(row, row + 1)
    return Before(x_NSD=many.x_NSD[cut], y_ND=many.y_ND[cut], mix=Mix(*(part[cut] for part in many.mix)))


def same(ours: Head, alone: Head, row: int) -> bool:
    """Whether a row of a pass has the bits of a pass of that row: of each block's 32 sums the logits and the squares are set."""
    a, b, cut = ours.passed, alone.passed, slice(row, row + 1)
    sums = a.sums.view(len(a.x_NSD), -1, 32)[row, :, :25], b.sums.view(-1, 32)[:, :25]
    pairs = ((a.x_NSD[cut], b.x_NSD), (a.h_ND[cut], b.h_ND), sums, (a.squares[cut], b.squares))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_streams_ranks_and_entries_of_rows(rows: int) -> None:
    from benchmarks.gpu_row_cases import EPS, Projections
    from kvist.kernels.linear.row import product_of_parts, product_of_streams
    from kvist.kernels.linear.rows import finish_rows, product_of_streams_rows

    of, many = Projections(1), before(rows)
    angle = torch.rand(rows, 32, device="cuda") * 6
    places = torch.ones(rows, dtype=torch.int32, device="cuda"), torch.arange(rows, device="cuda") + 60
    entry = of.entry._replace(cos_NP=angle.cos(), sin_NP=angle.sin(), slot_N=places[0], cell_N=places[1])
    head = of.head(many)
    parts, normed, quantised = product_of_streams_rows(head, of.enter)
    rank, mix = finish_rows(parts, of.rank_norm, EPS, entry, head)
    written = entry.codes.clone(), entry.scales.clone()
    for row in range(rows):
        cut = slice(row, row + 1)
        alone = of.head(own_before(many, row))
        assert same(head, alone, row)
        own_parts, own_normed, own_quantised = product_of_streams(alone, of.enter)
        entry.codes.zero_()
        entry.scales.zero_()
        own_entry = entry._replace(
            cos_NP=entry.cos_NP[cut], sin_NP=entry.sin_NP[cut], slot_N=places[0][cut], cell_N=places[1][cut]
        )
        _, own_rank, own_mix = product_of_parts(own_parts, of.rank_norm, EPS, of.query, own_entry, alone)
        assert torch.equal(normed[cut], own_normed)
        assert torch.equal(quantised[cut], own_quantised)
        assert torch.equal(parts.whole()[cut], own_parts.whole())
        assert torch.equal(rank[cut], own_rank)
        assert torch.equal(written[0][1, 60 + row], entry.codes[1, 60 + row])
        assert torch.equal(written[1][1, 60 + row], entry.scales[1, 60 + row])
        assert all(torch.equal(mine[cut], theirs) for mine, theirs in zip(mix, own_mix, strict=True))


@pytest.mark.parametrize("experts", [128, 384])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_router_of_rows(rows: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_row_cases
    from kvist.kernels.experts.row import experts_row
    from kvist.kernels.routing.rows import route_rows

    monkeypatch.setattr(gpu_row_cases, "EXPERTS", experts)
    monkeypatch.setattr(gpu_row_cases, "F", 256)
    of, many = gpu_row_cases.Experts(2), before(rows)
    head, r = of.head(many), of.router
    text = torch.arange(rows, device="cuda") % 2 == 0

    def route() -> tuple[Tensor, ...]:
        found = route_rows(
            head,
            r.gate_ED,
            r.bias_text_E,
            r.bias_image_E,
            text,
            k=r.k,
            temperature=r.temperature,
            normalise=r.normalise,
            scale=r.scale,
        )
        return found.quantised_ND, found.ids_NK, found.weights_NK, *found.mix

    got = route()
    for row in range(rows):
        cut = slice(row, row + 1)
        one = experts_row(of.head(own_before(many, row)), r, text[cut], of.routed, of.shared, limit=10.0)
        for mine, theirs in zip(got[1:], (one.ids_NK, one.weights_NK, *one.mix), strict=True):
            assert torch.equal(mine[cut], theirs)
    entered = of.entered(many)
    assert entered.quantised_ND is not None
    assert float((got[0].float() - entered.quantised_ND.float()).norm() / entered.quantised_ND.float().norm()) < 5e-3
    for _ in range(20):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(route(), got, strict=True))
