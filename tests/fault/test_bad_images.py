"""Hostile and broken pictures: each ends in an `ImageError` that says why, quickly and before memory is spent."""

from __future__ import annotations

import io
import random
import struct
import time
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvist.images import ImageError, ImageLimits, decode_image

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png_header(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that claims a size; `data` is its compressed pixel stream."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def samples() -> list[bytes]:
    image = Image.fromarray(PIXELS)
    return [
        encoded(image, "JPEG"),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image, "PNG"),
        encoded(image.convert("P"), "PNG", transparency=3),
        encoded(image, "WEBP"),
        encoded(image, "GIF"),
        encoded(image, "BMP"),
    ]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(20000, 20000), (12000, 12000), (8001, 8001), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_from_the_header(width: int, height: int) -> None:
    """The pixel stream is empty: any attempt to decode it would end in another error than the one of the limit."""
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="64000000 pixels") as caught:
            decode_image(png_header(width, height))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(width * height) in str(caught.value)
    assert "send a smaller one" in str(caught.value)
    assert peak_bytes < 1 << 20


def test_a_warning_turned_into_an_error_is_still_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match="64000000 pixels"):
            decode_image(png_header(12000, 12000))


def test_the_limits_are_the_callers() -> None:
    data = encoded(Image.fromarray(PIXELS), "PNG")
    assert decode_image(data, ImageLimits(max_pixels=23 * 31, max_bytes=len(data))).shape == (23, 31, 3)
    with pytest.raises(ImageError, match=r"31x23 = 713 pixels is above the limit of 712"):
        decode_image(data, ImageLimits(max_pixels=712))
    with pytest.raises(ImageError, match=f"limit of {len(data) - 1} bytes"):
        decode_image(data, ImageLimits(max_bytes=len(data) - 1))


def test_long_file_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(8 << 30)  # sparse
    with pytest.raises(ImageError, match=r"large\.png.*above the limit of 1000 bytes"):
        decode_image(path, ImageLimits(max_bytes=1000))


def test_truncated_jpeg() -> None:
    data = encoded(Image.fromarray(PIXELS), "JPEG")
    for length in (3, 20, len(data) // 2, len(data) - 40):
        with pytest.raises(ImageError, match=f"{length} bytes"):
            decode_image(data[:length])


def progressive_bomb(side: int, scans: int) -> bytes:
    """A progressive JPEG whose scans each run over all blocks and say in a few bytes that nothing changes."""

    def segment(kind: int, body: bytes) -> bytes:
        return bytes([0xFF, kind]) + struct.pack(">H", len(body) + 2) + body

    one_code = bytes([1] + [0] * 15)
    blocks = (side // 8) ** 2
    skip_all = "".join("0" + "1" * 14 for _ in range(-(-blocks // 32767)))  # each: code 0 (a run of 2**14), 14 bits more
    skip_all += "1" * (-len(skip_all) % 8)
    run = int(skip_all, 2).to_bytes(len(skip_all) // 8, "big").replace(b"\xff", b"\xff\0")
    head = segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0")
    tables = segment(0xC4, b"\x10" + one_code + b"\xe0") + segment(0xC4, b"\0" + one_code + b"\0")
    first = segment(0xDA, b"\1\1\0\0\0\0") + b"\0" * (blocks // 8 + 1)
    other = segment(0xDA, b"\1\1\0\1\x3f\0") + run
    return b"\xff\xd8" + head + tables + first + other * (scans - 1) + b"\xff\xd9"


def test_a_jpeg_of_endless_scans_is_refused_before_decoding() -> None:
    """A megabyte can ask for a minute of work: 5 ms a scan at 8000x8000, a hundred bytes each."""
    data = progressive_bomb(8000, 10_000)
    assert len(data) < 2 << 20
    began = time.perf_counter()
    with pytest.raises(ImageError, match=r"8000x8000 pixels in 10000 scans; a picture of this size may have 24"):
        decode_image(data)
    assert time.perf_counter() - began < 2
    assert decode_image(progressive_bomb(80, 1000)).shape == (80, 80, 3), "work counts, not scans"


def test_ordinary_progressive_jpegs_of_the_largest_size_pass() -> None:
    """CMYK has the most scans of any encoder's script; what only looks like a scan, in metadata or behind the end, is none."""
    picture = Image.fromarray(PIXELS).convert("CMYK")
    data = encoded(picture, "JPEG", progressive=True, comment=b"\xff\xda" * 1000) + b"\xff\xda" * 1000
    pixels = PIXELS.shape[0] * PIXELS.shape[1]
    assert decode_image(data, ImageLimits(max_pixels=pixels)).shape == PIXELS.shape
    with pytest.raises(ImageError, match="18 scans"):
        decode_image(data, ImageLimits(max_pixels=pixels, max_scans=17))


@pytest.mark.filterwarnings("error")
def test_a_palette_with_many_transparent_entries_is_read_without_a_warning() -> None:
    image = Image.fromarray(PIXELS).convert("P")
    assert np.array_equal(decode_image(encoded(image, "PNG", transparency=bytes(range(256)))), np.asarray(image.convert("RGB")))


def test_corrupt_jpeg_tables() -> None:
    data = bytearray(encoded(Image.fromarray(PIXELS), "JPEG"))
    start = data.index(b"\xff\xc4")  # the first Huffman table
    data[start + 4 : start + 60] = b"\xff" * 56
    with pytest.raises(ImageError, match="damaged"):
        decode_image(bytes(data))


@pytest.mark.parametrize("data", [b"GIF89a", b"hello, I am text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\0" * 500])
def test_bytes_that_are_no_picture(data: bytes) -> None:
    with pytest.raises(ImageError, match="JPEG, PNG, WEBP, GIF, BMP"):
        decode_image(data)


def test_empty_bytes() -> None:
    with pytest.raises(ImageError, match="0 bytes"):
        decode_image(b"")


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_zero_sizes_in_the_header(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError):
        decode_image(png_header(*size, zlib.compress(b"\0")))


def test_formats_that_are_not_offered() -> None:
    """PostScript would start another program, TIFF and others are not accepted: the reader is never even tried."""
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    for data in (postscript, encoded(Image.fromarray(PIXELS), "TIFF")):
        with pytest.raises(ImageError, match="none of"):
            decode_image(data)


def test_paths(tmp_path: Path) -> None:
    path = tmp_path / "ok.png"
    path.write_bytes(encoded(Image.fromarray(PIXELS), "PNG"))
    assert np.array_equal(decode_image(path), PIXELS)
    assert np.array_equal(decode_image(str(path)), PIXELS)
    with pytest.raises(ImageError, match="missing"):
        decode_image(tmp_path / "missing.png")
    with pytest.raises(ImageError, match="cannot read image file"):
        decode_image(tmp_path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("sample", range(7))
def test_random_damage_never_escapes(sample: int) -> None:
    """Cut and overwritten files either decode to a picture of bounded size or raise `ImageError`, nothing else."""
    original = samples()[sample]
    draw = random.Random(sample)
    limits = ImageLimits(max_pixels=1_000_000)
    refused = 0
    for _ in range(60):
        data = bytearray(original[: draw.choice((len(original), draw.randrange(1, len(original))))])
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(min(len(data), draw.choice((40, 4000))))] = draw.randrange(256)
        try:
            image = decode_image(bytes(data), limits)
        except ImageError:
            refused += 1
        else:
            assert image.dtype == np.uint8
            assert image.ndim == 3
            assert 0 < image.shape[0] * image.shape[1] <= limits.max_pixels
    assert refused > 10
