"""A page's identity: what must change it, what must not, and that no two meanings share canonical bytes (PFX-15, ENG-04)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.cache.identity import (
    EXACT,
    MAX_TOKEN_ID,
    Chain,
    ImageKey,
    bounded,
    common_tokens,
    image_content,
    numerics_string,
    page_key,
    root,
)

NUMERICS = numerics_string(dtype="float32", impl="ref", deterministic=True, quantise=True)
SETTINGS = {"fingerprint": b"m" * 32, "numerics": NUMERICS, "salt": b"", "page_tokens": 4}
IDS = list(range(10, 23))
CAT, DOG = b"c" * 32, b"d" * 32


def chain_of(ids=IDS, images=(), **changes) -> Chain:
    settings = SETTINGS | changes
    chain = Chain(root(**settings), settings["page_tokens"])
    chain.extend(ids, images)
    return chain


def test_the_same_request_has_the_same_pages() -> None:
    chain = chain_of()
    assert chain.digests == chain_of().digests
    assert (chain.tokens, chain.tail_tokens, len(chain.digests)) == (13, 1, 3)
    assert {len(digest) for digest in chain.digests} == {16}
    assert len(set(chain.digests)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": b"n" * 32},
        {"numerics": numerics_string(dtype="bfloat16", impl="ref", deterministic=True, quantise=True)},
        {"numerics": numerics_string(dtype="float32", impl="cpu", deterministic=True, quantise=True)},
        {"numerics": numerics_string(dtype="float32", impl="ref", deterministic=False, quantise=True)},
        {"numerics": numerics_string(dtype="float32", impl="ref", deterministic=True, quantise=False)},
        {"salt": b"tenant"},
    ],
)
def test_kvp_01_every_setting_separates_all_pages(changes) -> None:
    assert not set(chain_of().digests) & set(chain_of(**changes).digests)


def test_page_size_enters_the_root() -> None:
    assert root(**SETTINGS) != root(**(SETTINGS | {"page_tokens": 8}))


def test_neighbouring_fields_of_the_root_do_not_run_together() -> None:
    a = root(fingerprint=b"m" * 32, numerics="x", salt=b"yz", page_tokens=4)
    b = root(fingerprint=b"m" * 32, numerics="xy", salt=b"z", page_tokens=4)
    assert a != b


def test_the_format_version_enters_the_root(monkeypatch) -> None:
    before = root(**SETTINGS)
    monkeypatch.setattr("kvist.cache.identity.FORMAT_VERSION", 2)
    assert root(**SETTINGS) != before


@pytest.mark.parametrize("position", range(12))
def test_a_token_changes_its_page_and_all_after_it(position: int) -> None:
    other = list(IDS)
    other[position] += 1
    same = [a == b for a, b in zip(chain_of().digests, chain_of(other).digests, strict=True)]
    assert same == [number < position // 4 for number in range(3)]


def test_equal_tokens_at_another_place_are_another_page() -> None:
    digests = chain_of([1, 2, 3, 4] * 3).digests
    assert len(set(digests)) == 3


@given(cuts=st.lists(st.integers(0, 40), max_size=6), one_by_one=st.booleans())
def test_pieces_do_not_matter(cuts: list[int], one_by_one: bool) -> None:
    ids = np.arange(40) * 7 % 1000
    images = [ImageKey(CAT, 3, 9), ImageKey(DOG, 12, 2), ImageKey(CAT, 20, 13)]
    whole = chain_of(ids, images)
    edges = sorted({0, 40, *cuts})
    chain = Chain(root(**SETTINGS), 4)
    given_digests = []
    for begin, end in pairwise(edges):
        starting = [image for image in images if begin <= image.start < end]
        if one_by_one and not starting:
            given_digests += [digest for token in ids[begin:end].tolist() if (digest := chain.append(token))]
        else:
            given_digests += chain.extend(ids[begin:end], starting)
    assert given_digests == chain.digests == whole.digests
    assert chain.contents == whole.contents


def test_parents_are_the_digests_before() -> None:
    chain = chain_of()
    assert chain.identity(0) == (chain.digests[0], chain.root)
    assert chain.identity(2) == (chain.digests[2], chain.digests[1])


# ---- images


@pytest.mark.parametrize(
    ("images", "others"),
    [
        ([ImageKey(CAT, 2, 6)], []),
        ([ImageKey(CAT, 2, 6)], [ImageKey(DOG, 2, 6)]),
        ([ImageKey(CAT, 2, 6)], [ImageKey(CAT, 1, 7)]),
        ([ImageKey(CAT, 2, 6)], [ImageKey(CAT, 2, 5)]),
        ([ImageKey(CAT, 2, 6)], [ImageKey(CAT, 2, 3), ImageKey(CAT, 5, 3)]),
        ([ImageKey(CAT, 2, 3), ImageKey(DOG, 5, 3)], [ImageKey(DOG, 2, 3), ImageKey(CAT, 5, 3)]),
    ],
)
def test_image_content_and_place_enter(images, others) -> None:
    ids = [7] * 12
    a, b = chain_of(ids, images).digests, chain_of(ids, others).digests
    assert a[2] != b[2]
    assert a[1] != b[1] or a[0] != b[0]


def test_the_index_in_the_span_enters_a_page_in_its_middle() -> None:
    # Page 1 is all image in both, with the same tokens and picture; only its place in the picture differs.
    a, b = chain_of([7] * 12, [ImageKey(CAT, 0, 12)]), chain_of([7] * 12, [ImageKey(CAT, 1, 11)])
    assert a.contents[1] != b.contents[1]


def test_pfx_15_no_part_of_an_image_digest_is_enough() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    want = image_content(pixels)
    alike: dict[str, bytes] = {}
    for place in range(pixels.size):
        for value in set(range(256)) - {int(pixels.flat[place])}:
            variant = pixels.copy()
            variant.flat[place] = value
            digest = image_content(variant)
            if digest[-2:] == want[-2:]:
                alike.setdefault("last 16 bits", digest)
            if digest[:2] == want[:2]:
                alike.setdefault("first 16 bits", digest)
        if len(alike) == 2:
            break
    assert len(alike) == 2, "the search is too short"
    for digest in alike.values():
        same, other = chain_of([7] * 8, [ImageKey(want, 1, 6)]), chain_of([7] * 8, [ImageKey(digest, 1, 6)])
        assert not set(same.digests) & set(other.digests)
        assert common_tokens(same.contents[0], other.contents[0]) == 1


@pytest.mark.parametrize("place", range(32))
def test_pfx_15_every_byte_of_the_image_digest_counts(place: int) -> None:
    other = bytearray(CAT)
    other[place] ^= 1
    assert chain_of(images=[ImageKey(CAT, 0, 4)]).digests[0] != chain_of(images=[ImageKey(bytes(other), 0, 4)]).digests[0]


def test_image_content_sees_type_shape_and_order() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    variants = [pixels, pixels.reshape(6, 4), pixels.T.copy(), pixels.view(np.int8), pixels.astype(np.uint16)]
    assert len({image_content(variant) for variant in variants}) == len(variants)
    assert image_content(pixels.T) == image_content(pixels.T.copy())


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([ImageKey(b"short", 0, 4)], "5 bytes"),
        ([ImageKey(CAT, 0, 0)], "empty"),
        ([ImageKey(CAT, 4, 4), ImageKey(DOG, 7, 2)], "before position 8"),
        ([ImageKey(CAT, -1, 4)], "before position 0"),
    ],
)
def test_bad_image_spans_are_refused(images, reason: str) -> None:
    chain = Chain(root(**SETTINGS), 4)
    with pytest.raises(ValueError, match=reason):
        chain.extend(IDS, images)
    assert chain.tokens == 0
    assert chain.extend(IDS) == chain_of().digests


def test_an_image_cannot_come_after_its_tokens() -> None:
    chain = chain_of()
    with pytest.raises(ValueError, match="before position 13"):
        chain.extend([1], [ImageKey(CAT, 12, 4)])


# ---- bad input


@pytest.mark.parametrize("bad", [-1, MAX_TOKEN_ID + 1, 2**31 - 1, 2**40])
def test_eng_04_ids_out_of_range_are_refused_with_their_place(bad: int) -> None:
    chain = chain_of()
    with pytest.raises(ValueError, match=rf"token id {bad} at position 15"):
        chain.extend([1, 2, bad, 4])
    with pytest.raises(ValueError, match=rf"token id {bad} at position 13"):
        chain.append(bad)
    assert chain.tokens == 13


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], [True]])
def test_what_is_no_row_of_whole_numbers_is_refused(ids) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        chain_of(ids)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: root(b"short", NUMERICS, b"", 4), "5 bytes"),
        (lambda: root(b"m" * 32, NUMERICS, b"", 0), "page_tokens is 0"),
        (lambda: Chain(b"r", 4), "root"),
        (lambda: Chain(b"r" * 16, 0), "page_tokens is 0"),
        (lambda: bounded(0), "0 positions"),
    ],
)
def test_bad_settings_are_named(call: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        call()


# ---- provenance


def test_provenance_separates_keys() -> None:
    digest = chain_of().digests[0]
    keys = [page_key(digest, p) for p in (EXACT, bounded(8), bounded(16), bounded(128))]
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {16}
    assert keys[0] == digest


# ---- canonical bytes


@st.composite
def requests(draw) -> tuple[list[int], list[ImageKey]]:
    """A few tokens over a tiny alphabet with random spans: likely to share beginnings."""
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    images, at = [], 0
    while at < len(ids) and draw(st.booleans()):
        start = draw(st.integers(at, len(ids) - 1))
        length = draw(st.integers(1, 5))
        images.append(ImageKey(draw(st.sampled_from([CAT, DOG])), start, length))
        at = start + length
    return ids, images


def meaning(ids: list[int], images: list[ImageKey]) -> list[tuple[int, bytes, int]]:
    """Per token: id, content of the image it stands in, and its index there."""
    words = [(token, b"", 0) for token in ids]
    for image in images:
        for at in range(image.start, min(image.end, len(ids))):
            words[at] = (ids[at], image.content, at - image.start)
    return words


@given(a=requests(), b=requests())
def test_common_tokens_are_those_of_equal_meaning(a, b) -> None:
    chains = [Chain(b"r" * 16, 16), Chain(b"r" * 16, 16)]
    for chain, (ids, images) in zip(chains, (a, b), strict=True):
        chain.extend(ids, images)
    left, right = meaning(*a), meaning(*b)
    want = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    contents = [chain.content(0) for chain in chains]
    assert common_tokens(*contents) == want
    assert (contents[0] == contents[1]) == (left == right)
    assert contents[1].startswith(contents[0]) == (right[: len(left)] == left)
