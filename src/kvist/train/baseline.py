"""The comparison: a plain dense transformer (causal attention, RoPE, SwiGLU) of about the same active size on the same tokens.

Owns that model and its short loop. Shares sampler, optimiser and schedule with the main run; must not know its network.
Shapes: B sequences, T tokens, D width, H heads, C head width.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvist.config import ModelConfig
from kvist.kernels.rotary.ref import rotate_ref
from kvist.model.layers import rotary_table
from kvist.train import pieces
from kvist.train.evaluate import documents, windows
from kvist.train.loop import TIER_NAMES, Recipe
from kvist.train.optimiser import Optimiser, clip
from kvist.train.sampling import Corpus, Sampler
from kvist.train.shapes import Geometry
from kvist.train.weights import Weights

HEAD_WIDTH = 64
LAYERS = 12


def dense_values(config: ModelConfig, inner: int, seed: int) -> Weights:
    """Start values of `LAYERS` layers at the model's width with SwiGLU width `inner`."""
    generator = torch.Generator().manual_seed(seed)
    d, v = config.dim, config.vocab_size

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    out: Weights = {"embed.weight": matrix(v, d, 0.5), "head.weight": matrix(v, d, 0.02), "norm.weight": torch.ones(d)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        out |= {f"{at}.attn_norm.weight": torch.ones(d), f"{at}.ffn_norm.weight": torch.ones(d)}
        out |= {f"{at}.wqkv.weight": matrix(3 * d, d, d**-0.5), f"{at}.wo.weight": matrix(d, d, 0.2 * d**-0.5)}
        out |= {f"{at}.w13.weight": matrix(2 * inner, d, d**-0.5), f"{at}.w2.weight": matrix(d, inner, 0.2 * inner**-0.5)}
    return out


def active_parameters(weights: Weights) -> int:
    """Values that take part in one token's forward pass: all but the embedding table."""
    return sum(w.numel() for name, w in weights.items() if name != "embed.weight")


def _layer(x_BTD: Tensor, weights: list[Tensor], table: tuple[Tensor, Tensor], eps: float) -> Tensor:
    attn_norm, ffn_norm, wqkv, wo, w13, w2 = weights
    h = pieces.norm(x_BTD, attn_norm, eps)
    q, k, v = F.linear(h, wqkv).unflatten(2, (3, -1, HEAD_WIDTH)).unbind(2)
    q, k = (rotate_ref(part.flatten(0, 1), table).view(part.shape) for part in (q, k))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    x_BTD = x_BTD + F.linear(out.transpose(1, 2).flatten(2), wo)
    gate, up = F.linear(pieces.norm(x_BTD, ffn_norm, eps), w13).chunk(2, 2)
    return x_BTD + F.linear(F.silu(gate) * up, w2)


def _losses(x_BTD: Tensor, norm: Tensor, head: Tensor, targets_BT: Tensor, eps: float) -> Tensor:
    logits = pieces.norm(x_BTD, norm, eps).flatten(0, 1).float() @ head.T
    return torch.logsumexp(logits, 1) - logits.gather(1, targets_BT.flatten().unsqueeze(1)).squeeze(1)


def dense_losses(config: ModelConfig, weights: Weights, tokens: Tensor, targets: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Nats of every target [B*T]."""
    kind, eps = tokens.device.type, 1e-6
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    x = F.embedding(tokens, weights["embed.weight"]).to(dtype)
    for layer in range(LAYERS):
        names = ("attn_norm", "ffn_norm", "wqkv", "wo", "w13", "w2")
        parts = [weights[f"layers.{layer}.{name}.weight"] for name in names]
        x = pieces.fused(_layer, kind)(x, [p if p.dim() == 1 else p.to(dtype) for p in parts], table, eps)
    losses: Tensor = pieces.fused(_losses, kind)(x, weights["norm.weight"], weights["head.weight"], targets, eps)
    return losses


def train_dense(
    config: ModelConfig,
    recipe: Recipe,
    sampler: Sampler,
    folder: Path,
    device: torch.device,
    held_out: Corpus,
    *,
    inner: int,
    tokens: float,
    seconds: float,
    limit: int,
) -> dict[str, Any]:
    """Train until `tokens` or `seconds` under the recipe's own schedule; losses by tier go to `dense.jsonl`.

    Sequences are as long as the main run's at the same progress, but never longer than `recipe.length`. `dense.json` gets bits
    per byte a tier of `held_out` (at most about `limit` tokens each), over the same windows as the main model's.
    """
    weights = {n: w.to(device).requires_grad_() for n, w in dense_values(config, inner, recipe.seed).items()}
    optimiser = Optimiser(config, weights, muon_ratio=recipe.muon_ratio)
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    taken: dict[int, int] = {}
    began, step, seen, line = time.monotonic(), 0, 0.0, dict[str, Any]()
    sums = torch.zeros(2, 4, device=device)
    while (progress := max(seen / tokens, (time.monotonic() - began) / seconds)) < 1:
        length = recipe.short_length if progress < recipe.dense_until else recipe.length
        per_step, first = recipe.step_tokens // length, taken.get(length, 0)
        batch = sampler.batch(range(first, first + per_step), length).to(device)
        taken[length] = first + per_step
        table = tables.setdefault(length, _table(length, per_step, device))
        losses = dense_losses(config, weights, batch.tokens, batch.targets, table)
        losses.mean().backward()
        clip(weights, recipe.clip)
        optimiser.step(recipe.rate_at(progress, step))
        kinds = F.one_hot(batch.tier, 4).float()
        sums += torch.stack([losses.detach().view(per_step, -1).sum(1) @ kinds, kinds.sum(0) * length])
        step, seen = step + 1, seen + per_step * length
        if step % recipe.log_every == 0:
            total, count = sums.cpu().tolist()
            by_tier = {n: round(a / b, 4) for n, a, b in zip(TIER_NAMES, total, count, strict=True) if b}
            line = {"step": step, "length": length, "tokens_seen": seen, "loss": round(sum(total) / sum(count), 4)}
            line |= {"loss_by_tier": by_tier, "active_parameters": active_parameters(weights)}
            line |= {"seconds": round(time.monotonic() - began, 1)}
            with (folder / "dense.jsonl").open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
            sums.zero_()
    line["bits_per_byte"] = {
        tier: dense_bits_per_byte(config, weights, *documents(held_out, tier, limit), recipe, device)
        for tier in ("prose", "docs", "code")
    }
    (folder / "dense.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return line


def _table(length: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, HEAD_WIDTH, 2, device=device) / HEAD_WIDTH))
    return rotary_table(torch.arange(length, device=device).repeat(batch), frequencies)


@torch.no_grad()
def dense_bits_per_byte(
    config: ModelConfig, weights: Weights, ids: np.ndarray, utf8_bytes: int, recipe: Recipe, device: torch.device
) -> float:
    """The dense model's loss in bits over all targets of a stream, divided by the text's bytes; windows as in `evaluate`."""
    batch = max(1, recipe.micro_tokens // recipe.length)
    geometry = Geometry(config=config, batch=batch, length=recipe.length, device=device)
    table = _table(recipe.length, batch, device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for cpu_batch in windows(ids, geometry, config.engram_pad_id):
        here = cpu_batch.to(device)
        total += (dense_losses(config, weights, here.tokens, here.targets, table) * here.counted.flatten()).double().sum()
    return round(float(total) / math.log(2) / utf8_bytes, 4)
