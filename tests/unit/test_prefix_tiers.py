"""The prefix index over lower tiers: what continues a hit and what ends it (KVP-09)."""

from __future__ import annotations

from kvist.cache.identity import EXACT, bounded, page_key
from kvist.cache.prefix import LowerPage, PrefixQuery
from tests.unit.prefix_shop import Shop, ids


class Shelf:
    """A tier that holds keys."""

    def __init__(self, name: str, keys=()) -> None:
        self.name, self.keys, self.asked = name, set(keys), 0

    def holds(self, key: bytes) -> bool:
        self.asked += 1
        return key in self.keys


def test_lower_tiers_continue_the_hit() -> None:
    a = ids(26)
    host, disk = Shelf("host"), Shelf("disk")
    shop = Shop(tiers=(host, disk))
    digests = shop.chain(a).digests
    host.keys = {digests[3], digests[5]}
    disk.keys = {digests[2], digests[3], digests[4]}
    pages = shop.store(a[:8])
    found = shop.hit(a)
    assert found.lower == [
        LowerPage(number, digests[number], EXACT, tier, 4)
        for number, tier in ((2, "disk"), (3, "host"), (4, "disk"), (5, "host"))
    ]
    assert found.tiers == ["device", "device", "disk", "host", "disk", "host"]
    assert (found.pages, found.tokens, found.reach) == (pages[:2], 8, 24)
    limited = shop.hit(a, limit=15)
    assert [page.tokens for page in limited.lower] == [4, 3]
    assert limited.reach == 15
    assert shop.hit(a, tiers=False).lower == []
    assert shop.index.counters.tokens_lower == 16 + 7
    assert shop.index.counters.tokens_matched == 3 * 8


def test_kvp_09_a_gap_in_a_tier_ends_the_hit() -> None:
    a = ids(40)
    disk = Shelf("disk")
    shop = Shop(tiers=(disk,))
    digests = shop.chain(a).digests
    disk.keys = set(digests) - {digests[3]}
    assert [page.number for page in shop.hit(a).lower] == [0, 1, 2]
    assert disk.asked == 4, "nothing behind the gap is asked for"
    disk.keys = set()
    assert shop.hit(a).reach == 0


def test_tiers_respect_provenance() -> None:
    a = ids(12)
    disk = Shelf("disk")
    shop = Shop(tiers=(disk,))
    digests = shop.chain(a).digests
    disk.keys = {digests[0], page_key(digests[1], bounded(8)), page_key(digests[2], bounded(8))}
    assert shop.hit(a).reach == 4
    assert shop.hit(a, provenance=bounded(9)).reach == 4
    assert [page.provenance for page in shop.hit(a, provenance=bounded(8)).lower] == [EXACT, 8, 8]


def test_restored_pages_are_published_like_computed_ones() -> None:
    a = ids(12)
    disk = Shelf("disk")
    shop = Shop(tiers=(disk,))
    chain = shop.chain(a)
    disk.keys = set(chain.digests)
    found = shop.index.match(PrefixQuery(chain))
    pages = shop.pool.allocate(len(found.lower))
    assert shop.index.publish(chain, found.lower[0].number, pages, found.lower[0].provenance) == pages
    shop.pool.release(pages)
    assert (shop.hit(a).pages, shop.hit(a).lower) == (pages, [])
