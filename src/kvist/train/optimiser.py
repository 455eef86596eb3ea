"""Optimisers: Muon for linear maps (batched over equal shapes, head by head), AdamW for the rest, and the balance rule.

Owns which rule moves which weight and all optimiser state. Must not know losses or data. Report 2.5, facts 14.2; learning
rates are relative to one schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvist.config import ModelConfig

MOMENTUM, DECAY, UPDATE_RMS = 0.95, 0.1, 0.18
BETAS = (0.9, 0.95)
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


def muon_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape [n, out, in] under which a weight takes part in Muon, or None if AdamW moves it."""
    if ".experts." in name:
        return shape
    leaf = name.rsplit(".", 2)
    # AdamW: vectors, and small maps that are no transformations of the streams. `main_proj` only ends like one of them.
    if len(shape) != 2 or name.endswith(("_fn", ".gate.weight", "q_weight", "k_weight", "weights_proj.weight", "proj.weight")):
        return (1, *shape) if name.endswith("main_proj.weight") else None
    if "embed" in name or "head" in leaf[0] or leaf[0].endswith("head") or name == "head.weight" or "markov" in name:
        return None
    heads = 1
    if name.endswith("attn.wq_b.weight"):
        heads = config.n_heads
    elif name.endswith("indexer.wq_b.weight"):
        heads = config.index_n_heads
    elif name.endswith("wo_a.weight"):
        heads = config.o_groups
    elif name.endswith("engram.wkv.weight"):
        heads = config.hc_mult + 1
    return (heads, shape[0] // heads, shape[1])


def adam_scale(name: str) -> float:
    """Learning rate of a weight under AdamW relative to the schedule."""
    if ".engram.embed" in name:
        return 5.0
    if name == "embed.weight":
        return 2.0
    if name.endswith("_fn"):
        return 0.1
    if name.endswith((".gate.weight", "_scale", "weights_proj.weight")):
        return 0.3
    return 1.0


def adam_decay(name: str) -> float:
    """Decoupled decay under AdamW: norm weights only; tables, embeddings, head, biases and scales have none."""
    return DECAY if "norm" in name else 0.0


def orthogonalise(update_NOI: Tensor) -> Tensor:
    """Newton-Schulz towards U V' of every matrix, computed in bfloat16 on CUDA."""
    x = update_NOI.bfloat16() if update_NOI.is_cuda else update_NOI
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).to(update_NOI.dtype)


class Optimiser:
    """Moves a dictionary of leaves in place. `rate(name)` of a weight: the schedule's rate times its rule's scale."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], *, muon_ratio: float = 1.0) -> None:
        self.weights = {name: w for name, w in weights.items() if w.requires_grad}
        self.muon_ratio = muon_ratio
        shapes = {name: muon_shape(config, name, tuple(w.shape)) for name, w in self.weights.items()}
        self.shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self.adam_names = [name for name, shape in shapes.items() if shape is None]
        self.momentum = {name: torch.zeros_like(self.weights[name]) for name in self.shapes}
        self.first = {name: torch.zeros_like(self.weights[name]) for name in self.adam_names}
        self.second = {name: torch.zeros_like(self.weights[name]) for name in self.adam_names}
        self.steps = 0
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, shape in self.shapes.items():
            self.groups.setdefault(shape[1:], []).append(name)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from `.grad` of every leaf; gradients are cleared."""
        self.steps += 1
        for names in self.groups.values():
            self._muon(names, rate * self.muon_ratio)
        self._adam(rate)
        for weight in self.weights.values():
            weight.grad = None

    def _muon(self, names: list[str], rate: float) -> None:
        grads = [self._grad(name) for name in names]
        momenta = [self.momentum[name] for name in names]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)
        matrices = torch.cat([value.view(self.shapes[name]) for name, value in zip(names, ahead, strict=True)])
        scale = UPDATE_RMS * math.sqrt(max(matrices.shape[1:]))
        moved = orthogonalise(matrices).mul_(scale).split([self.shapes[name][0] for name in names])
        weights = [self.weights[name] for name in names]
        torch._foreach_mul_(weights, 1 - rate * DECAY)
        torch._foreach_add_(weights, [m.reshape(w.shape) for m, w in zip(moved, weights, strict=True)], alpha=-rate)

    def _adam(self, rate: float) -> None:
        names = self.adam_names
        grads = [self._grad(name) for name in names]
        first, second = [self.first[n] for n in names], [self.second[n] for n in names]
        torch._foreach_lerp_(first, grads, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, grads, grads, 1 - BETAS[1])
        correction = 1 - BETAS[0] ** self.steps, 1 - BETAS[1] ** self.steps
        root = torch._foreach_div(second, correction[1])
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, 1e-12)
        moved = torch._foreach_div(first, root)
        rates = [rate * adam_scale(name) for name in names]
        torch._foreach_mul_(moved, [-r / correction[0] for r in rates])
        weights = [self.weights[name] for name in names]
        torch._foreach_mul_(weights, [1 - r * adam_decay(n) for r, n in zip(rates, names, strict=True)])
        torch._foreach_add_(weights, moved)

    def _grad(self, name: str) -> Tensor:
        grad = self.weights[name].grad
        return torch.zeros_like(self.weights[name]) if grad is None else grad

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"momentum": self.momentum, "first": self.first, "second": self.second, "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state of the same weights."""
        for mine, saved in ((self.momentum, "momentum"), (self.first, "first"), (self.second, "second")):
            if mine.keys() != state[saved].keys():
                raise ValueError(f"optimiser state {saved!r} belongs to other weights; resume with the same configuration")
            for name, value in state[saved].items():
                mine[name].copy_(value)
        self.steps = int(state["steps"])


@torch.no_grad()
def clip(weights: Mapping[str, Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    grads = [w.grad for w in weights.values() if w.grad is not None]
    norm = torch.stack(torch._foreach_norm(grads)).norm()
    torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


class Loads:
    """Expert loads of one optimiser step, text and image apart. Counted once a token, however often a layer is computed."""

    def __init__(self) -> None:
        self.counts: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, prefix: str, chosen_NE: Tensor, counted_N: Tensor, text_N: Tensor | None) -> None:
        """Count the choices of counted tokens: [2, E] a layer, row 0 text, row 1 image."""
        text = counted_N if text_N is None else counted_N & text_N
        kinds = torch.stack([text, counted_N & ~text]).float()
        counts = kinds @ chosen_NE.float()
        held = self.counts.get(prefix)
        self.counts[prefix] = counts if held is None else held + counts

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], speed: float) -> None:
        """Raise the bias of experts below the mean load, lower that of those above; once an optimiser step."""
        for prefix, counts in self.counts.items():
            for row, name in ((0, "bias"), (1, "bias_vl")):
                # No tokens of a kind: all counts equal their mean, and nothing moves.
                weights[f"{prefix}.ffn.gate.{name}"].add_(torch.sign(counts[row].mean() - counts[row]), alpha=speed)
        self.counts = {}
