"""An index with its pool as a request uses them, for tests of the prefix index. Knows no page bytes."""

from __future__ import annotations

import numpy as np

from kvist.cache.identity import EXACT, Chain, root
from kvist.cache.pool import PagePool
from kvist.cache.prefix import Match, PrefixIndex, PrefixQuery

ROOT = root(b"m" * 32, "numerics", b"", 4)
CAT, DOG = b"c" * 32, b"d" * 32


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


class Shop:
    """An index with its pool, and what a request does with them, without any page bytes."""

    def __init__(self, pages: int = 64, page_tokens: int = 4, tiers=()) -> None:
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, page_tokens, tiers)
        self.page_tokens = page_tokens

    def chain(self, tokens, images=(), start: bytes = ROOT) -> Chain:
        chain = Chain(start, self.page_tokens)
        chain.extend(tokens, images)
        return chain

    def store(self, tokens, images=(), *, start: bytes = ROOT, provenance: int = EXACT) -> list[int]:
        """A request with these tokens runs and ends: a hit is used, the rest computed, all of it published."""
        chain = self.chain(tokens, images, start)
        found = self.index.match(PrefixQuery(chain, provenance))
        pages = list(found.pages) + self.pool.allocate(-(-chain.tokens // self.page_tokens) - len(found.pages))
        if found.partial:
            self.pool.release([found.partial[0]])
        whole = len(chain.digests)
        assert self.index.publish(chain, len(found.pages), pages[len(found.pages) : whole], provenance) is not None
        if chain.tail_tokens:
            self.index.publish_partial(chain, pages[whole], provenance)
        self.pool.release(pages)
        self.index.check()
        return pages

    def hit(self, tokens, images=(), **changes) -> Match:
        """What a request would find; references are given back at once."""
        start = changes.pop("start", ROOT)
        found = self.index.match(PrefixQuery(self.chain(tokens, images, start), **changes))
        assert all(self.pool.references(page) for page in found.retained)
        self.pool.release(found.retained)
        self.index.check()
        return found
