"""Tokens of the pages in which requests ended, sorted, so that the page sharing most first tokens is a neighbour.

Owns contents (canonical bytes, see `identity`) and their order below each parent. Must not know links, counts or bytes of
pages. A sorted list keeps a lookup logarithmic even below a system prompt that thousands of requests continue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from kvist.cache.identity import common_tokens


class _End(NamedTuple):
    below: bytes
    content: bytes
    turn: bool


class PageEnds:
    """Contents of at most `limit` pages (the caller takes the oldest out). `below` is a key that stands for the parent.

    A content's stay ends when a page comes to hang behind it, unless it is a `turn`: a request ended inside the page and
    a later one went on, so others will come and branch off there.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ends: dict[int, _End] = {}
        self._sorted: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def pages(self) -> Collection[int]:
        """Pages whose content is stored, oldest first."""
        return self._ends.keys()

    def oldest(self) -> int | None:
        """The page to take out while there are more than `limit`, else None."""
        return next(iter(self._ends)) if len(self._ends) > self.limit else None

    def add(self, page: int, below: bytes, content: bytes, *, turn: bool) -> None:
        """Store the content of a page that has none stored."""
        assert page not in self._ends, f"the content of page {page} is stored already"
        self._ends[page] = _End(below, content, turn)
        siblings = self._sorted.setdefault(below, [])
        siblings.insert(bisect_left(siblings, (content, page)), (content, page))

    def discard(self, page: int) -> None:
        """Forget the content of a page, if it is stored."""
        end = self._ends.pop(page, None)
        if end is None:
            return
        siblings = self._sorted[end.below]
        del siblings[bisect_left(siblings, (end.content, page))]
        if not siblings:
            del self._sorted[end.below]

    def continued(self, page: int) -> None:
        """A page hangs behind this one now."""
        end = self._ends.get(page)
        if end is not None and not end.turn:
            self.discard(page)

    def longest(self, below: bytes, content: bytes) -> tuple[int, int]:
        """(page, tokens) of the stored content that shares most first tokens with `content`; tokens is 0 if none does."""
        siblings = self._sorted.get(below, [])
        at = bisect_left(siblings, (content,))
        best = (-1, 0)
        for other, page in siblings[max(at - 1, 0) : at + 1]:
            tokens = common_tokens(other, content)
            if tokens > best[1]:
                best = (page, tokens)
        if best[1]:
            # Used: not the oldest any more.
            self._ends[best[0]] = self._ends.pop(best[0])
        return best

    def holder(self, below: bytes, content: bytes) -> int | None:
        """A page that offers all of `content`, perhaps more."""
        siblings = self._sorted.get(below, [])
        at = bisect_left(siblings, (content,))
        return siblings[at][1] if at < len(siblings) and siblings[at][0].startswith(content) else None

    def shorter(self, below: bytes, content: bytes) -> int | None:
        """The page whose content is the nearest proper beginning of `content`, if it is the direct neighbour."""
        siblings = self._sorted.get(below, [])
        at = bisect_left(siblings, (content,))
        return siblings[at - 1][1] if at and content.startswith(siblings[at - 1][0]) else None

    def check(self) -> None:
        """An `AssertionError` unless the sorted lists hold exactly the stored contents, in order."""
        listed = {page: (below, content) for below, items in self._sorted.items() for content, page in items}
        assert listed == {page: (end.below, end.content) for page, end in self._ends.items()}, "sorted contents differ"
        assert all(items and items == sorted(items) for items in self._sorted.values()), "contents are out of order"
        assert len(self._ends) <= self.limit, f"{len(self._ends)} contents are stored, the limit is {self.limit}"
