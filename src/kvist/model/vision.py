"""The vision tower, the aligner and the assembly of an image span; parameter paths are the released names.

One image per call: an image's bits never depend on what shares its batch. Knows nothing of pixels, resizing (the
patches come ready from `images/`) or of where the span stands in a prompt. Source: facts section 10.

Shapes: P patches, R x C the patch grid (P = R * C), I numbers in a patch, V width of the tower, H heads, E head size,
F angles of a head (E / 2), T image tokens, U numbers the aligner reads for one (V * ratio**2), D width of the text
model, S positions of the span.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvist.config import ConfigError, VisionConfig
from kvist.model.layers import RMSNorm

NORM_EPS = 1e-6


def rotary_table(patch_rows: int, patch_cols: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Angles in radians, float32 [P, F], for a row-major grid: the first half turns with the row, the rest with the
    column, both over the same `head_dim / 4` frequencies `theta ** (-2i / F)`."""
    angles = head_dim // 2
    exponents = torch.arange(0, angles, 2, dtype=torch.float32, device=device) / angles
    frequencies = 1.0 / theta**exponents
    rows = torch.arange(patch_rows, dtype=torch.float32, device=device).repeat_interleave(patch_cols)
    cols = torch.arange(patch_cols, dtype=torch.float32, device=device).repeat(patch_rows)
    return torch.cat([rows[:, None] * frequencies, cols[:, None] * frequencies], dim=-1)


def rotate_halves(x_PHE: Tensor, cos_PF: Tensor, sin_PF: Tensor) -> Tensor:
    """Rotate dimension i together with i + E/2 (half-split, unlike the text model's adjacent pairs), in float32."""
    first, second = x_PHE.float().chunk(2, dim=-1)
    cos, sin = cos_PF[:, None, :], sin_PF[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_PHE.dtype)


class VisionAttention(nn.Module):
    """Every patch attends to every patch of its image; scale `head_dim ** -0.5`, no mask, no class token."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width = config.hidden_size
        self.n_heads = config.num_attention_heads
        self.wqkv = nn.Linear(width, 3 * width, bias=True, dtype=dtype)
        self.wo = nn.Linear(width, width, bias=True, dtype=dtype)

    def forward(self, x_PV: Tensor, cos_PF: Tensor, sin_PF: Tensor) -> Tensor:
        """Normed patches [P, V] and their angles' cosines and sines [P, F] -> [P, V]."""
        q_PHE, k_PHE, v_PHE = self.wqkv(x_PV).unflatten(-1, (3, self.n_heads, -1)).unbind(1)
        q_HPE = rotate_halves(q_PHE, cos_PF, sin_PF).transpose(0, 1)
        k_HPE = rotate_halves(k_PHE, cos_PF, sin_PF).transpose(0, 1)
        # The batch axis of one lets the memory-saving kernels run; without it P x P scores would be stored.
        out_1HPE = functional.scaled_dot_product_attention(q_HPE[None], k_HPE[None], v_PHE.transpose(0, 1)[None])
        return self.wo(out_1HPE[0].transpose(0, 1).flatten(1))


class VisionMlp(nn.Module):
    """Gated MLP without biases: `w1` yields the gate first, then the value."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False, dtype=dtype)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x_PV: Tensor) -> Tensor:
        """[P, V] -> [P, V]."""
        gate, value = self.w1(x_PV).chunk(2, dim=-1)
        return self.w2(functional.silu(gate) * value)


class VisionBlock(nn.Module):
    """A pre-norm transformer block of the tower."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config, dtype)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = VisionMlp(config, dtype)

    def forward(self, x_PV: Tensor, cos_PF: Tensor, sin_PF: Tensor) -> Tensor:
        """Patches [P, V] and their angles' cosines and sines [P, F] -> [P, V]."""
        x_PV = x_PV + self.attn(self.norm1(x_PV), cos_PF, sin_PF)
        return x_PV + self.mlp(self.norm2(x_PV))


class PatchEmbed(nn.Module):
    """One linear map from a flattened patch to the tower's width; exists for its released name."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=True, dtype=dtype)

    def forward(self, patches_PI: Tensor) -> Tensor:
        """Flattened patches [P, I] -> [P, V]."""
        return self.proj(patches_PI)


class VisionTower(nn.Module):
    """The ViT under the released prefix `vision.`; `dtype` is that of its linear layers, norms stay float32.

    Raises `ConfigError` if the head size is not a multiple of 4 (two axes, two halves).
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if heads < 1 or width < 1 or width % (4 * heads):
            raise ConfigError(f"vision hidden_size {width} over {heads} heads: the head size must be a positive multiple of 4")
        self.head_dim = width // heads
        self.rope_theta = config.rope_theta
        self.patch_embed = PatchEmbed(config, dtype)
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, NORM_EPS)

    def forward(self, patches_PI: Tensor, patch_rows: int, patch_cols: int) -> Tensor:
        """Patches [P, I] of one image, row-major over `patch_rows` x `patch_cols`, to features [P, V] in the dtype of
        the linear layers. Raises `ValueError` if the rows do not fill the grid."""
        _check_grid("patches", patches_PI, patch_rows, patch_cols, self.patch_embed.proj.in_features)
        angles_PF = rotary_table(patch_rows, patch_cols, self.head_dim, self.rope_theta, patches_PI.device)
        cos_PF, sin_PF = angles_PF.cos(), angles_PF.sin()
        x_PV = self.patch_embed(patches_PI.to(self.patch_embed.proj.weight.dtype))
        for block in self.blocks:
            x_PV = block(x_PV, cos_PF, sin_PF)
        return self.norm(x_PV)


class Aligner(nn.Module):
    """Joins squares of patch features and maps them to the text model's width; released prefix `aligner.`."""

    def __init__(self, config: VisionConfig, model_dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        self.vision_dim = config.hidden_size
        self.w1 = nn.Linear(config.hidden_size * self.ratio**2, model_dim, bias=True, dtype=dtype)
        self.w2 = nn.Linear(model_dim, model_dim, bias=True, dtype=dtype)

    def forward(self, features_PV: Tensor, patch_rows: int, patch_cols: int) -> Tensor:
        """Tower features [P, V] to image-token rows [T, D], row-major over the token grid. Missing patches at the
        right and bottom edge are zeros. Raises `ValueError` if the rows do not fill the grid."""
        _check_grid("features", features_PV, patch_rows, patch_cols, self.vision_dim)
        merged_TU = merge_patches(features_PV, patch_rows, patch_cols, self.ratio)
        return self.w2(functional.gelu(self.w1(merged_TU), approximate="none"))


def merge_patches(features_PV: Tensor, patch_rows: int, patch_cols: int, ratio: int) -> Tensor:
    """Gather each `ratio` x `ratio` square into one row, [P, V] to [T, V * ratio**2], channel-major (v, dy, dx)."""
    grid_RCV = features_PV.unflatten(0, (patch_rows, patch_cols))
    grid_RCV = functional.pad(grid_RCV, (0, 0, 0, -patch_cols % ratio, 0, -patch_rows % ratio))
    squares = grid_RCV.unflatten(1, (-1, ratio)).unflatten(0, (-1, ratio))  # [rows, dy, cols, dx, V]
    return squares.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


def embed_span(
    features_TD: Tensor, token_rows: int, token_cols: int, start_D: Tensor, newline_D: Tensor, end_D: Tensor
) -> Tensor:
    """Embeddings of a whole image span [S, D], S = token_rows * (token_cols + 1) + 2, in the dtype of the features:
    START, then each row of image tokens closed by a NEWLINE, END. The three vectors are the learned `image_start`,
    `image_newline` and `image_end`. Raises `ValueError` if the features do not fill the grid."""
    _check_grid("image-token features", features_TD, token_rows, token_cols, start_D.shape[-1])
    grid = features_TD.unflatten(0, (token_rows, token_cols))
    newlines = newline_D.to(features_TD.dtype).expand(token_rows, 1, -1)
    lines_SD = torch.cat([grid, newlines], dim=1).flatten(0, 1)
    start_1D, end_1D = start_D.to(features_TD.dtype)[None], end_D.to(features_TD.dtype)[None]
    return torch.cat([start_1D, lines_SD, end_1D])


def _check_grid(what: str, x: Tensor, rows: int, cols: int, width: int) -> None:
    if rows < 1 or cols < 1 or x.shape != (rows * cols, width):
        raise ValueError(f"{what} of shape {list(x.shape)} for a grid of {rows} x {cols}; expected [rows * cols, {width}]")
