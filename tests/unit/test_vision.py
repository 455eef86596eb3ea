"""Vision modules: released parameter names and counts, dtypes, gathering order, span assembly, shape errors."""

from __future__ import annotations

import pytest
import torch

from kvist.config import ConfigError, VisionConfig
from kvist.model.vision import Aligner, VisionTower, embed_span, merge_patches
from kvist.presets import preset

SMALL = VisionConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=24)


def test_released_sizes_count_without_allocating() -> None:
    config = preset("v41-flash")
    assert config.vision is not None
    with torch.device("meta"):
        modules = (VisionTower(config.vision, torch.bfloat16), Aligner(config.vision, config.dim, torch.bfloat16))
    count = sum(p.numel() for module in modules for p in module.parameters())
    assert count + 3 * config.dim == 485_268_480


def test_parameter_names_are_the_released_ones() -> None:
    block = ["norm1.weight", "attn.wqkv.weight", "attn.wqkv.bias", "attn.wo.weight", "attn.wo.bias", "norm2.weight"]
    block += ["mlp.w1.weight", "mlp.w2.weight"]
    want = {"patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight"}
    want |= {f"blocks.{layer}.{name}" for layer in range(2) for name in block}
    assert set(VisionTower(SMALL).state_dict()) == want
    assert set(Aligner(SMALL, 48).state_dict()) == {"w1.weight", "w1.bias", "w2.weight", "w2.bias"}


def test_bfloat16_stays_near_float32_and_keeps_wide_norms() -> None:
    torch.manual_seed(0)
    wide, wide_aligner = VisionTower(SMALL), Aligner(SMALL, 48)
    narrow, narrow_aligner = VisionTower(SMALL, torch.bfloat16), Aligner(SMALL, 48, torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    narrow_aligner.load_state_dict(wide_aligner.state_dict())
    patches = torch.randn(20, 588).bfloat16().float()
    with torch.no_grad():
        want = wide_aligner(wide(patches, 4, 5), 4, 5)
        features = narrow(patches, 4, 5)
        got = narrow_aligner(features, 4, 5)
    assert features.dtype == got.dtype == torch.bfloat16
    assert narrow.norm.weight.dtype == torch.float32
    assert ((got.float() - want).norm() / want.norm()).item() < 0.02


def test_merged_rows_are_channel_major_with_zeros_right_and_below() -> None:
    features = torch.arange(1, 4 * 5 * 2 + 1, dtype=torch.float32).view(20, 2)
    merged = merge_patches(features, 4, 5, 3)
    assert merged.shape == (4, 18)
    grid = features.view(4, 5, 2)
    for row in range(2):
        for col in range(2):
            for v in range(2):
                for dy in range(3):
                    for dx in range(3):
                        y, x = row * 3 + dy, col * 3 + dx
                        want = grid[y, x, v].item() if y < 4 and x < 5 else 0.0
                        assert merged[row * 2 + col, v * 9 + dy * 3 + dx].item() == want


def test_merged_rows_equal_unfold() -> None:
    features = torch.randn(6 * 9, 5)
    image = features.view(6, 9, 5).permute(2, 0, 1)[None]
    want = torch.nn.functional.unfold(image, 3, stride=3)[0].T
    assert torch.equal(merge_patches(features, 6, 9, 3), want)


def test_span_rows() -> None:
    features = torch.arange(6, dtype=torch.float32).view(6, 1)
    learned = (torch.tensor([10.0]), torch.tensor([20.0]), torch.tensor([30.0]))
    span = embed_span(features, 2, 3, *learned)
    assert span.flatten().tolist() == [10, 0, 1, 2, 20, 3, 4, 5, 20, 30]


def test_gradients_reach_every_parameter_and_the_learned_vectors() -> None:
    tower, aligner = VisionTower(SMALL), Aligner(SMALL, 48)
    learned = [torch.randn(48, requires_grad=True) for _ in range(3)]
    span = embed_span(aligner(tower(torch.randn(20, 588), 4, 5), 4, 5), 2, 2, *learned)
    span.square().sum().backward()
    for parameter in [*tower.parameters(), *aligner.parameters(), *learned]:
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_rows_that_do_not_fill_the_grid_are_refused() -> None:
    tower, aligner = VisionTower(SMALL), Aligner(SMALL, 48)
    vector = torch.zeros(48)
    with pytest.raises(ValueError, match=r"patches of shape \[19, 588\] for a grid of 4 x 5"):
        tower(torch.zeros(19, 588), 4, 5)
    with pytest.raises(ValueError, match="grid of 0 x 5"):
        tower(torch.zeros(0, 588), 0, 5)
    with pytest.raises(ValueError, match="features of shape"):
        aligner(torch.zeros(20, 31), 4, 5)
    with pytest.raises(ValueError, match="image-token features"):
        embed_span(torch.zeros(5, 48), 2, 3, vector, vector, vector)


@pytest.mark.parametrize(("width", "heads"), [(30, 4), (24, 4), (32, 0)])
def test_impossible_heads_are_refused(width: int, heads: int) -> None:
    config = VisionConfig(num_hidden_layers=1, hidden_size=width, num_attention_heads=heads, intermediate_size=8)
    with pytest.raises(ConfigError, match=f"{width} over {heads} heads"):
        VisionTower(config)
