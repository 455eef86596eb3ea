"""One block at released widths against a naive float64 computation written from the facts page alone.

Widths 5120, 64 heads of 512, 32 index heads of 128, experts of 2304 (8 of them). Owns the naive computation: loops over
tokens and heads, no operator of the package.
"""

from __future__ import annotations

import math
import resource

import pytest
import torch
from torch import Tensor

from kvist.config import ModelConfig, replace
from kvist.model.block import Block
from kvist.model.memory import DenseMemory, Shared
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.presets import preset

TOKENS = 6


def released_widths(ratio: int) -> ModelConfig:
    return replace(
        preset("v41-flash"),
        n_layers=1,
        compress_ratios=(ratio,),
        kv_source_layers=(0,),
        index_source_layers=(0,),
        candidate_source_layers=(),
        index_topk=2,
        window_size=3,
        n_routed_experts=8,
        n_activated_experts=3,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        vision=None,
    )


def random_block(config: ModelConfig, quantise: bool) -> Block:
    with torch.no_grad():
        block = Block(config, config.plan.layers[0], Numerics(quantise=quantise), 8, 3)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.uniform_(-1, 1, generator=generator).mul_(parameter.shape[-1] ** -0.5 * 1.7)
    return block.requires_grad_(False)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-20) * weight


class Naive:
    """The block in float64, token by token."""

    def __init__(self, block: Block, config: ModelConfig) -> None:
        self.p = dict(block.named_parameters())
        self.c = config

    def w(self, name: str) -> Tensor:
        return self.p[name].double()

    def coefficients(self, half: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = streams.reshape(-1)
        m = (self.w(f"hc_{half}_fn") @ v) / math.sqrt(float((v * v).mean()) + 1e-20)
        base, scale = self.w(f"hc_{half}_base"), self.w(f"hc_{half}_scale")
        pre = torch.sigmoid(m[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(m[4:8] * scale[1] + base[4:8])
        comb = torch.softmax((m[8:] * scale[2] + base[8:]).reshape(4, 4), 1) + 1e-6
        for round_ in range(20):
            if round_:
                comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
        return pre, post, comb

    def turn(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        out = x.clone()
        for i in range(32):
            f = 160000.0 ** (-2 * i / 64)
            ramp = min(max((i - 15) / 10, 0.0), 1.0)
            angle = sign * position * (f * (1 - ramp) + f / 16 * ramp)
            offset = x.shape[-1] - 64 + 2 * i
            a, b = x[..., offset], x[..., offset + 1]
            out[..., offset] = a * math.cos(angle) - b * math.sin(angle)
            out[..., offset + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def attention(self, h: Tensor) -> Tensor:
        ratio, n = self.c.compress_ratios[0], len(h)
        rank = rms(h @ self.w("attn.wq_a.weight").T, self.w("attn.q_norm.weight"))
        q = (rank @ self.w("attn.wq_b.weight").T).reshape(n, 64, 512)
        window = rms(h @ self.w("attn.wkv.weight").T, self.w("attn.kv_norm.weight"))
        kv = h @ self.w("attn.compressor.wkv.weight").T
        rows, keys = [], []
        for j in range(n // ratio):
            group = kv[j * ratio : (j + 1) * ratio]
            if ratio > 1:
                gate = h[j * ratio : (j + 1) * ratio] @ self.w("attn.compressor.wgate.weight").T
                group = (group * torch.softmax(gate, 0)).sum(0, keepdim=True)
            latent = rms(group[0], self.w("attn.compressor.norm.weight"))
            key = rms(self.w("attn.indexer.wk.weight") @ latent, self.w("attn.indexer.k_norm.weight"))
            rows.append(self.turn(latent, j * ratio))
            keys.append(self.turn(key, j * ratio))
        iq = (rank @ self.w("attn.indexer.wq_b.weight").T).reshape(n, 32, 128)
        iw = (h @ self.w("attn.indexer.weights_proj.weight").T) * 128**-0.5 * 32**-0.5
        out = torch.zeros(n, 64 * 512, dtype=torch.float64)
        for t in range(n):
            score = [float((iw[t] * torch.relu(self.turn(iq[t], t) @ key)).sum()) for key in keys[: (t + 1) // ratio]]
            best = sorted(range(len(score)), key=lambda j: (-score[j], j))[: self.c.index_topk]
            seen = [self.turn(window[s], s) for s in range(max(0, t - self.c.window_size + 1), t + 1)]
            stack = torch.stack(seen + [rows[j] for j in sorted(best)])
            for head in range(64):
                logit = stack @ self.turn(q[t, head], t) / math.sqrt(512)
                weight = torch.exp(logit)
                total = weight.sum() + torch.exp(self.w("attn.attn_sink")[head])
                mixed = (weight.unsqueeze(1) * stack).sum(0) / total
                out[t, head * 512 : (head + 1) * 512] = self.turn(mixed, t, -1)
        parts = out.reshape(n, 8, 4096)
        wo_a = self.w("attn.wo_a.weight").reshape(8, 1024, 4096)
        joined = torch.cat([parts[:, g] @ wo_a[g].T for g in range(8)], 1)
        return joined @ self.w("attn.wo_b.weight").T

    def experts(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for t in range(len(h)):
            score = torch.sqrt(torch.log1p(torch.exp(self.w("ffn.gate.weight") @ h[t])))
            biased = score + self.w("ffn.gate.bias")
            best = sorted(range(8), key=lambda e: (-float(biased[e]), e))[:3]
            total = sum(float(score[e]) for e in best)
            for name, weight in [*((f"experts.{e}", 1.5 * float(score[e]) / total) for e in best), ("shared_experts", 1.0)]:
                gate = (self.w(f"ffn.{name}.w1.weight") @ h[t]).clamp(max=10.0)
                up = (self.w(f"ffn.{name}.w3.weight") @ h[t]).clamp(-10.0, 10.0)
                out[t] += self.w(f"ffn.{name}.w2.weight") @ (gate * torch.sigmoid(gate) * up * weight)
        return out

    def run(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        for half, layer in (("attn", self.attention), ("ffn", self.experts)):
            mixes = [self.coefficients(half, x) for x in streams]
            collapsed = torch.stack([(p.unsqueeze(1) * x).sum(0) for p, x in zip(pre, streams, strict=True)])
            y = layer(rms(collapsed, self.w(f"{half}_norm.weight")))
            streams = torch.stack(
                [
                    torch.stack([post[j] * y[t] + sum(comb[i][j] * streams[t][i] for i in range(4)) for j in range(4)])
                    for t, (_, post, comb) in enumerate(mixes)
                ]
            )
            pre = torch.stack([m[0] for m in mixes])
        return streams, pre


@pytest.mark.parametrize("ratio", [1, 2])
def test_released_widths_agree_with_naive_float64(ratio: int) -> None:
    config = released_widths(ratio)
    block = random_block(config, quantise=False)
    generator = torch.Generator().manual_seed(6)
    streams = torch.randn(TOKENS, 4, config.dim, generator=generator)
    pre = torch.rand(TOKENS, 4, generator=generator)
    rows = Rows(
        token_ids_N=torch.zeros(TOKENS, dtype=torch.int64),
        positions_N=torch.arange(TOKENS),
        text_N=torch.ones(TOKENS, dtype=torch.bool),
        segments=(Segment(slot=0, start=0, length=TOKENS, position=0),),
    )
    got, got_pre, _ = block(streams, pre, rows, DenseMemory(config, block.numerics), Shared())
    want, want_pre = Naive(block, config).run(streams.double(), pre.double())
    error = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(error.max()) < 2e-6
    assert float((got_pre.double() - want_pre).abs().max()) < 2e-6
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak_bytes < 20e9
