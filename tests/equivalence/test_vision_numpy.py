"""VIS-04: the vision path on every backend against a plain float64 numpy version that shares no code with it.

Random weights, 2 layers of width 32, pictures of 42x70 and 70x42: neither grid is square, and one axis is no
multiple of 3, so swapped rotary axes and misplaced padding cannot hide.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvist.config import VisionConfig
from kvist.images import preprocess
from kvist.model.vision import Aligner, VisionTower

Array = NDArray[np.float64]
HEADS, WIDTH, MODEL_DIM, THETA = 2, 32, 24, 10000.0
CONFIG = VisionConfig(num_hidden_layers=2, hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=40, min_pixels=0)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU path is not compared"),
        ],
    ),
]


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight


def turn(vector: Array, row: int, col: int) -> Array:
    """Rotate one head's vector of one patch, one pair of dimensions at a time."""
    half, quarter = len(vector) // 2, len(vector) // 4
    out = np.empty_like(vector)
    for i in range(half):
        place, step = (row, i) if i < quarter else (col, i - quarter)
        angle = place * THETA ** (-2 * step / half)
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attend(x: Array, w: dict[str, Array], prefix: str, cols: int) -> Array:
    n, head = len(x), WIDTH // HEADS
    qkv = x @ w[f"{prefix}.wqkv.weight"].T + w[f"{prefix}.wqkv.bias"]
    out = np.zeros((n, WIDTH))
    for h in range(HEADS):
        lane = slice(h * head, (h + 1) * head)
        q, k, v = (qkv[:, i * WIDTH : (i + 1) * WIDTH][:, lane] for i in range(3))
        q = np.stack([turn(q[p], p // cols, p % cols) for p in range(n)])
        k = np.stack([turn(k[p], p // cols, p % cols) for p in range(n)])
        for p in range(n):
            scores = np.array([q[p] @ k[other] for other in range(n)]) / math.sqrt(head)
            weights = np.exp(scores - scores.max())
            out[p, lane] = weights @ v / weights.sum()
    return out @ w[f"{prefix}.wo.weight"].T + w[f"{prefix}.wo.bias"]


def tower(patches: Array, w: dict[str, Array], cols: int) -> Array:
    x = patches @ w["patch_embed.proj.weight"].T + w["patch_embed.proj.bias"]
    for layer in range(CONFIG.num_hidden_layers):
        block = f"blocks.{layer}"
        x = x + attend(norm(x, w[f"{block}.norm1.weight"]), w, f"{block}.attn", cols)
        both = norm(x, w[f"{block}.norm2.weight"]) @ w[f"{block}.mlp.w1.weight"].T
        gate, value = both[:, : CONFIG.intermediate_size], both[:, CONFIG.intermediate_size :]
        x = x + (gate / (1 + np.exp(-gate)) * value) @ w[f"{block}.mlp.w2.weight"].T
    return norm(x, w["norm.weight"])


def align(features: Array, w: dict[str, Array], rows: int, cols: int) -> Array:
    out = []
    for top in range(0, rows, 3):
        for left in range(0, cols, 3):
            merged = np.zeros((WIDTH, 3, 3))
            for y in range(top, min(top + 3, rows)):
                for x in range(left, min(left + 3, cols)):
                    merged[:, y - top, x - left] = features[y * cols + x]
            hidden = merged.ravel() @ w["w1.weight"].T + w["w1.bias"]
            hidden = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in hidden])
            out.append(hidden @ w["w2.weight"].T + w["w2.bias"])
    return np.stack(out)


def randomised(module: torch.nn.Module, generator: torch.Generator) -> dict[str, Array]:
    """Give every parameter a random value (norms around 1) and return them in float64."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1]
            parameter.copy_(1 + 0.3 * values if "norm" in name else values * fan_in**-0.5)
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "height", "rows", "cols"), [(42, 70, 5, 3), (70, 42, 3, 5), (70, 56, 4, 5)])
def test_vis04_tower_and_aligner(device: str, width: int, height: int, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(width)
    vit, aligner = VisionTower(CONFIG), Aligner(CONFIG, MODEL_DIM)
    tower_weights, aligner_weights = randomised(vit, generator), randomised(aligner, generator)
    picture = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processed = preprocess(picture, CONFIG)
    assert (processed.plan.patch_rows, processed.plan.patch_cols) == (rows, cols)

    patches = processed.patches.astype(np.float64)
    want_features = tower(patches, tower_weights, cols)
    want = align(want_features, aligner_weights, rows, cols)
    vit.to(device)
    aligner.to(device)
    with torch.no_grad():
        features = vit(torch.from_numpy(processed.patches).to(device), rows, cols)
        got = aligner(features, rows, cols)
    assert np.abs(features.cpu().numpy() - want_features).max() < 1e-4
    assert got.shape == (processed.plan.image_tokens, MODEL_DIM)
    assert np.abs(got.cpu().numpy() - want).max() < 1e-4

    swapped = tower(patches, tower_weights, rows)  # the oracle on the transposed grid: the comparison notices
    assert np.abs(features.cpu().numpy() - swapped).max() > 1e-2
