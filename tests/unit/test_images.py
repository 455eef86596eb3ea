"""Resize plans, span layout, patches, the identity of a picture and the meaning of each pixel format, value by value.

The plan values of VIS-02 are those of the shared list of bug cases.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from kvist.config import ConfigError, VisionConfig
from kvist.images import ImageError, decode_image, plan_image, preprocess, span_types
from kvist.images.patches import PAD_GREY, cut_patches, resize_and_pad

VISION = VisionConfig(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816)


def vision(**changes: float | None) -> VisionConfig:
    sizes = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4}
    return VisionConfig(**(sizes | changes))


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png16(colour_type: int, channels: int, levels: list[int]) -> bytes:
    """A one-row 16-bit PNG whose channels all hold `levels`; Pillow writes 16 bits only for grey."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + b"".join(struct.pack(">H", level) * channels for level in levels)
    header = struct.pack(">IIBBBBB", len(levels), 1, 16, colour_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1344, 1302, 962),
        (1302, 1344, 963),
        (3024, 588, 1024),
        (546, 3066, 1024),
        (100000, 1, 1024),
        (1, 100000, 1024),
        (1, 1, 184),
    ],
)
def test_vis02_span_counts(width: int, height: int, tokens: int) -> None:
    plan = plan_image(width, height, VISION)
    assert plan.span_tokens == tokens == len(span_types(plan))


def test_order_of_float_operations_decides_a_patch_row() -> None:
    """Both pictures are 16:9, but for one of them the product ends just under a multiple of 14."""
    assert plan_image(2560, 1440, VISION).height == 952
    assert plan_image(3840, 2160, VISION).height == 966


def test_grid_is_the_same_at_a_multiple_and_grows_one_pixel_later() -> None:
    assert plan_image(714, 714, VISION).patch_cols == 51
    assert plan_image(715, 714, VISION).patch_cols == 52


def test_span_layout() -> None:
    plan = plan_image(42 * 3, 42 * 2, vision(min_pixels=0))
    assert (plan.token_rows, plan.token_cols, plan.image_tokens) == (2, 3, 6)
    assert span_types(plan).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 7)])
def test_empty_sizes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match=f"{size[0]}x{size[1]}"):
        plan_image(*size, VISION)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_wh_ratio": 8.0}, "max_wh_ratio is 8.0"),
        ({"max_image_tokens": 3}, "max_image_tokens is 3"),
        ({"patch_size": 0}, "patch_size 0"),
        ({"downsample_ratio": 0}, "downsample_ratio 0"),
    ],
)
def test_configurations_without_a_plan_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_image(10, 10, vision(**changes))


def test_patches_are_row_major_and_channel_major() -> None:
    resized = np.random.default_rng(0).integers(0, 256, (28, 42, 3), dtype=np.uint8)
    patches = cut_patches(resized, 14)
    assert patches.shape == (6, 588)
    for row in range(2):
        for col in range(3):
            for channel, y, x in ((0, 0, 0), (1, 3, 5), (2, 13, 0), (0, 0, 13)):
                level = float(resized[row * 14 + y, col * 14 + x, channel])
                value = patches[row * 3 + col, channel * 196 + y * 14 + x]
                assert abs(value - (level / 127.5 - 1)) <= 2**-8 * abs(level / 127.5 - 1)


def test_patch_values_are_bfloat16() -> None:
    levels = np.arange(256, dtype=np.uint8)
    resized = np.repeat(levels, 3).reshape(16, 16, 3)
    patches = cut_patches(resized, 16)
    assert not (patches.view(np.uint32) & 0xFFFF).any()
    assert patches[0, 0] == -1.0
    assert patches[0, 255] == 1.0


def test_a_very_thin_picture_keeps_one_pixel() -> None:
    """1x100000 fitted into 42x21462 would be 0.2 pixels wide; the picture must not vanish behind the grey."""
    thin = np.full((100_000, 1, 3), (250, 10, 10), dtype=np.uint8)
    got = preprocess(thin, VISION)
    assert got.resized.shape == (21462, 42, 3)
    columns = (got.resized != np.array(PAD_GREY)).any(axis=(0, 2))
    assert columns.sum() == 1


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 5000), (5000, 1)])
def test_extreme_sizes_have_a_result(width: int, height: int) -> None:
    got = preprocess(np.full((height, width, 3), 200, dtype=np.uint8), VISION)
    assert got.patches.shape == (got.plan.patch_rows * got.plan.patch_cols, 588)
    assert got.plan.span_tokens <= 1024
    assert (got.resized == 200).any()
    target = (got.plan.width, got.plan.height)
    padded = ImageOps.pad(Image.new("RGB", (width, height), (200,) * 3), target, color=PAD_GREY)
    assert np.array_equal(got.resized, np.asarray(padded))


def test_padding_is_grey_and_centred() -> None:
    wide = np.zeros((10, 100, 3), dtype=np.uint8)
    got = resize_and_pad(wide, 112, 42)
    inner = (got == 0).all(axis=(1, 2))
    assert inner.sum() == 11
    assert (got[~inner] == 127).all()
    assert np.flatnonzero(inner)[0] == round((42 - 11) / 2)


def test_content_hash_sees_every_pixel_and_the_shape() -> None:
    config = vision(min_pixels=0)
    base = np.zeros((28, 42, 3), dtype=np.uint8)
    changed = base.copy()
    changed[27, 41, 2] = 1
    hashes = [preprocess(image, config).content_hash for image in (base, changed, base.reshape(42, 28, 3))]
    assert len(set(hashes)) == 3
    assert all(len(value) == 64 for value in hashes)
    assert preprocess(base.copy(), config).content_hash == hashes[0]


@pytest.mark.parametrize("shape", [(5, 5), (5, 5, 4), (1, 5, 5, 3)])
def test_wrong_arrays_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="uint8 \\[height, width, 3\\]"):
        preprocess(np.zeros(shape, dtype=np.uint8), VISION)
    with pytest.raises(ImageError, match="float32"):
        preprocess(np.zeros((5, 5, 3), dtype=np.float32), VISION)  # type: ignore[arg-type]


def test_alpha_is_dropped_not_composited() -> None:
    pixels = np.array([[[10, 20, 30, 0], [200, 100, 50, 128], [1, 2, 3, 255]]], dtype=np.uint8)
    assert np.array_equal(decode_image(encoded(Image.fromarray(pixels), "PNG")), pixels[..., :3])
    grey = np.array([[[77, 0], [5, 255]]], dtype=np.uint8)
    assert decode_image(encoded(Image.fromarray(grey, "LA"), "PNG"))[0].tolist() == [[77] * 3, [5] * 3]


def test_palette_is_expanded_and_its_transparency_ignored() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    for data in (encoded(image, "PNG", transparency=0), encoded(image, "GIF")):
        assert decode_image(data)[0].tolist() == [[255, 0, 0], [0, 255, 0]]


def test_cmyk_jpeg_is_converted_plainly() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = encoded(image, "JPEG", quality=100, subsampling=0)
    got = decode_image(data)
    assert np.array_equal(got, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.abs(got.astype(int) - (255, 0, 0)).max() <= 2


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (4, 2), (2, 3), (6, 4)])
def test_sixteen_bits_keep_the_high_byte(colour_type: int, channels: int) -> None:
    levels = [0, 255, 256, 0x80FF, 65535]
    got = decode_image(png16(colour_type, channels, levels))
    assert got[0].tolist() == [[level >> 8] * 3 for level in levels]


def test_exif_orientation_is_ignored() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 24, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(image, "JPEG"), encoded(image, "JPEG", exif=exif)
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    assert np.array_equal(decode_image(turned), decode_image(plain))


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(data) == (255, 0, 0)).all()
