"""Native row operators against the reference: quantisers bit for bit, products, norms, rotation, streams, pooling, routing."""

from __future__ import annotations

import pytest
import torch

from kvist.kernels import hyper_connections
from kvist.kernels.group_pool import group_pool
from kvist.kernels.linear import linear
from kvist.kernels.native import packed
from kvist.kernels.quantise import quantise
from kvist.kernels.rms_norm import rms_norm
from kvist.kernels.rotary import rotate
from kvist.kernels.routing import route
from kvist.testing import bit_equal, first_difference, generator, poisoned, quantiser_rows, rel_l2

FORMS = ("fp8", "mxfp4", "main_fp4")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantisers_give_the_same_bits(form, dtype):
    x = quantiser_rows(600, 64, seed=3, dtype=dtype)
    actual, expected = quantise(x, form, impl="cpu"), quantise(x, form)
    assert bit_equal(actual, expected), first_difference(actual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_quantisers_keep_nan_groups_and_signs_of_zero(form):
    x = poisoned(quantiser_rows(200, 96, seed=4), seed=5)
    x[0] = -0.0
    actual, expected = quantise(x, form, impl="cpu"), quantise(x, form)
    assert bit_equal(actual, expected), first_difference(actual, expected)
    assert actual[0].signbit().all()


@pytest.mark.parametrize("form", FORMS)
def test_quantisers_take_views_and_nothing(form):
    wide = quantiser_rows(12, 192, seed=6)
    for view in (wide[::2, 64:128], wide.T.contiguous().T, wide[:0], wide.view(3, 4, 192)[:, 1]):
        assert bit_equal(quantise(view, form, impl="cpu"), quantise(view.contiguous(), form))


def test_quantise_names_bad_input():
    with pytest.raises(ValueError, match="multiple of the group"):
        quantise(torch.zeros(2, 33), "fp8", impl="cpu")
    with pytest.raises(ValueError, match="unknown format 'int4'"):
        quantise(torch.zeros(2, 32), "int4", impl="cpu")
    with pytest.raises(ValueError, match="no impl 'gpu9'"):
        quantise(torch.zeros(2, 32), "fp8", impl="gpu9")


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 67, 130])
@pytest.mark.parametrize("sizes", [(32, 1), (33, 17), (64, 16), (96, 257), (256, 96), (1, 5)])
def test_linear_matches_float64(rows, sizes):
    inputs, outputs = sizes
    x, w = normal(rows, inputs, seed=rows), normal(outputs, inputs, seed=1)
    for weight in (w, w.bfloat16().float()):  # packed as float32 and as bfloat16 pairs
        expected = (x.double() @ weight.double().T).float()
        assert rel_l2(linear(x, weight, impl="cpu"), expected) < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 9, 70])
def test_quantising_linear_matches_the_reference(rows):
    x, w = quantiser_rows(rows, 64, seed=rows).clamp(-1e4, 1e4), normal(48, 64).bfloat16().float()
    expected = linear(x, w, form="fp8", impl="wide")
    assert rel_l2(linear(x, w, form="fp8", impl="cpu"), expected) < 1e-6
    assert rel_l2(linear(quantise(x, "fp8"), w, quantised=True, impl="cpu"), expected) < 1e-6
    brain = linear(x.bfloat16(), w.bfloat16(), form="fp8", impl="cpu")
    assert brain.dtype is torch.bfloat16
    assert rel_l2(brain.float(), linear(x.bfloat16(), w.bfloat16(), form="fp8").float()) < 5e-3


@pytest.mark.parametrize("each", [16, 20, 64])
def test_grouped_linear_is_block_diagonal(each):
    x, w = normal(5, 3 * 32), normal(3 * each, 32, seed=2)
    assert rel_l2(linear(x, w, groups=3, impl="cpu"), linear(x, w, groups=3, impl="wide")) < 1e-6


def test_a_row_of_a_product_does_not_depend_on_its_batch():
    for groups, outputs in ((1, 80), (3, 60), (1, 7000)):
        x, w = normal(130, 96 * groups), normal(outputs, 96, seed=1).bfloat16().float()
        whole = linear(x, w, groups=groups, form="fp8", impl="cpu")
        for rows in (slice(0, 1), slice(3, 10), slice(20, 36), slice(0, 64), slice(64, 130)):
            assert bit_equal(linear(x[rows], w, groups=groups, form="fp8", impl="cpu"), whole[rows])


def test_neighbours_of_a_view_are_not_read():
    wide = torch.full((6, 96), float("nan"))
    wide[1:5, 32:64] = normal(4, 32)
    w = normal(16, 32, seed=1)
    assert rel_l2(linear(wide[1:5, 32:64], w, impl="cpu"), linear(wide[1:5, 32:64], w, impl="wide")) < 1e-6


def test_a_written_weight_is_packed_anew():
    w = torch.nn.Parameter(normal(16, 32), requires_grad=False)
    first = packed(w)
    assert packed(w) is first
    w.mul_(2)
    x = normal(2, 32)
    assert rel_l2(linear(x, w, impl="cpu"), linear(x, w, impl="wide")) < 1e-6


def test_native_operators_refuse_gradients():
    w = torch.nn.Parameter(normal(16, 32))
    with pytest.raises(ValueError, match="no gradients"):
        linear(normal(2, 32), w, impl="cpu")


@pytest.mark.parametrize("shape", [(0, 64), (1, 96), (5, 33), (300, 256), (2, 3, 17)])
def test_rms_norm(shape):
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    assert rel_l2(rms_norm(x, weight, 1e-6, impl="cpu"), rms_norm(x.double(), weight, 1e-6).float()) < 1e-6
    strided = normal(shape[-1], 7, seed=2).T
    assert rel_l2(rms_norm(strided, weight, 1e-6, impl="cpu"), rms_norm(strided, weight, 1e-6)) < 1e-6


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 32), (1, 64), (7, 3, 40), (300, 8, 64)])
def test_rotate(shape, back):
    angle = normal(shape[0], 8, seed=1) * 100
    table = (angle.cos(), angle.sin())
    actual = rotate(normal(*shape), table, back=back, impl="cpu")
    expected = rotate(normal(*shape), table, back=back)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-6)
    assert bit_equal(actual[..., :-16], expected[..., :-16])


@pytest.mark.parametrize("sizes", [(0, 4, 32), (1, 4, 256), (5, 4, 33), (40, 2, 64), (3, 8, 16)])
def test_enter_and_leave(sizes):
    n, s, d = sizes
    logits = 2 * s + s * s
    x, pre = normal(n, s, d), normal(n, s, seed=1)
    weights = (normal(logits, s * d, seed=2) * (s * d) ** -0.5, normal(logits, seed=3), normal(3, seed=4), normal(d, seed=5))
    options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-6}
    h, mix = hyper_connections.enter(x, pre, *weights, **options, impl="cpu")
    expected_h, expected = hyper_connections.enter(x, pre, *weights, **options, impl="wide")
    assert rel_l2(h, expected_h) < 2e-6
    for got, want in zip(mix, expected, strict=True):
        assert rel_l2(got, want) < 5e-6
    y = normal(n, d, seed=6)
    left = hyper_connections.leave(y, x, expected, impl="cpu")
    assert rel_l2(left, hyper_connections.leave(y, x, expected)) < 1e-6


def test_enter_keeps_a_poisoned_row_to_itself():
    x, pre = normal(20, 4, 32), normal(20, 4, seed=1)
    weights = (normal(24, 128, seed=2) * 0.1, normal(24, seed=3), normal(3, seed=4), normal(32, seed=5))
    options = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-6}
    clean, _ = hyper_connections.enter(x, pre, *weights, **options, impl="cpu")
    x[7] = float("nan")
    h, mix = hyper_connections.enter(x, pre, *weights, **options, impl="cpu")
    assert h[7].isnan().all()
    others = torch.arange(20) != 7
    assert bit_equal(h[others], clean[others])
    assert mix.comb_NSS[others].isfinite().all()


@pytest.mark.parametrize("sizes", [(0, 2, 32), (1, 2, 64), (9, 3, 33)])
def test_group_pool(sizes):
    kv, gate = normal(*sizes), normal(*sizes, seed=1) * 5
    assert rel_l2(group_pool(kv, gate, impl="cpu"), group_pool(kv.double(), gate.double()).float()) < 1e-6


@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("normalise", [False, True])
def test_routing(rows, normalise):
    x, gate = normal(rows, 64), normal(12, 64, seed=1).bfloat16().float() / 8
    biases, text = (normal(12, seed=2) * 0.1, normal(12, seed=3) * 0.1), torch.arange(rows) % 3 > 0
    options = {"k": 4, "temperature": 1.5, "normalise": normalise, "scale": 2.5}
    ids, weights = route(x, gate, *biases, text, **options, impl="cpu")
    expected_ids, expected = route(x, gate, *biases, text, **options, impl="wide")
    assert torch.equal(ids, expected_ids)
    assert rel_l2(weights, expected) < 2e-6


def test_routing_ties_choose_lower_experts():
    x, gate = normal(3, 32), torch.zeros(8, 32)
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    text = torch.ones(3, dtype=torch.bool)
    ids, _ = route(x, gate, bias, bias, text, k=5, temperature=1.0, normalise=True, scale=1.0, impl="cpu")
    assert ids.tolist() == [[0, 1, 2, 3, 7]] * 3
