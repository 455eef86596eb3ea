"""GPU hyper-connections and routing against the reference: coefficients, streams, normed inputs, choices and their ties.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvist.kernels import hyper_connections
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.quantise import quantise
from kvist.kernels.routing import route

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def near(got: Tensor, want: Tensor, bound: float) -> bool:
    return float((got.cpu().double() - want.double()).norm() / want.double().norm()) < bound


def sublayer(rows: int, width: int) -> tuple[Tensor, Tensor, Mix, tuple[Tensor, ...]]:
    """An output, streams, coefficients that a sublayer could have, and the weights of the next one."""
    torch.manual_seed(rows + width)
    x, y = (torch.randn(rows, 4, width) * 3).bfloat16(), torch.randn(rows, width).bfloat16()
    mix = Mix(torch.rand(rows, 4), 2 * torch.rand(rows, 4), torch.rand(rows, 4, 4))
    weights = torch.randn(24, 4 * width) * 0.05, torch.randn(24), torch.rand(3) + 0.5, torch.rand(width) + 0.5
    return y, x, mix, weights


def on(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (5, 192), (7, 256), (33, 64), (260, 64)])
def test_leave_and_enter_in_one_pass(rows: int, width: int) -> None:
    """One row, part tiles, several parts a tile, and the wide cut; enter and leave alone give the same."""
    y, x, mix, weights = sublayer(rows, width)
    streams, _, after = hyper_connections.step(y, x, mix, *weights, **SIZES)
    device_mix = Mix(*on(*mix))
    got = hyper_connections.step(*on(y, x), device_mix, *on(*weights), **SIZES, impl="gpu")
    assert near(got[0], streams, 1e-3)
    assert float((got[0].cpu() != streams).float().mean()) < 0.01
    # What enters is the GPU's own streams: a stream rounded the other way must not count twice.
    want_h, want = hyper_connections.enter(got[0].cpu(), mix.pre_NS, *weights, **SIZES, impl="wide")
    assert near(got[1], want_h, 2e-3)
    for mine, theirs in zip(got[2], want, strict=True):
        assert near(mine, theirs, 1e-5)
    assert torch.equal(hyper_connections.leave(*on(y, x), device_mix, impl="gpu"), got[0])
    alone, alone_mix = hyper_connections.enter(got[0], device_mix.pre_NS, *on(*weights), **SIZES, impl="gpu")
    assert torch.equal(alone, got[1])
    for mine, theirs in zip(alone_mix, got[2], strict=True):
        assert torch.equal(mine, theirs)
    assert near(after.comb_NSS, want.comb_NSS, 1e-2)


def test_the_quantised_input_comes_with_it() -> None:
    from kvist.kernels.hyper_connections.gpu import pass_gpu

    y, x, mix, weights = sublayer(3, 192)
    entered = pass_gpu(*on(y, x), Mix(*on(*mix)), *on(*weights), **SIZES, quantised=True)
    assert entered.quantised_ND is not None
    assert torch.equal(entered.quantised_ND.cpu(), quantise(entered.h_ND.cpu(), "fp8"))


@pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("rows", "width"), [(2, 128), (5, 192), (33, 64), (260, 512)])
def test_the_cuda_pass_is_near_the_other(rows: int, width: int) -> None:
    from kvist.kernels.hyper_connections.gpu import pass_gpu

    y, x, mix, weights = sublayer(rows, width)
    for leaving in (*on(y), None):
        want = pass_gpu(leaving, *on(x), Mix(*on(*mix)), *on(*weights), **SIZES, quantised=True)
        got = pass_gpu(leaving, *on(x), Mix(*on(*mix)), *on(*weights), **SIZES, quantised=True, cut="cuda")
        assert near(got.x_NSD, want.x_NSD.cpu(), 1e-3)
        assert near(got.h_ND, want.h_ND.cpu(), 4e-3)
        for mine, theirs in zip(got.mix, want.mix, strict=True):
            assert near(mine, theirs.cpu(), 1e-3)


def test_a_cut_that_does_not_fit_is_named() -> None:
    from kvist.kernels.hyper_connections.gpu import pass_gpu

    y, x, mix, weights = sublayer(1, 64)
    with pytest.raises(ValueError, match="the cut 'cuda' takes two or more rows"):
        pass_gpu(*on(y, x), Mix(*on(*mix)), *on(*weights), **SIZES, cut="cuda")


@pytest.mark.parametrize("corner", [0.0, 80.0, -80.0])
def test_sinkhorn_at_corners(corner: float) -> None:
    """The projection is zero, so the base alone gives the logits: HCM-02 of the shared cases."""
    x = torch.randn(3, 4, 64).bfloat16()
    base = torch.zeros(24)
    base[:8] = torch.tensor([0.0, 1.0, -80.0, 80.0, 0.0, 1.0, -80.0, 80.0])
    base[8:] = corner if corner < 0 else 0.0
    base[8 + 6] = 0.0 if corner < 0 else corner
    weights = torch.zeros(24, 256), base, torch.ones(3), torch.ones(64)
    _, want = hyper_connections.enter(x, torch.ones(3, 4), *weights, **SIZES)
    _, got = hyper_connections.enter(*on(x, torch.ones(3, 4), *weights), **SIZES, impl="gpu")
    for mine, theirs in zip(got, want, strict=True):
        assert float((mine.cpu() - theirs).abs().max()) < 2e-6


def test_a_broken_row_stays_alone() -> None:
    y, x, mix, weights = sublayer(20, 64)
    clean = hyper_connections.step(*on(y, x), Mix(*on(*mix)), *on(*weights), **SIZES, impl="gpu")
    x[7, 2, 5] = float("nan")
    got = hyper_connections.step(*on(y, x), Mix(*on(*mix)), *on(*weights), **SIZES, impl="gpu")
    keep = [row for row in range(20) if row != 7]
    assert bool(got[1][7].isnan().all())
    assert torch.equal(got[1][keep], clean[1][keep])
    assert torch.equal(got[2].comb_NSS[keep], clean[2].comb_NSS[keep])


def test_streams_that_do_not_fit_are_named() -> None:
    _, x, mix, weights = sublayer(2, 64)
    with pytest.raises(ValueError, match="takes bfloat16"):
        hyper_connections.enter(*on(x.float(), mix.pre_NS, *weights), **SIZES, impl="gpu")
    with pytest.raises(ValueError, match="3 streams of 64 channels"):
        hyper_connections.enter(*on(x[:, :3].contiguous(), mix.pre_NS, *weights), **SIZES, impl="gpu")


def routed(x: Tensor, gate: Tensor, bias: Tensor, image: Tensor, text: Tensor, k: int, impl: str) -> tuple[Tensor, Tensor]:
    device = DEVICE if impl == "gpu" else "cpu"
    inputs = [t.to(device) for t in (x, gate, bias, image, text)]
    ids, weights = route(*inputs, k=k, temperature=1.0, normalise=True, scale=1.5, impl=impl)
    return ids.cpu(), weights.cpu()


@pytest.mark.parametrize(
    ("rows", "experts", "width", "k"), [(1, 384, 128, 6), (3, 40, 64, 6), (20, 128, 192, 6), (130, 24, 64, 3)]
)
def test_routing_equals_the_reference(rows: int, experts: int, width: int, k: int) -> None:
    torch.manual_seed(rows)
    x, gate = torch.randn(rows, width).bfloat16(), torch.randn(experts, width).bfloat16() * 0.3
    bias, image, text = torch.randn(experts) * 0.1, torch.randn(experts), torch.arange(rows) % 3 != 1
    ids, weights = routed(x, gate, bias, image, text, k, "gpu")
    want_ids, want = routed(x, gate, bias, image, text, k, "ref")
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want, rtol=2e-5, atol=1e-7)


def test_routing_ties_zeros_and_broken_rows() -> None:
    """Equal biased scores: the lower expert; scores of exactly zero have weight zero; a NaN row chooses nothing, alone."""
    gate = torch.zeros(70, 64, dtype=torch.bfloat16)
    gate[:, 0] = torch.arange(70) % 5
    gate[:, 1] = -300.0
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[0, 0], x[1, 1], x[3, 0] = 1.0, 1.0, 0.5
    x[2, 7] = float("nan")
    zero, text = torch.zeros(70), torch.ones(4, dtype=torch.bool)
    ids, weights = routed(x, gate, zero, zero, text, 6, "gpu")
    assert ids[0].tolist() == ids[3].tolist() == [4, 9, 14, 19, 24, 29]
    assert ids[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert weights[1].tolist() == [0.0] * 6
    assert ids[2].tolist() == [-1] * 6
    assert weights[2].tolist() == [0.0] * 6
    want = routed(x, gate, zero, zero, text, 6, "ref")
    assert torch.equal(ids, want[0])
    assert torch.allclose(weights, want[1], rtol=1e-6)


def test_scores_keep_their_digits_far_below_zero() -> None:
    gate = torch.zeros(4, 64, dtype=torch.bfloat16)
    gate[:, 0] = torch.tensor([-30.0, -20.0, -10.0, 25.0])
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    _, weights = routed(x, gate, torch.zeros(4), torch.zeros(4), torch.ones(1, dtype=torch.bool), 4, "gpu")
    scores = torch.log1p(torch.exp(gate[:, 0].double())).sqrt()
    assert torch.allclose(weights[0].double(), 1.5 * scores / scores.sum(), rtol=1e-5)


def test_routing_that_does_not_fit_is_named() -> None:
    x, gate, bias = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(2000, 64, dtype=torch.bfloat16), torch.zeros(2000)
    with pytest.raises(ValueError, match="of 2000 experts"):
        routed(x, gate, bias, bias, torch.ones(1, dtype=torch.bool), 6, "gpu")
    with pytest.raises(ValueError, match="takes bfloat16"):
        routed(x, gate.float(), bias, bias, torch.ones(1, dtype=torch.bool), 6, "gpu")
