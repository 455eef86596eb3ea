"""From the bytes of an encoded picture to RGB pixels, with every refusal decided before memory is spent.

Owns the limits and the meaning of each pixel format; knows nothing of resizing, patches or URLs.
Sources are untrusted: only the raster formats in `FORMATS` are tried (none of them starts another program), and the
size in the header is checked before a single pixel is decoded.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvist.images.errors import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# A JPEG marker that ends entropy-coded data; 0xFF00, restarts and the codes that decoders skip are none.
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd8-\xfe])")
_SCAN, _END = 0xDA, 0xD9

# What Pillow's readers raise on damaged input, besides the decompression-bomb errors.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What a picture may cost: encoded bytes, and width x height in pixels as its header states them.

    The default of 64 million pixels admits 8000x6000 and holds 192 MB of RGB. Pillow has a ceiling of its own
    (`PIL.Image.MAX_IMAGE_PIXELS`, about 89 million, refused from twice that); a higher `max_pixels` needs it raised.
    `max_scans`: how often a JPEG of `max_pixels` may pass over its pixels, a smaller one more often. Progressive encoders
    write 6 to 18 scans, a hostile file thousands of a hundred bytes each.
    """

    max_bytes: int = 64 << 20
    max_pixels: int = 64_000_000
    max_scans: int = 24


def decode_image(source: bytes | str | os.PathLike[str], limits: ImageLimits | None = None) -> NDArray[np.uint8]:
    """Decode one picture to RGB, uint8 [height, width, 3]. `source` is the encoded bytes or a file's path.

    The result is the reference's `convert("RGB")`, which means:

    - alpha (RGBA, LA, a palette's transparent entry): the alpha channel is dropped, nothing is composited; a fully
      transparent pixel shows the colour that the file stores for it;
    - CMYK and YCbCr: Pillow's plain conversion, no colour profile is applied;
    - palette, grey, 1 bit: expanded to RGB;
    - EXIF orientation: ignored, the pixels stay as stored;
    - several frames: the first one.

    One deviation: 16-bit grey keeps its high byte, as 16-bit colour does; plain `convert` would clip every level above
    255 to white.

    Raises `ImageError` for an unreadable path, an unknown or damaged file, a truncated one and one over `limits`.
    """
    limits = limits or ImageLimits()
    data = _read(source, limits)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image.size, limits)
            if image.format in ("JPEG", "MPO"):
                _check_scans(data, image.size, limits)
            return np.array(_to_rgb(image), dtype=np.uint8)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(
            f"image refused before decoding, the limit is {limits.max_pixels} pixels; send a smaller one ({error})"
        ) from error
    except MemoryError as error:
        raise ImageError("image does not fit into memory; send a smaller one or lower max_pixels") from error
    except _DAMAGED as error:
        raise ImageError(
            f"cannot decode an image of {len(data)} bytes: damaged, truncated or none of {', '.join(FORMATS)} "
            f"({type(error).__name__}: {error})"
        ) from error


def _read(source: bytes | str | os.PathLike[str], limits: ImageLimits) -> bytes:
    if isinstance(source, bytes):
        data = source
    else:
        path = Path(source)
        try:
            with path.open("rb") as file:
                data = file.read(limits.max_bytes + 1)
        except OSError as error:
            raise ImageError(f"cannot read image file {str(path)!r}: {error.strerror or error}") from error
    if len(data) > limits.max_bytes:
        size = f"{len(data)} bytes" if isinstance(source, bytes) else f"file {str(source)!r}"
        raise ImageError(f"encoded image ({size}) is above the limit of {limits.max_bytes} bytes; send a smaller one")
    if not data:
        raise ImageError("image is empty: 0 bytes")
    return data


def _check_pixels(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"image of {width}x{height} pixels; both sides must be at least 1")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"image of {width}x{height} = {width * height} pixels is above the limit of {limits.max_pixels} pixels; "
            "send a smaller one"
        )


def _check_scans(data: bytes, size: tuple[int, int], limits: ImageLimits) -> None:
    pixels, scans = size[0] * size[1], _jpeg_scans(data)
    if scans * pixels > limits.max_scans * limits.max_pixels:
        raise ImageError(
            f"JPEG of {size[0]}x{size[1]} pixels in {scans} scans; a picture of this size may have "
            f"{limits.max_scans * limits.max_pixels // pixels}; save it again, not progressive"
        )


def _jpeg_scans(data: bytes) -> int:
    """Scans of the first picture in a JPEG file, by its markers: metadata is stepped over, nothing is decoded."""
    at, scans = 2, 0
    while (found := _MARKER.search(data, at)) and found[1][0] != _END:
        scans += found[1][0] == _SCAN
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return scans


def _to_rgb(image: Image.Image) -> Image.Image:
    image.info.pop("transparency", None)  # dropped anyway; Pillow would warn of a palette's
    # "I" is what older Pillow versions make of a 16-bit grey PNG; no accepted format holds wider integers.
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")
