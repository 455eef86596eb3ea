"""docs/cache-format.md says enough to find a page by its tokens and to read its numbers: both done here from its words alone."""

from __future__ import annotations

import math
from hashlib import blake2b

import pytest
import torch

from kvist.cache.identity import EXACT, Chain, ImageKey, bounded, numerics_string, page_key, root
from kvist.cache.page_rows import PageRows
from kvist.page_layout import PageLayout
from kvist.presets import preset

TOKENS = 8
FINGERPRINT, SALT = bytes(range(32)), b"a tenant"
NUMERICS = "v2 dtype=float32 impl=cpu mode=default quantise=on"


def hashed(person: bytes, *parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=16, person=person).digest()


def keys_by_the_document(ids: list[int], images: list[tuple[bytes, int, int]], replayed: int) -> list[bytes]:
    """Keys of the whole pages of a prompt; images are (digest, first position, length)."""
    fields = [b"1", FINGERPRINT, NUMERICS.encode(), SALT, str(TOKENS).encode()]
    before = hashed(b"kvist root", *(len(field).to_bytes(8, "little") + field for field in fields))
    found = []
    for first in range(0, len(ids) - TOKENS + 1, TOKENS):
        content = b""
        for position in range(first, first + TOKENS):
            inside = [image for image in images if image[1] <= position < image[1] + image[2]]
            word = ids[position]
            if not inside:
                content += word.to_bytes(4, "big")
                continue
            digest, start, _ = inside[0]
            opens = position in (start, first)
            content += (word + (1 << 31) + (opens << 30)).to_bytes(4, "big")
            content += digest + (position - start).to_bytes(4, "big") if opens else b""
        before = hashed(b"kvist page", before, content)
        found.append(before if not replayed else hashed(b"kvist bounded", before, replayed.to_bytes(4, "little")))
    return found


@pytest.mark.parametrize("replayed", [0, 128])
@pytest.mark.parametrize(
    "images",
    [[], [(b"p" * 32, 3, 2), (b"q" * 32, 5, 15)], [(b"p" * 32, 8, 8), (b"p" * 32, 16, 3)]],
    ids=["text", "across", "whole"],
)
def test_keys(images: list[tuple[bytes, int, int]], replayed: int) -> None:
    assert numerics_string(dtype="float32", impl="cpu", deterministic=False, quantise=True) == NUMERICS
    ids = [(7919 * i) % 129_280 for i in range(37)]
    chain = Chain(root(FINGERPRINT, NUMERICS, SALT, TOKENS), TOKENS)
    chain.extend(ids, [ImageKey(*image) for image in images])
    ours = [page_key(digest, bounded(replayed) if replayed else EXACT) for digest in chain.digests]
    assert ours == keys_by_the_document(ids, images, replayed)
    assert len(ours) == 4


def fp4(code: int) -> float:
    return math.copysign((0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7], -1 if code & 8 else 1)


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    size = mantissa * 2.0**-9 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(size, -1 if byte & 128 else 1)


def e8m0(byte: int) -> float:
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def rows_by_the_document(page: bytes, sources: list[int], widths: tuple[int, int]) -> list[list[list[float]]]:
    """Main rows and keys, source by source: `sources` are ratios in layer order, `widths` head_dim and index_head_dim."""
    planes, at = [], 0
    for ratio in sources:
        for width, group, scale in ((widths[0], 16, e4m3), (widths[1], 32, e8m0)):
            count, rows = TOKENS // ratio, []
            codes, scales = at, -(-(at + count * width // 2) // 128) * 128
            for row in range(count):
                values = []
                for channel in range(width):
                    byte = page[codes + row * (width // 2) + channel // 2]
                    code = byte >> 4 if channel % 2 else byte & 15
                    values.append(fp4(code) * scale(page[scales + row * (width // group) + channel // group]))
                rows.append(values)
            planes.append(rows)
            at = -(-(scales + count * width // group) // 128) * 128
    assert at == len(page)
    return planes


def test_numbers() -> None:
    config = preset("tiny")
    held = PageRows(PageLayout.of(config, TOKENS), 3, 1, 2 * TOKENS, torch.device("cpu"))
    held.set_pages(0, [2, 1])
    draws = torch.Generator().manual_seed(0)
    expected = []
    for spec in config.plan.kv_sources:
        count = 2 * TOKENS // spec.ratio
        sizes = torch.logspace(-3, 3, count)[:, None]
        main, key = (torch.randn(count, width, generator=draws) * sizes for width in (config.head_dim, config.index_head_dim))
        slots, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count) * spec.ratio
        held.write(spec.index, slots, positions, main, key)
        expected += [held.main(spec.index, 0, torch.arange(count), torch.float32), held.keys(spec.index, 0, count, torch.float32)]
    ratios = [spec.ratio for spec in config.plan.kv_sources]
    assert len(set(ratios)) == 2
    for number, page in enumerate((2, 1)):
        found = rows_by_the_document(bytes(held.bytes_PB[page].numpy()), ratios, (config.head_dim, config.index_head_dim))
        for plane, values in zip(found, expected, strict=True):
            mine = values[number * len(plane) : (number + 1) * len(plane)]
            assert mine.abs().max() > 0
            assert mine.tolist() == plane
