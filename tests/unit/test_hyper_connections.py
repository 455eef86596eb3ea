"""Hyper-connection coefficients and the single-pass wiring: HCM-02 and HCM-04 of the shared bug cases.

Each implementation is held against a float64 loop written from the formulas. Must not know files or golden cases.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvist.config import replace
from kvist.kernels import hyper_connections
from kvist.model.block import Block
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Transformer
from kvist.presets import preset

S, D = 4, 32
IMPLS = ("ref", "rows16", "wide", "cpu")


def one_entry(background: float, value: float) -> Tensor:
    z = torch.full((S, S), background)
    z[1, 2] = value
    return z


LOGITS = {
    "zero": torch.zeros(S, S),
    "one at 80": one_entry(0.0, 80.0),
    "all -80 but one": one_entry(-80.0, 0.0),
    "moderate": torch.linspace(-1.5, 1.5, S * S).view(S, S).T.contiguous(),
}


def naive_comb(z: Tensor, iterations: int) -> Tensor:
    """The rule with scalars: softmax over destinations plus eps, divide columns; then rows and columns in turn."""
    rows = []
    for i in range(S):
        exps = [math.exp(float(z[i, j]) - float(z[i].max())) for j in range(S)]
        rows.append([e / sum(exps) + 1e-6 for e in exps])
    for step in range(iterations):
        if step:
            rows = [[value / (sum(row) + 1e-6) for value in row] for row in rows]
        sums = [sum(rows[i][j] for i in range(S)) + 1e-6 for j in range(S)]
        rows = [[rows[i][j] / sums[j] for j in range(S)] for i in range(S)]
    return torch.tensor(rows, dtype=torch.float64)


def mix_of(z: Tensor, dtype: torch.dtype, impl: str) -> hyper_connections.Mix:
    """The coefficients of three rows whose projection is zero, so that the base alone gives the logits."""
    x = torch.randn(3, S, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    base = torch.cat([torch.tensor([0.0, 1.0, -80.0, 80.0, 0.0, 1.0, -80.0, 80.0]), z.flatten()])
    _, mix = hyper_connections.enter(
        x,
        torch.ones(3, S),
        torch.zeros(2 * S + S * S, S * D),
        base,
        torch.ones(3),
        torch.ones(D),
        iterations=20,
        hc_eps=1e-6,
        norm_eps=1e-20,
        impl=impl,
    )
    return mix


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOGITS)
def test_hcm_02_sinkhorn(name: str, dtype: torch.dtype, impl: str) -> None:
    mix = mix_of(LOGITS[name], dtype, impl)
    comb = mix.comb_NSS.double()
    assert comb.shape == (3, S, S)
    assert bool(torch.isfinite(comb).all())
    assert (comb - naive_comb(LOGITS[name], 20)).abs().max() < 2e-6
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # the source axis is divided last
    if name in ("zero", "moderate"):
        assert (comb.sum(2) - 1).abs().max() < 1e-3
    if name == "zero":
        assert (comb - 0.25).abs().max() < 1e-6
    # A different number of iterations would be seen: the test has teeth wherever the result still moves.
    if name == "one at 80":
        assert (comb - naive_comb(LOGITS[name], 19)).abs().max() > 1e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_hcm_02_pre_has_the_epsilon_and_post_is_doubled(impl: str) -> None:
    mix = mix_of(LOGITS["zero"], torch.float32, impl)
    right = torch.tensor([0.5, 1 / (1 + math.exp(-1)), 0.0, 1.0])
    assert torch.allclose(mix.pre_NS, (right + 1e-6).expand(3, S), rtol=1e-6, atol=1e-9)
    assert torch.allclose(mix.post_NS, (2 * right).expand(3, S), rtol=1e-6, atol=1e-9)


def one_layer() -> Transformer:
    config = replace(
        preset("tiny"),
        n_layers=1,
        compress_ratios=(0,),
        kv_source_layers=(),
        index_source_layers=(),
        candidate_source_layers=(),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
    )
    return random_model(config, Numerics(), seed=3)


def pick_stream(block: Block, half: str, stream: int) -> None:
    """Make a half predict (about) one-hot collapse weights whatever its input."""
    getattr(block, f"hc_{half}_fn")[:S] = 0
    getattr(block, f"hc_{half}_base")[:S] = -80
    getattr(block, f"hc_{half}_base")[stream] = 80


class Inputs:
    """What the sublayers and the final norm were given, by hook."""

    def __init__(self, model: Transformer, block: Block) -> None:
        self.seen: dict[str, list[Tensor]] = {"attn": [], "ffn": [], "norm": []}
        for name, module in (("attn", block.attn), ("ffn", block.ffn), ("norm", model.norm)):
            module.register_forward_pre_hook(lambda _m, args, name=name: self.seen[name].append(args[0]))

    def all(self, name: str) -> Tensor:
        return torch.cat(self.seen[name])


def batch(ids: Tensor, start: int, stop: int) -> Rows:
    return Rows(
        token_ids_N=ids[start:stop],
        positions_N=torch.arange(start, stop),
        text_N=torch.ones(stop - start, dtype=torch.bool),
        segments=(Segment(slot=0, start=0, length=stop - start, position=start),),
    )


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-20) * weight


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 2, 3, 4, 5, 6)], ids=["whole", "chunks", "decode"])
def test_hcm_04_each_collapse_uses_the_previous_coefficients(cuts: tuple[int, ...]) -> None:
    model = one_layer()
    block = model.layers[0]
    assert isinstance(block, Block)
    pick_stream(block, "attn", 0)
    pick_stream(block, "ffn", 1)
    inputs, memory = Inputs(model, block), DenseMemory(model.config, model.numerics)
    ids = torch.tensor([5, 9, 200, 31, 7, 8])
    streams, after_attention = [], []

    def leave(y: Tensor, x: Tensor, mix: hyper_connections.Mix, **options: str) -> Tensor:
        out = right(y, x, mix, **options)
        after_attention.append(out)
        return out

    right = hyper_connections.leave
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hyper_connections, "leave", leave)
        for start, stop in pairwise(cuts):
            rows = batch(ids, start, stop)
            flow = model.begin(rows)
            # The streams differ from the start here; equal ones would hide which of them is read.
            x = flow.x_NSD * torch.tensor([1.0, -0.5, 0.25, 2.0]).view(1, S, 1) + torch.arange(S).view(1, S, 1)
            streams.append(x)
            model.logits(model.run(flow._replace(x_NSD=x), rows, memory, 0, 1))
    first, middle, last = torch.cat(streams), torch.cat(after_attention[0::2]), torch.cat(after_attention[1::2])
    assert torch.allclose(inputs.all("attn"), normed(first[:, 0], block.attn_norm.weight), atol=1e-5)
    assert torch.allclose(inputs.all("ffn"), normed(middle[:, 0], block.ffn_norm.weight), atol=1e-4)
    assert torch.allclose(inputs.all("norm"), last[:, 1], atol=1e-4)
    assert (last[:, 1] - last[:, 0]).abs().max() > 0.1


def test_hcm_04_engram_layers_collapse_with_coefficients_from_before_engram() -> None:
    model = random_model(preset("tiny"), Numerics(), seed=5)
    block, before = model.layers[1], model.layers[0]
    assert isinstance(block, Block)
    assert isinstance(before, Block)
    ids = torch.arange(20, 29)
    rows = batch(ids, 0, 9)
    engram = model.engram_ids(ids, rows.text_N)
    rows = Rows(**{f: getattr(rows, f) for f in ("token_ids_N", "positions_N", "text_N", "segments")}, engram_LNX=engram)
    inputs, memory = Inputs(model, block), DenseMemory(model.config, model.numerics)
    flow = model.run(model.begin(rows), rows, memory, 0, 1)
    remembered = block.remember(flow.x_NSD, rows)
    assert (remembered - flow.x_NSD).abs().max() > 1e-3
    model.run(flow, rows, memory, 1, 2)
    collapsed = (flow.pre_NS.unsqueeze(2) * remembered).sum(1)
    assert torch.allclose(inputs.all("attn"), normed(collapsed, block.attn_norm.weight), atol=1e-4)
