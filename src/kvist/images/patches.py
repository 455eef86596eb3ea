"""From RGB pixels to what the vision tower reads: the padded, resized picture and its patch rows.

Owns resampling, normalisation and the identity of a picture; knows nothing of file formats, torch or prompts.
Source: facts section 10.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvist.config import VisionConfig
from kvist.images.errors import ImageError
from kvist.images.plan import ImagePlan, plan_image, span_types

PAD_GREY = (127, 127, 127)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessedImage:
    """One picture, ready for the vision tower and for the prompt.

    `resized`: uint8 [height, width, 3]. `patches`: float32 [patch_rows * patch_cols, 3 * patch_size**2] holding
    bfloat16 values. `span_types`: int32 [span_tokens]. `content_hash`: hex SHA-256 of what the tower sees.
    """

    plan: ImagePlan
    resized: NDArray[np.uint8]
    patches: NDArray[np.float32]
    span_types: NDArray[np.int32]
    content_hash: str


def preprocess(image: NDArray[np.uint8], config: VisionConfig) -> ProcessedImage:
    """Plan, resize, cut and hash one picture. `image`: uint8 [height, width, 3], RGB, at least 1x1.

    Two files that resize to the same pixels get the same `content_hash`, rightly: their features are equal. All 256
    bits count. Raises `ImageError` for another dtype or shape, `ConfigError` as `plan_image` does.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ImageError(f"image must be uint8 [height, width, 3], got {image.dtype} {list(image.shape)}")
    plan = plan_image(image.shape[1], image.shape[0], config)
    resized = resize_and_pad(image, plan.width, plan.height)
    return ProcessedImage(
        plan=plan,
        resized=resized,
        patches=cut_patches(resized, config.patch_size),
        span_types=span_types(plan),
        content_hash=_content_hash(resized, config),
    )


def resize_and_pad(image: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Resize into `width` x `height` keeping the shape, bicubic, centred on grey. uint8 [h, w, 3] in and out.

    The arithmetic is that of Pillow's `ImageOps.pad`. Where that would round the short side of a very thin picture
    to nothing, one pixel is kept, so that the picture is not lost.
    """
    source_height, source_width = image.shape[:2]
    source_ratio, target_ratio = source_width / source_height, width / height
    inner_width, inner_height = width, height
    if source_ratio > target_ratio:
        inner_height = max(1, round(source_height / source_width * width))
    elif source_ratio < target_ratio:
        inner_width = max(1, round(source_width / source_height * height))
    picture = Image.fromarray(np.ascontiguousarray(image)).resize((inner_width, inner_height), resample=Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (width, height), PAD_GREY)
    canvas.paste(picture, (round((width - inner_width) * 0.5), round((height - inner_height) * 0.5)))
    return np.array(canvas, dtype=np.uint8)


def cut_patches(resized: NDArray[np.uint8], patch_size: int) -> NDArray[np.float32]:
    """Normalised patches, row-major over the grid, each flattened (channel, y, x); bfloat16 values in float32.

    `resized`: uint8 [rows * patch_size, cols * patch_size, 3]. Result: float32 [rows * cols, 3 * patch_size**2].
    """
    rows, cols = resized.shape[0] // patch_size, resized.shape[1] // patch_size
    grid = resized.reshape(rows, patch_size, cols, patch_size, 3).transpose(0, 2, 4, 1, 3)
    return _LEVELS[grid.reshape(rows * cols, 3 * patch_size * patch_size)]


def _normalised_levels() -> NDArray[np.float32]:
    """The 256 values a channel can take: (level / 255 - 0.5) / 0.5 in float32, rounded to bfloat16 (ties to even)."""
    half = np.float32(0.5)
    levels = (np.arange(256, dtype=np.float32) / np.float32(255) - half) / half
    bits = levels.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


_LEVELS = _normalised_levels()


def _content_hash(resized: NDArray[np.uint8], config: VisionConfig) -> str:
    height, width = resized.shape[:2]
    header = f"kvist-image 1 {width}x{height} patch {config.patch_size} merge {config.downsample_ratio}\n"
    digest = hashlib.sha256(header.encode())
    digest.update(np.ascontiguousarray(resized).data)
    return digest.hexdigest()
