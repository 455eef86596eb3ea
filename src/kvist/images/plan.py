"""How large a picture becomes and how many positions it takes in a prompt; integers only, no pixels.

The server counts prompt tokens with `plan_image` and the encoder cuts patches by the same plan, so that the two
can never disagree. Knows nothing of file formats, arrays of pixels or the vision tower.
Source: facts section 10; the order of the floating-point operations is part of the rule, because a product that
lands just under a multiple of the patch size costs a whole row of patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvist.config import ConfigError, VisionConfig
from kvist.images.errors import ImageError

# Token types of a prompt: every position of an image span has a type >= 0.
TEXT = -1
START = 0
IMAGE = 1
NEWLINE = 2
END = 3

# START, one row of one IMAGE, NEWLINE, END: no span is shorter.
MIN_SPAN_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """What one picture turns into.

    `width`, `height`: pixels after resizing, multiples of the patch size. `patch_rows`, `patch_cols`: patches.
    `token_rows`, `token_cols`: IMAGE tokens, each over `downsample_ratio` squared patches, the last row and column
    possibly over fewer. `span_tokens`: positions in the prompt, `token_rows * (token_cols + 1) + 2`.
    """

    width: int
    height: int
    patch_rows: int
    patch_cols: int
    token_rows: int
    token_cols: int
    span_tokens: int

    @property
    def image_tokens(self) -> int:
        """IMAGE positions of the span, as many as the aligner yields features."""
        return self.token_rows * self.token_cols


def plan_image(width: int, height: int, config: VisionConfig) -> ImagePlan:
    """The resize plan for a picture of `width` x `height` pixels (facts section 10).

    Small pictures grow to about `min_pixels`, sides are rounded up to whole patches, and a picture whose span would
    exceed `max_image_tokens` is shrunk to fit. Raises `ImageError` for a size below 1x1, `ConfigError` for a
    configuration under which no plan exists.
    """
    _check_config(config)
    if width < 1 or height < 1:
        raise ImageError(f"image of {width}x{height} pixels; both sides must be at least 1")
    grown_width, grown_height = width, height
    if width * height < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (width * height))
        grown_width, grown_height = int(width * scale), int(height * scale)
    patch = config.patch_size
    plan = _plan_for(_ceil_div(grown_width, patch) * patch, _ceil_div(grown_height, patch) * patch, config)
    if plan.span_tokens > config.max_image_tokens:
        plan = _plan_for(*_shrunk_size(width, height, config), config)
    assert plan.span_tokens <= config.max_image_tokens, f"{width}x{height} planned as {plan}"
    return plan


def span_types(plan: ImagePlan) -> NDArray[np.int32]:
    """Token types of the picture's span, int32 [span_tokens]: START, then per row the IMAGEs and a NEWLINE, END."""
    rows = np.full((plan.token_rows, plan.token_cols + 1), IMAGE, dtype=np.int32)
    rows[:, -1] = NEWLINE
    return np.concatenate(([START], rows.ravel(), [END])).astype(np.int32)


def _check_config(config: VisionConfig) -> None:
    if config.patch_size < 1 or config.downsample_ratio < 1:
        raise ConfigError(f"patch_size {config.patch_size} and downsample_ratio {config.downsample_ratio} must be at least 1")
    if config.max_image_tokens < MIN_SPAN_TOKENS:
        raise ConfigError(f"max_image_tokens is {config.max_image_tokens}; the shortest image span has {MIN_SPAN_TOKENS} tokens")
    if config.max_wh_ratio is not None:
        raise ConfigError(
            f"max_wh_ratio is {config.max_wh_ratio}, but the release sets null and its rule for other values is not "
            "known here; set max_wh_ratio to null"
        )


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _plan_for(width: int, height: int, config: VisionConfig) -> ImagePlan:
    patch_rows, patch_cols = height // config.patch_size, width // config.patch_size
    token_rows = _ceil_div(patch_rows, config.downsample_ratio)
    token_cols = _ceil_div(patch_cols, config.downsample_ratio)
    return ImagePlan(
        width=width,
        height=height,
        patch_rows=patch_rows,
        patch_cols=patch_cols,
        token_rows=token_rows,
        token_cols=token_cols,
        span_tokens=token_rows * (token_cols + 1) + 2,
    )


def _shrunk_size(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """Largest (width, height) of about the original shape whose span fits; measured from the original picture."""
    patch = config.patch_size
    cell = patch * config.downsample_ratio
    budget = config.max_image_tokens - 2  # without START and END: rows * (cols + 1)
    aspect = height / width
    max_cols = math.sqrt(budget / aspect + 0.25) - 0.5  # solves cols * aspect * (cols + 1) = budget
    max_rows = max_cols * aspect
    if max_cols < 1:
        return cell, budget // 2 * cell
    if max_rows < 1:
        return (budget - 1) * cell, cell
    scale = min(math.floor(max_cols) * cell / width, math.floor(max_rows) * cell / height)
    # A cell of one patch (never in the release) can lose its only patch to rounding; one patch always fits.
    shrunk_height = max(patch, math.floor(height * scale / patch) * patch)
    shrunk_width = max(patch, math.floor(width * scale / patch) * patch)
    return shrunk_width, shrunk_height
