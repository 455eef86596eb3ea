"""Expert routing against hand-computed values: MOE-02, MOE-04 and MOE-06 of the shared bug cases.

Must not know how experts compute, except that a token whose weights are zero keeps only the shared expert.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.kernels.elementwise import softplus
from kvist.kernels.routing import route
from kvist.model.initialise import random_model
from kvist.model.moe import MoE
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

IMPLS = ("ref", "rows16", "wide", "cpu")


def routed(logits_NE: Tensor, bias_E: Tensor, k: int, impl: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Route rows whose gate projection gives exactly these logits: one-hot rows against the logits as weights."""
    width = 32
    x = torch.zeros(len(logits_NE), width, dtype=dtype)
    gate = torch.zeros(logits_NE.shape[1], width)
    for row, logits in enumerate(logits_NE):
        x[row, row] = 1.0
        gate[:, row] = logits
    text = torch.ones(len(logits_NE), dtype=torch.bool)
    return route(
        x, gate, bias_E, torch.full_like(bias_E, 100.0), text, k=k, temperature=1.0, normalise=True, scale=1.5, impl=impl
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_moe_04_bias_selects_and_does_not_weigh(impl: str) -> None:
    logits, bias = torch.tensor([[0.0, 4.0, -4.0, 2.0]]), torch.tensor([0.0, -3.0, 3.0, 0.0])
    assert torch.allclose(softplus(logits).sqrt(), torch.tensor([[0.8326, 2.0045, 0.1347, 1.4584]]), atol=5e-5)
    ids, weights = routed(logits, bias, 2, impl)
    assert ids.tolist() == [[2, 3]]
    assert torch.allclose(weights, torch.tensor([[0.1268, 1.3732]]), atol=5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_02_selection_and_weights_in_float32(dtype: torch.dtype, impl: str) -> None:
    """Logits 1e-3 apart around 8 are equal in bfloat16, whose step there is 1/16; float16 ones of 20 and 12 do not overflow."""
    logits = torch.tensor([[8.0, 8.001, 7.999, 8.002, 0.0], [20.0, 12.0, -12.0, -20.0, 0.0]])
    assert len({logits.bfloat16()[0, i].item() for i in range(4)}) == 1
    ids, weights = routed(logits, torch.zeros(5), 2, impl, dtype)
    assert ids.tolist() == [[1, 3], [0, 1]]
    assert weights.dtype == torch.float32
    scores = torch.log1p(torch.exp(logits.double())).sqrt().gather(1, ids)
    assert torch.allclose(weights.double(), 1.5 * scores / scores.sum(1, keepdim=True), rtol=1e-6)


def test_moe_02_bfloat16_model_routes_as_float32_does() -> None:
    """The router of a bfloat16 model, on bfloat16 inputs, chooses what a float64 computation on the same inputs chooses."""
    model = random_model(preset("tiny"), Numerics(dtype=torch.bfloat16), seed=1)
    gate = model.layers[0].ffn.gate  # type: ignore[union-attr]
    x = torch.randn(200, model.config.dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    text = torch.ones(200, dtype=torch.bool)
    scores = torch.log1p(torch.exp(x.double() @ gate.weight.double().T)).sqrt()
    biased = scores + gate.bias.double()
    ids, weights = gate(x, text)
    wanted = biased.topk(gate.n_active, 1).indices.sort(1).values
    cut = biased.sort(1, descending=True).values
    clear = (cut[:, gate.n_active - 1] - cut[:, gate.n_active]) > 1e-6
    assert int(clear.sum()) > 190
    assert torch.equal(ids[clear], wanted[clear])
    right = scores.gather(1, ids)
    assert torch.allclose(weights.double(), 1.5 * right / right.sum(1, keepdim=True), rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_moe_06_zero_scores_give_zero_weights(impl: str) -> None:
    logits = torch.full((3, 6), -200.0)
    logits[0], logits[2] = torch.arange(6.0), torch.arange(6.0) - 3
    bias = torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0, 0.0])
    ids, weights = routed(logits, bias, 2, impl)
    assert ids[1].tolist() == [0, 1]
    assert weights[1].tolist() == [0.0, 0.0]
    alone = routed(logits[[0, 2]], bias, 2, impl)
    assert torch.equal(ids[[0, 2]], alone[0])
    assert torch.equal(weights[[0, 2]], alone[1])


def zeroed(impl: str) -> tuple[Transformer, MoE, Tensor]:
    """A model whose gate gives the middle of three tokens scores of exactly zero; that token is a multiple of one vector."""
    model = random_model(preset("tiny"), Numerics(impl=impl), seed=4)
    moe = model.layers[0].ffn
    assert isinstance(moe, MoE)
    x = torch.randn(3, model.config.dim, generator=torch.Generator().manual_seed(5))
    direction = x[1] / x[1].square().sum()
    moe.gate.weight -= (moe.gate.weight @ x[1]).unsqueeze(1) * direction + 200 * direction
    moe.gate.bias[:2] = 9.0
    return model, moe, x


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_moe_06_a_token_without_routed_experts_keeps_the_shared_one(impl: str) -> None:
    _, moe, x = zeroed(impl)
    text = torch.ones(3, dtype=torch.bool)
    out = moe(x, text)
    assert bool(torch.isfinite(out).all())
    _, weights = moe.gate(x, text)
    assert weights[1].tolist() == [0.0, 0.0]
    assert weights[0].sum().item() == pytest.approx(1.5)
    moe.gate.scale = 0.0
    shared_only = moe(x, text)
    assert torch.equal(out[1], shared_only[1])
    assert not torch.equal(out[0], shared_only[0])
    moe.gate.scale = 1.5
    for row in (0, 2):
        assert torch.allclose(out[row], moe(x[row : row + 1], text[:1])[0], atol=1e-5)
