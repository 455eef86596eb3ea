"""Whose page is this: the root of a hash chain, the chain of one request, and a page's key with its provenance.

Owns the canonical byte form of tokens and images; index, tiers and store only compare the keys. Must not know pages' bytes,
memory or torch. Design section 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FORMAT_VERSION: Final = 1
"""Enters every root: pages of another version of the page format or of this hashing are never found."""
NUMERICS_VERSION: Final = 2
"""Enters `numerics_string`: raise it when the same settings begin to compute other cache bytes."""
DIGEST_BYTES: Final = 16
CONTENT_BYTES: Final = 32
EXACT: Final = 0
"""Provenance of a page of which no row descends from a bounded hit."""
MAX_TOKEN_ID: Final = (1 << 30) - 1

# A token is a big-endian word. Two bits above the id say that it stands in an image, and that an image (or its
# continuation from the page before) starts here: content digest and index in the span follow such a word. So the bytes
# can be read back in one way only, and byte order is token order: a prefix of tokens is a prefix of bytes.
_IMAGE: Final = 1 << 31
_START: Final = 1 << 30
_WORD: Final = 4
_START_BYTES: Final = _WORD + CONTENT_BYTES + _WORD


class ImageKey(NamedTuple):
    """One image in a request: digest of its content (32 bytes), first position, and number of positions it covers."""

    content: bytes
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position after the span."""
        return self.start + self.length


class Identity(NamedTuple):
    """A page's digest and the digest before it in its chain (the root for a first page); 16 bytes each."""

    digest: bytes
    parent: bytes


def numerics_string(*, dtype: str, impl: str, deterministic: bool, quantise: bool) -> str:
    """The settings that decide the bytes of a cache, as `root` wants them; one text for one meaning."""
    mode = "deterministic" if deterministic else "default"
    return f"v{NUMERICS_VERSION} dtype={dtype} impl={impl} mode={mode} quantise={'on' if quantise else 'off'}"


def root(fingerprint: bytes, numerics: str, salt: bytes, page_tokens: int) -> bytes:
    """Digest (16 bytes) that starts every chain of one model, one numerics and one tenant.

    Raises `ValueError` for a fingerprint under 16 bytes (it would identify nothing) or pages without tokens.
    """
    if len(fingerprint) < DIGEST_BYTES:
        raise ValueError(f"the model fingerprint has {len(fingerprint)} bytes; at least {DIGEST_BYTES} identify a model")
    if page_tokens < 1:
        raise ValueError(f"page_tokens is {page_tokens}; at least 1")
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"kvist root")
    for field in (str(FORMAT_VERSION).encode(), fingerprint, numerics.encode(), salt, str(page_tokens).encode()):
        # Lengths keep neighbouring fields apart: ("ab", "c") is not ("a", "bc").
        hasher.update(len(field).to_bytes(8, "little") + field)
    return hasher.digest()


def image_content(pixels: NDArray[np.generic]) -> bytes:
    """Digest (32 bytes) of a prepared image: type, shape and every value of its patch array."""
    array = np.ascontiguousarray(pixels)
    hasher = blake2b(digest_size=CONTENT_BYTES, person=b"kvist image")
    hasher.update(f"{array.dtype.str} {array.shape} ".encode())
    hasher.update(array.tobytes())
    return hasher.digest()


def bounded(replay: int) -> int:
    """Provenance of a page with a row that descends from a hit replayed on `replay` positions only."""
    if not 1 <= replay < 1 << 31:
        raise ValueError(f"a bounded replay has {replay} positions; from 1 to 2**31 - 1 (exact pages have provenance EXACT)")
    return replay


def page_key(digest: bytes, provenance: int) -> bytes:
    """The key (16 bytes) under which index, tiers and store hold a page: its digest, told apart by provenance."""
    if provenance == EXACT:
        return digest
    return blake2b(digest + provenance.to_bytes(4, "little"), digest_size=DIGEST_BYTES, person=b"kvist bounded").digest()


class Chain:
    """The hash chain of one request: digests of its complete pages, and the tokens of the page that is not complete.

    Give it committed tokens only, in order: `tokens` is then also the length of the cache that they fill.
    """

    __slots__ = ("_images", "_starts", "_tail", "contents", "digests", "page_tokens", "root")

    def __init__(self, root: bytes, page_tokens: int) -> None:
        if len(root) != DIGEST_BYTES:
            raise ValueError(f"the root of a chain has {len(root)} bytes, not {DIGEST_BYTES}; make it with `root`")
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}; at least 1")
        self.root, self.page_tokens = root, page_tokens
        self.digests: list[bytes] = []
        self.contents: list[bytes] = []
        self._images: list[ImageKey] = []
        self._starts: list[int] = []
        self._tail: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens given so far."""
        return len(self.digests) * self.page_tokens + len(self._tail)

    @property
    def tail_tokens(self) -> int:
        """Tokens of the page that is not complete."""
        return len(self._tail)

    def extend(self, token_ids: ArrayLike, images: Sequence[ImageKey] = ()) -> list[bytes]:
        """Append tokens; returns the digests of pages that became complete.

        `images` are spans in positions of the request; one may reach beyond these tokens, none may start before them.
        Raises `ValueError` (and changes nothing) for an id that is not a whole number from 0 to 2**30 - 1, or such a span.
        """
        words = _checked_ids(token_ids, self.tokens)
        self._add_images(images)
        begin = self.tokens
        end = begin + len(words)
        for image in self._overlapping(begin, end):
            words[max(image.start, begin) - begin : image.end - begin] |= np.uint32(_IMAGE)
        words = np.concatenate([np.array(self._tail, dtype=np.uint32), words])
        first = len(self.digests)
        whole = len(words) - len(words) % self.page_tokens
        if (words >= _IMAGE).any():
            for at in range(0, whole, self.page_tokens):
                self._complete(words[at : at + self.page_tokens])
        else:
            # Text alone, of which there may be a million tokens: its bytes are made at once.
            plain, size = words[:whole].astype(">u4").tobytes(), _WORD * self.page_tokens
            digest = self.parent(first)
            for at in range(0, len(plain), size):
                content = plain[at : at + size]
                digest = content_digest(digest, content)
                self.digests.append(digest)
                self.contents.append(content)
        self._tail = words[whole:].tolist()
        return self.digests[first:]

    def append(self, token_id: int) -> bytes | None:
        """`extend` by one token, cheaply: what a decode step does. Returns the digest if it completes a page."""
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise ValueError(f"token id {token_id} at position {self.tokens}; ids are whole numbers from 0 to {MAX_TOKEN_ID}")
        position = self.tokens
        inside = bool(self._images) and self._images[-1].end > position and bool(self._overlapping(position, position + 1))
        self._tail.append(token_id | _IMAGE if inside else token_id)
        if len(self._tail) < self.page_tokens:
            return None
        self._complete(np.array(self._tail, dtype=np.uint32))
        self._tail = []
        return self.digests[-1]

    def parent(self, number: int) -> bytes:
        """The digest before page `number`: the root for page 0."""
        return self.digests[number - 1] if number else self.root

    def identity(self, number: int) -> Identity:
        """Digest and parent of complete page `number`."""
        return Identity(self.digests[number], self.parent(number))

    def content(self, number: int) -> bytes:
        """Canonical bytes of the tokens of page `number`; the page that is not complete is the one after the last digest."""
        if number < len(self.digests):
            return self.contents[number]
        if number > len(self.digests):
            return b""
        return self._encode(np.array(self._tail, dtype=np.uint32), number * self.page_tokens)

    def _complete(self, words: NDArray[np.uint32]) -> None:
        self._add(self._encode(words, len(self.digests) * self.page_tokens))

    def _add(self, content: bytes) -> None:
        self.digests.append(content_digest(self.parent(len(self.digests)), content))
        self.contents.append(content)

    def _encode(self, words: NDArray[np.uint32], first: int) -> bytes:
        plain = words.astype(">u4").tobytes()
        if not (words >= _IMAGE).any():
            return plain
        pieces, done = [], 0
        for image in self._overlapping(first, first + len(words)):
            at = max(image.start, first) - first
            start = (int(words[at]) | _START).to_bytes(_WORD, "big")
            index = (first + at - image.start).to_bytes(_WORD, "big")
            pieces += [plain[_WORD * done : _WORD * at], start, image.content, index]
            done = at + 1
        return b"".join([*pieces, plain[_WORD * done :]])

    def _add_images(self, images: Sequence[ImageKey]) -> None:
        end = max(self._images[-1].end if self._images else 0, self.tokens)
        for image in images:
            if len(image.content) != CONTENT_BYTES:
                raise ValueError(f"an image's content digest has {len(image.content)} bytes; all {CONTENT_BYTES} are needed")
            if image.start < end or not 1 <= image.length < 1 << 31:
                raise ValueError(
                    f"image span [{image.start}, {image.end}) is empty, out of order, or starts before position {end}, "
                    "up to which the chain is settled"
                )
            end = image.end
        self._images += images
        self._starts += [image.start for image in images]

    def _overlapping(self, begin: int, end: int) -> list[ImageKey]:
        first = max(bisect_right(self._starts, begin) - 1, 0)
        last = bisect_right(self._starts, end - 1)
        return [image for image in self._images[first:last] if image.end > begin]


def content_digest(parent: bytes, content: bytes) -> bytes:
    """Digest (16 bytes) of a page: the digest before it and the canonical bytes of its tokens."""
    return blake2b(parent + content, digest_size=DIGEST_BYTES, person=b"kvist page").digest()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many first tokens two canonical byte strings share, image identity included."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    shared = size - (difference.bit_length() + 7) // 8
    tokens = at = 0
    while at < shared:
        at += _START_BYTES if a[at] & (_START >> 24) else _WORD
        tokens += at <= shared
    return tokens


def _checked_ids(token_ids: ArrayLike, position: int) -> NDArray[np.uint32]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids are one row of whole numbers; got {ids.dtype} {list(ids.shape)}")
    bad = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))
    if bad.size:
        at = int(bad[0])
        raise ValueError(f"token id {ids[at]} at position {position + at}; ids are whole numbers from 0 to {MAX_TOKEN_ID}")
    return ids.astype(np.uint32)
