"""Which pages already hold the beginning of a request: longest match, publication, pinning, and forgetting on eviction.

Owns the links between kept pages and the token contents of pages in which requests end. Must not know pages' bytes, models
or how a tier stores; tiers answer one question through `Lookup`. Not for several threads at once. Design section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np

from kvist.cache.identity import DIGEST_BYTES, EXACT, Chain, content_digest, page_key
from kvist.cache.key_table import KeyTable
from kvist.cache.page_ends import PageEnds
from kvist.cache.pool import NO_PAGE, PagePool


class Lookup(Protocol):
    """What the index asks of a lower tier (host memory, disk)."""

    @property
    def name(self) -> str:
        """Name of the tier for `LowerPage.tier` and for usage reports."""

    def holds(self, key: bytes) -> bool:
        """True if the tier has a page under this key (16 bytes, see `page_key`) that it believes to be readable."""


class PrefixQuery(NamedTuple):
    """What is looked up: a chain, the provenance the request accepts besides EXACT, and its limits.

    `limit` is the most tokens worth matching (a request needs logits, so its length - 1); None for all. Lower tiers are
    asked only with `tiers`.
    """

    chain: Chain
    provenance: int = EXACT
    limit: int | None = None
    tiers: bool = True


class LowerPage(NamedTuple):
    """A page of the request that only a lower tier holds; of its `tokens` fewer than a page may count (the limit)."""

    number: int
    key: bytes
    provenance: int
    tier: str
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """What is there. `retained` lists the pages on which the caller now has a reference, to be released by it.

    `pages` are whole shared pages in memory; `lower` continues them; `partial` is a page of which only the first tokens
    count: to be copied before anything is written behind them. `tokens` counts `pages` and `partial`; no cut is applied.
    """

    pages: list[int]
    partial: tuple[int, int] | None
    lower: list[LowerPage]
    tokens: int
    exact: bool
    page_tokens: int

    @property
    def retained(self) -> list[int]:
        """Pages to release: the whole ones and the partial one."""
        return self.pages if self.partial is None else [*self.pages, self.partial[0]]

    @property
    def reach(self) -> int:
        """Tokens of the hit once `lower` has been restored (the partial page in memory then does not count)."""
        if not self.lower:
            return self.tokens
        return len(self.pages) * self.page_tokens + sum(page.tokens for page in self.lower)

    @property
    def tiers(self) -> list[str]:
        """Where each page of the hit lies, in order; memory of the pool is `device`."""
        return ["device"] * len(self.pages) + [page.tier for page in self.lower]


@dataclass(frozen=True, eq=False)
class Pin:
    """A prefix that stays: hold on to it and give it to `unpin`."""

    pages: tuple[int, ...]
    tokens: int


@dataclass(kw_only=True)
class Counters:
    """Totals since start: tokens asked for and found (in memory, in lower tiers), pages by what happened to them."""

    lookups: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_matched: int = 0
    tokens_lower: int = 0
    published: int = 0
    duplicates: int = 0
    superseded: int = 0
    orphans: int = 0
    evicted: int = 0


@dataclass(kw_only=True)
class _Links:
    """Per page: provenance and tokens; meaningful for kept pages."""

    provenance: np.ndarray[tuple[int], np.dtype[np.int32]]
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]


class PrefixIndex:
    """Finds kept pages by identity. One index serves all tenants: their chains start from different roots.

    `on_evict(page, key, provenance, tokens)` is called while the page's bytes are still there.
    """

    def __init__(self, pool: PagePool, page_tokens: int, tiers: Sequence[Lookup] = ()) -> None:
        self.pool, self.page_tokens, self.tiers = pool, page_tokens, tuple(tiers)
        self.counters = Counters()
        self.on_evict: Callable[[int, bytes, int, int], None] | None = None
        self._table = KeyTable(pool.total, DIGEST_BYTES)
        self._links = _Links(
            provenance=np.zeros(pool.total, dtype=np.int32),
            tokens=np.zeros(pool.total, dtype=np.int32),
        )
        self._ends = PageEnds(limit=max(64, pool.total // 8))
        self._pins: set[Pin] = set()
        pool.on_evict = self._evicted

    @property
    def pages(self) -> int:
        """Pages that the index keeps."""
        return self._table.used

    @property
    def pins(self) -> int:
        """Pins that are held."""
        return len(self._pins)

    def key_of(self, page: int) -> bytes:
        """The key of a kept page, under which a tier may store its copy."""
        return self._table.key_of(page)

    def holds(self, key: bytes) -> bool:
        """Whether the index keeps a page under this key (see `page_key`)."""
        return self._table.find(key) is not None

    def match(self, query: PrefixQuery) -> Match:
        """The longest known beginning of the request. Time grows with the request's pages only.

        Exact requests see exact pages; others prefer exact pages and accept those of their own provenance.
        """
        found = self._find(query)
        counters = self.counters
        counters.lookups += 1
        counters.hits += found.reach > 0
        counters.tokens_asked += query.chain.tokens
        counters.tokens_matched += found.tokens
        counters.tokens_lower += max(found.reach - found.tokens, 0)
        return found

    def publish(self, chain: Chain, first: int, pages: Sequence[int], provenance: int = EXACT) -> list[int]:
        """Keep complete pages `first`, `first` + 1, ... of a chain, which the caller owns, so that they are found.

        Returns the page that holds each identity now: the given one, or one that was there before (for a bounded page also
        an exact one); then the given page is not kept, and the caller may exchange it (retain the other, release its own).
        The list is shorter than `pages` if the page before `first` is no longer kept: nothing could reach them.
        """
        last = first + len(pages)
        if first < 0 or last > len(chain.digests):
            raise ValueError(
                f"pages {first} to {last - 1} are to be published; the chain has {len(chain.digests)} complete pages"
            )
        before = self._before(chain, first, provenance)
        if before is None:
            self.counters.orphans += len(pages)
            return []
        # Behind a page that is not kept none is, so those before it are known and the others new.
        known = (self._holder(digest, provenance) for digest in chain.digests[first:last])
        holders = [holder for holder in takewhile(lambda holder: holder is not None, known) if holder is not None]
        self.counters.duplicates += sum(holder != page for holder, page in zip(holders, pages, strict=False))
        fresh, number = pages[len(holders) :], first + len(holders)
        before = holders[-1] if holders else before
        if any(map(self.pool.kept, fresh)):
            for at, page in enumerate(fresh, number):
                self._keep(chain, at, page, before, provenance, ends=at + 1 == last)
                before = page
        elif fresh:
            self._keep_run(chain, number, fresh, before, provenance)
        return [*holders, *fresh]

    def publish_partial(self, chain: Chain, page: int, provenance: int = EXACT) -> int | None:
        """Keep the page of the chain that is not complete, for the tokens that it has.

        Returns the page that offers these tokens now (another one, perhaps with more tokens, if they were there before), or
        None if the page before is no longer kept. The caller may write on behind these tokens, never before.
        """
        number = len(chain.digests)
        content = chain.content(number)
        if not content:
            raise ValueError(f"the chain ends with a complete page after {chain.tokens} tokens; there is no partial page")
        before = self._before(chain, number, provenance)
        if before is None:
            self.counters.orphans += 1
            return None
        holder = self._ends.holder(page_key(chain.parent(number), provenance), content)
        if holder is not None:
            self.counters.duplicates += holder != page
            return holder
        self._keep(chain, number, page, before, provenance, ends=True)
        return page

    def withdraw(self, pages: Sequence[int]) -> None:
        """Forget pages that the caller published and still owns, given in chain order; one on which others hang stays."""
        for page in reversed(pages):
            if self.pool.kept(page) and not self.pool.children(page):
                self._remove(page)

    def forget(self, key: bytes) -> bool:
        """Forget the page under a key unless others hang on it, whoever owns it; whether no page is found under the key now."""
        page = self._table.find(key)
        if page is not None and not self.pool.children(page):
            self._remove(page)
        return not self.holds(key)

    def pin(self, query: PrefixQuery) -> Pin:
        """Hold the pages in memory that match, so that they are never evicted (they count as owned)."""
        found = self._find(query._replace(tiers=False))
        pin = Pin(tuple(found.retained), found.tokens)
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin. Raises `ValueError` for one that is not held."""
        if pin not in self._pins:
            raise ValueError(f"this pin of {pin.tokens} tokens is not held; it was let go already or is another index's")
        self._pins.remove(pin)
        self.pool.release(pin.pages)

    def evict_one(self) -> int | None:
        """Free the page that memory pressure would take first; None if none may go."""
        return self.pool.evict_one()

    def check(self) -> None:
        """Recount links and contents; an `AssertionError` names what is off. Slow: for tests and for `kvist cache verify`."""
        self.pool.check()
        kept = [page for page in range(self.pool.total) if self.pool.kept(page)]
        assert len(kept) == self.pages, f"{len(kept)} pages are kept, {self.pages} have a key"
        for page in kept:
            assert self._table.find(self._table.key_of(page)) == page, f"page {page} is not found under its key"
        self._ends.check()
        for page in self._ends.pages():
            assert self.pool.kept(page), f"tokens of page {page} are stored, but it is not kept"
        for page in kept:
            assert self._links.tokens[page] == self.page_tokens or page in self._ends.pages(), f"page {page} cannot be found"

    def _find(self, query: PrefixQuery) -> Match:
        chain, size = query.chain, self.page_tokens
        if chain.page_tokens != size:
            raise ValueError(f"the chain has pages of {chain.page_tokens} tokens, the index of {size}")
        limit = chain.tokens if query.limit is None else max(0, min(query.limit, chain.tokens))
        pages: list[int] = []
        for digest in chain.digests[: limit // size]:
            page = self._holder(digest, query.provenance)
            if page is None:
                break
            pages.append(page)
        partial = self._partial(query, len(pages), limit - len(pages) * size)
        used = pages if partial is None else [*pages, partial[0]]
        self.pool.retain(used)
        return Match(
            pages=pages,
            partial=partial,
            lower=self._lower(query, len(pages), limit) if query.tiers else [],
            tokens=len(pages) * size + (partial[1] if partial else 0),
            exact=not self._links.provenance[used].any(),
            page_tokens=size,
        )

    def _holder(self, digest: bytes, provenance: int) -> int | None:
        page = self._table.find(digest)
        if page is None and provenance != EXACT:
            page = self._table.find(page_key(digest, provenance))
        return page

    def _partial(self, query: PrefixQuery, number: int, rest: int) -> tuple[int, int] | None:
        """The page of which the request shares most first tokens (at most `rest`) behind its `number` whole pages."""
        if rest <= 0:
            return None
        chain = query.chain
        if rest < self.page_tokens and number < len(chain.digests):
            whole = self._holder(chain.digests[number], query.provenance)
            if whole is not None:
                return whole, rest
        content, best = chain.content(number), (-1, 0)
        for provenance in dict.fromkeys((EXACT, query.provenance)):
            found = self._ends.longest(page_key(chain.parent(number), provenance), content)
            if found[1] > best[1]:
                best = found
        return (best[0], min(best[1], rest)) if best[1] else None

    def _lower(self, query: PrefixQuery, number: int, limit: int) -> list[LowerPage]:
        found, size = list[LowerPage](), self.page_tokens
        kinds = tuple(dict.fromkeys((EXACT, query.provenance)))
        for at, digest in enumerate(query.chain.digests[number : -(-limit // size)], number):
            page = self._lower_page(digest, kinds)
            if page is None:
                break
            key, provenance, tier = page
            found.append(LowerPage(at, key, provenance, tier, min(limit - at * size, size)))
        return found

    def _lower_page(self, digest: bytes, kinds: Sequence[int]) -> tuple[bytes, int, str] | None:
        """Key, provenance and tier of a page, the first kind that a tier has."""
        for provenance in kinds:
            key = page_key(digest, provenance)
            for tier in self.tiers:
                if tier.holds(key):
                    return key, provenance, tier.name
        return None

    def _before(self, chain: Chain, number: int, provenance: int) -> int | None:
        """The kept page behind which page `number` goes: `NO_PAGE` for page 0, None if it is not kept."""
        if chain.page_tokens != self.page_tokens:
            raise ValueError(f"the chain has pages of {chain.page_tokens} tokens, the index of {self.page_tokens}")
        return self._holder(chain.digests[number - 1], provenance) if number else NO_PAGE

    def _keep(self, chain: Chain, number: int, page: int, before: int, provenance: int, *, ends: bool) -> None:
        content = chain.content(number)
        tokens = min(chain.tokens - number * self.page_tokens, self.page_tokens)
        turn = self.pool.kept(page)
        if turn:
            # Published before as a partial page, and written on since.
            if self._links.tokens[page] >= tokens or not self.pool.references(page):
                raise ValueError(f"page {page} is kept under another identity; a page is published once, by its owner")
            self._remove(page)
        self.pool.keep(page, before)
        self._ends.continued(before)
        complete = tokens == self.page_tokens
        digest = chain.digests[number] if complete else content_digest(chain.parent(number), content)
        self._table.insert(page_key(digest, provenance), page)
        self._links.provenance[page], self._links.tokens[page] = provenance, tokens
        self.counters.published += 1
        below = page_key(chain.parent(number), provenance)
        turn = self._supersede(below, content) or turn
        if turn or ends:
            self._ends.add(page, below, content, turn=turn)
            self._trim()

    def _keep_run(self, chain: Chain, first: int, pages: Sequence[int], before: int, provenance: int) -> None:
        """`_keep` of complete pages none of which is kept: what there is to note of all of them is noted at once."""
        self.pool.keep_run(pages, before)
        self._ends.continued(before)
        self._links.provenance[pages], self._links.tokens[pages] = provenance, self.page_tokens
        self.counters.published += len(pages)
        below = page_key(chain.parent(first), provenance)
        for number, page in enumerate(pages, first):
            key, content = page_key(chain.digests[number], provenance), chain.contents[number]
            self._table.insert(key, page)
            turn = self._supersede(below, content)
            if turn or page == pages[-1]:
                self._ends.add(page, below, content, turn=turn)
                self._trim()
            below = key

    def _supersede(self, below: bytes, content: bytes) -> bool:
        """Free an idle partial page whose tokens a longer page now offers as well."""
        page = self._ends.shorter(below, content)
        if page is None or self.pool.references(page):
            return False
        self._remove(page)
        self.counters.superseded += 1
        return True

    def _trim(self) -> None:
        while (page := self._ends.oldest()) is not None:
            if self._links.tokens[page] < self.page_tokens:
                self._remove(page)
            else:
                self._ends.discard(page)

    def _remove(self, page: int) -> None:
        self._unlink(page)
        self.pool.drop(page)

    def _unlink(self, page: int) -> None:
        self._table.remove(page)
        self._ends.discard(page)

    def _evicted(self, page: int) -> None:
        self.counters.evicted += 1
        if self.on_evict is not None:
            links = self._links
            self.on_evict(page, self._table.key_of(page), int(links.provenance[page]), int(links.tokens[page]))
        self._unlink(page)
