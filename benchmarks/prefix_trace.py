"""A full prefix cache without page bytes: 10,000 prefixes of 4K to 64K tokens, 100M tokens in all, pages of 128.

Owns the trace that both benchmarks of the index use, and the check that it answers rightly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import WrongResult
from kvist.cache.identity import Chain, root
from kvist.cache.pool import PagePool
from kvist.cache.prefix import PrefixIndex, PrefixQuery

PAGE_TOKENS = 128
VOCABULARY = 129280
SHORTEST, LONGEST = 4096, 65536
ROOT = root(b"benchmark model " * 2, "benchmark", b"", PAGE_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is cached."""

    prefixes: int
    tokens: int

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every prefix: many short, few long, the wanted sum within 1%."""
        draws = np.random.default_rng(0).exponential(1.0, self.prefixes)
        scale = 1.0
        for _ in range(50):
            lengths = np.clip(SHORTEST + draws * scale, SHORTEST, LONGEST)
            scale *= (self.tokens - SHORTEST * self.prefixes) / (lengths.sum() - SHORTEST * self.prefixes)
        return lengths.astype(np.int64)


FULL = Size(prefixes=10_000, tokens=100_000_000)
SMALL = Size(prefixes=100, tokens=1_000_000)


def prompt(number: int, tokens: int) -> NDArray[np.int64]:
    """The first tokens of prefix `number`; a longer one begins with a shorter one."""
    return np.random.default_rng([7, number]).integers(0, VOCABULARY, tokens)


def chained(ids: NDArray[np.int64]) -> Chain:
    """The chain of a prompt."""
    chain = Chain(ROOT, PAGE_TOKENS)
    chain.extend(ids)
    return chain


class FilledIndex:
    """An index with every prefix of a size published and released, as finished requests leave them."""

    def __init__(self, size: Size) -> None:
        self.lengths = size.lengths()
        self.pool = PagePool(int((-(-self.lengths // PAGE_TOKENS)).sum()))
        self.index = PrefixIndex(self.pool, PAGE_TOKENS)
        for number, tokens in enumerate(self.lengths.tolist()):
            chain = chained(prompt(number, tokens))
            pages = self.pool.allocate(-(-tokens // PAGE_TOKENS))
            self.index.publish(chain, 0, pages[: len(chain.digests)])
            if chain.tail_tokens:
                self.index.publish_partial(chain, pages[-1])
            self.pool.release(pages)

    def lookup(self, ids: NDArray[np.int64]) -> int:
        """What a request does on arrival: hash its tokens, match, and (here) let go. Returns the tokens found."""
        found = self.index.match(PrefixQuery(chained(ids), limit=len(ids) - 1))
        self.pool.release(found.retained)
        return found.tokens

    def sample(self, count: int) -> Iterator[int]:
        """Numbers of prefixes all over the index."""
        yield from np.linspace(0, len(self.lengths) - 1, count).astype(int).tolist()

    def check(self) -> None:
        """Hits of the right length: whole prompts, prompts that part ways inside, and unknown ones."""
        for number in self.sample(20):
            ids = prompt(number, int(self.lengths[number]))
            asked = np.append(ids, 1)
            _require(self.lookup(asked), len(ids), f"all of prefix {number}")
            asked[2 * PAGE_TOKENS + 5] += 1
            _require(self.lookup(asked), 2 * PAGE_TOKENS, f"prefix {number}, another token in page 2")
            asked[0] += 1
            _require(self.lookup(asked), 0, f"prefix {number}, another first token")


def _require(found: int, want: int, what: str) -> None:
    if found != want:
        raise WrongResult(f"{what}: {found} tokens found, {want} are there")
