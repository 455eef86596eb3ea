"""The prefix index: what is found, what is kept, what goes (PFX-03, -07, -09, -11, -13, -15, KVP-05, -07)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvist.cache.identity import EXACT, Chain, ImageKey, bounded, root
from kvist.cache.page_ends import PageEnds
from kvist.cache.pool import CacheFull, PagePool
from kvist.cache.prefix import PrefixIndex, PrefixQuery
from tests.unit.prefix_shop import CAT, DOG, ROOT, Shop, ids


@pytest.fixture
def shop() -> Shop:
    return Shop()


# ---- longest match


@pytest.mark.parametrize("shared", [0, 1, 3, 4, 5, 8, 9, 12, 20, 38, 39, 40, 41, 42])
def test_pfx_03_and_pfx_11_every_shared_token_is_found(shop: Shop, shared: int) -> None:
    a = ids(42)
    pages = shop.store(a)
    tokens = a[:shared] + [1001 + i for i in range(60 - shared)]
    found = shop.hit(tokens)
    # Inside a complete page that others follow, only whole pages are found: its tokens are not stored.
    want = shared if shared >= 40 else shared // 4 * 4
    assert found.tokens == found.reach == want
    assert found.pages == pages[: want // 4]
    assert found.partial == ((pages[10], want - 40) if want > 40 else None)


def test_pfx_03_the_limit_leaves_a_token_to_compute(shop: Shop) -> None:
    a = ids(40)
    pages = shop.store(a)
    found = shop.hit(a, limit=39)
    assert (found.pages, found.partial, found.tokens) == (pages[:9], (pages[9], 3), 39)
    assert shop.hit(a, limit=36).partial is None
    assert shop.hit(a, limit=0).tokens == shop.hit(a, limit=-1).tokens == 0
    assert shop.hit(a, limit=1000).tokens == 40


@pytest.mark.parametrize("page_tokens", [2, 4, 8])
def test_pfx_07_a_hundred_tokens_twice(page_tokens: int) -> None:
    shop = Shop(page_tokens=page_tokens, pages=128)
    a = ids(100)
    shop.store(a)
    assert shop.hit(a).tokens == 100
    assert shop.hit(a, limit=99).tokens == 99


def test_pfx_09_the_key_has_as_many_tokens_as_the_cache(shop: Shop) -> None:
    """Turn 1 ends with a token fed to the cache (EOS) or one that was not: the key follows the cache in both."""
    turn, eos = ids(30), [1]
    shop.store(turn + eos)
    found = shop.hit(turn + eos + ids(9, seed=1))
    assert found.tokens == 31
    # A stop string: what came after the match is in neither, although the request computed it.
    chain = shop.chain(turn)
    assert chain.tokens == 30
    assert shop.hit(turn + [7, 7, 7]).tokens == 30


def test_pfx_13_many_requests_share_one_prefix() -> None:
    """20 rounds of 6 requests at once with one warm prefix and their own ends: it is stored once, and none loses it."""
    shop = Shop(pages=96)
    prefix = ids(200)
    pages = shop.store(prefix)
    for round_ in range(20):
        running = []
        for i in range(6):
            chain = shop.chain(prefix + ids(5, seed=1000 + 6 * round_ + i))
            found = shop.index.match(PrefixQuery(chain, limit=chain.tokens - 1))
            assert found.pages == pages
            running.append((chain, found.pages, shop.pool.allocate(2)))
            shop.index.check()
        assert shop.pool.owned == 50 + 12
        for chain, shared, own in running:
            assert shop.index.publish(chain, 50, own[:1]) == own[:1]
            shop.index.publish_partial(chain, own[1])
            shop.pool.release([*shared, *own])
            shop.index.check()
    assert shop.pool.free + shop.pool.cached == 96


def test_the_longest_of_many_ends_wins(shop: Shop) -> None:
    base = ids(8)
    ends = [[1, 2, 3], [1, 2], [1, 9, 9], [2], [1, 2, 4]]
    pages = {tuple(end): shop.store(base + end)[2] for end in ends}
    assert shop.index.pages == 2 + 4, "[1, 2] came after a page that offers it"
    assert shop.hit(base + [1, 2, 4, 4]).partial == (pages[1, 2, 4], 3)
    assert shop.hit(base + [1, 2, 3, 4]).partial == (pages[1, 2, 3], 3)
    assert shop.hit(base + [1, 9, 1]).partial == (pages[1, 9, 9], 2)
    assert shop.hit(base + [2, 2]).partial == (pages[2,], 1)
    assert shop.hit(base + [3]).partial is None


def test_lookups_below_a_popular_prompt_do_not_scan(monkeypatch) -> None:
    ends = PageEnds(limit=5000)
    for page in range(4000):
        ends.add(page, b"below", page.to_bytes(4, "big") * 3, turn=False)
    compared = 0

    def counted(a: bytes, b: bytes) -> int:
        nonlocal compared
        compared += 1
        return (a[:12] == b[:12]) * 3

    monkeypatch.setattr("kvist.cache.page_ends.common_tokens", counted)
    assert ends.longest(b"below", (1234).to_bytes(4, "big") * 3) == (1234, 3)
    assert compared <= 2


# ---- identity


def test_tenants_do_not_see_each_other(shop: Shop) -> None:
    other = root(b"m" * 32, "numerics", b"tenant", 4)
    a = ids(18)
    shop.store(a)
    assert shop.hit(a, start=other).tokens == 0
    shop.store(a, start=other)
    assert shop.hit(a).tokens == shop.hit(a, start=other).tokens == 18
    assert shop.index.pages == 10


@pytest.mark.parametrize("place", [0, 3, 9])
def test_pfx_15_another_picture_is_no_hit(shop: Shop, place: int) -> None:
    tokens = [5] * 18
    shop.store(tokens, [ImageKey(CAT, place, 6)])
    assert shop.hit(tokens, [ImageKey(CAT, place, 6)]).tokens == 18
    assert shop.hit(tokens, [ImageKey(DOG, place, 6)]).tokens == place // 4 * 4
    assert shop.hit(tokens).tokens == place // 4 * 4


def test_pfx_15_pictures_in_a_page_that_is_not_complete(shop: Shop) -> None:
    tokens = [5] * 7
    pages = {content: shop.store(tokens, [ImageKey(content, 5, 2)])[1] for content in (CAT, DOG)}
    for content, page in pages.items():
        assert shop.hit(tokens, [ImageKey(content, 5, 2)]).partial == (page, 3)
    assert shop.hit(tokens, [ImageKey(b"e" * 32, 5, 2)]).partial in [(page, 1) for page in pages.values()]


def test_a_hit_may_end_inside_a_picture(shop: Shop) -> None:
    tokens = [5] * 18
    shop.store(tokens[:14], [ImageKey(CAT, 2, 16)])
    assert shop.hit(tokens, [ImageKey(CAT, 2, 16)]).tokens == 14


def test_provenance_is_a_barrier_for_exact_requests_only(shop: Shop) -> None:
    a = ids(26)
    shop.store(a[:12])
    shop.store(a, provenance=bounded(8))
    exact = shop.hit(a)
    assert (exact.tokens, exact.exact) == (12, True)
    own = shop.hit(a, provenance=bounded(8))
    assert (own.tokens, own.exact) == (26, False)
    other = shop.hit(a, provenance=bounded(16))
    assert (other.tokens, other.exact) == (12, True)


def test_bounded_requests_prefer_exact_pages(shop: Shop) -> None:
    a = ids(26)
    approximate = shop.store(a, provenance=bounded(8))
    exact = shop.store(a)
    assert not set(approximate) & set(exact)
    found = shop.hit(a, provenance=bounded(8))
    assert (found.pages, found.exact) == (exact[:6], True)
    # Once an exact page is there, nobody needs the bounded one again.
    chain, page = shop.chain(a), shop.pool.allocate(1)
    assert shop.index.publish(chain, 3, page, bounded(8)) == exact[3:4]
    shop.pool.release(page)


def test_an_exact_page_needs_exact_pages_before_it(shop: Shop) -> None:
    a = ids(16)
    shop.store(a[:8], provenance=bounded(8))
    pages = shop.pool.allocate(1)
    assert shop.index.publish(shop.chain(a), 2, pages) == []
    assert shop.index.publish(shop.chain(a), 2, pages, bounded(8)) == pages
    assert shop.index.counters.orphans == 1


# ---- publication


def test_the_same_identity_twice_keeps_one_page_and_says_so(shop: Shop) -> None:
    a = ids(12)
    first = shop.store(a)
    chain, second = shop.chain(a), shop.pool.allocate(3)
    assert shop.index.publish(chain, 0, second) == first
    assert shop.index.counters.duplicates == 3
    shop.pool.release(second)
    assert (shop.pool.cached, shop.index.pages) == (3, 3)
    assert shop.index.publish(chain, 0, first) == first


def test_a_duplicate_may_be_followed_by_new_pages(shop: Shop) -> None:
    a = ids(16)
    first = shop.store(a[:8])
    pages = shop.pool.allocate(4)
    holders = shop.index.publish(shop.chain(a), 0, pages)
    assert holders == [*first, *pages[2:]]
    shop.pool.release(pages)
    shop.index.check()
    assert shop.hit(a).pages == holders


@pytest.mark.parametrize("ends", [[], [18], [9, 17, 30], [3, 6, 25, 26, 27]])
def test_pages_published_together_are_as_if_one_by_one(ends: list[int]) -> None:
    """Where other requests had ended inside their tokens, too: those pages go, and turns are remembered."""
    a, shops = ids(32), (Shop(), Shop())
    for shop in shops:
        for end in ends:
            shop.store(a[:end])
        pages = shop.pool.allocate(8)
        chain, size = shop.chain(a), 8 if shop is shops[0] else 1
        for first in range(0, 8, size):
            holders = shop.index.publish(chain, first, pages[first : first + size])
            assert len(holders) == size
        shop.pool.release(pages)
        shop.index.check()
    together, apart = shops
    assert together.index.counters == apart.index.counters
    for cut in range(33):
        both = [shop.hit([*a[:cut], 7, 7, 7, 7, 7]) for shop in shops]
        assert both[0] == both[1]
    assert [together.index.evict_one() for _ in range(9)] == [apart.index.evict_one() for _ in range(9)]


def test_pages_whose_predecessor_is_gone_are_not_kept(shop: Shop) -> None:
    a = ids(18)
    chain, own = shop.chain(a), shop.pool.allocate(5)
    assert shop.index.publish(chain, 1, own[1:4]) == []
    assert shop.index.publish_partial(chain, own[4]) is None
    assert shop.index.counters.orphans == 4
    shop.pool.release(own)
    assert shop.pool.free == 64


def test_a_conversation_leaves_no_stale_page_behind(shop: Shop) -> None:
    history: list[int] = []
    for turn in range(12):
        history += ids(7, seed=turn)
        shop.store(history)
        assert shop.index.pages == -(-len(history) // 4), turn
    assert shop.index.counters.superseded == 9, "three of the twelve turns end with their page"


def test_kvp_07_a_turn_can_be_said_again(shop: Shop) -> None:
    """History whose reply is rendered otherwise (without reasoning) still hits up to where the turns part."""
    prompt, reasoning, answer = ids(22), ids(30, seed=1), ids(6, seed=2)
    shop.store(prompt)
    shop.store(prompt + reasoning + answer)
    found = shop.hit(prompt + answer + ids(9, seed=3))
    assert found.tokens == 22, "the end of the prompt is inside a page that the reply completed"


def test_a_page_may_be_published_before_it_is_complete(shop: Shop) -> None:
    a = ids(8)
    chain, pages = shop.chain(a[:6]), shop.pool.allocate(2)
    shop.index.publish(chain, 0, pages[:1])
    assert shop.index.publish_partial(chain, pages[1]) == pages[1]
    assert shop.index.publish_partial(chain, pages[1]) == pages[1]
    chain.append(a[6])
    assert shop.index.publish_partial(chain, pages[1]) == pages[1]
    assert shop.hit(a).partial == (pages[1], 3)
    chain.append(a[7])
    assert shop.index.publish(chain, 1, pages[1:]) == pages[1:]
    shop.index.check()
    shop.pool.release(pages)
    assert shop.hit(a).pages == pages
    assert shop.index.pages == 2


def test_a_partial_page_already_covered_is_not_kept_again(shop: Shop) -> None:
    a = ids(7)
    pages = shop.store(a)
    chain, own = shop.chain(a[:6]), shop.pool.allocate(2)
    assert shop.index.publish(chain, 0, own[:1]) == pages[:1]
    assert shop.index.publish_partial(chain, own[1]) == pages[1]
    shop.pool.release(own)
    assert shop.index.pages == 2


def test_a_partial_page_in_use_is_not_taken_away(shop: Shop) -> None:
    a = ids(8)
    pages = shop.store(a[:6])
    found = shop.index.match(PrefixQuery(shop.chain(a)))
    assert found.partial == (pages[1], 2)
    shop.store(a)
    assert shop.pool.references(pages[1]) == 1
    shop.pool.release(found.retained)
    shop.index.check()


@pytest.mark.parametrize("first", [-1, 2])
def test_pages_beyond_the_chain_are_refused(shop: Shop, first: int) -> None:
    pages = shop.pool.allocate(2)
    with pytest.raises(ValueError, match="the chain has 3 complete pages"):
        shop.index.publish(shop.chain(ids(14)), first, pages)


def test_misuse_is_named(shop: Shop) -> None:
    chain = shop.chain(ids(8))
    with pytest.raises(ValueError, match="page 5 is free"):
        shop.index.publish(chain, 0, [5])
    with pytest.raises(ValueError, match="no partial page"):
        shop.index.publish_partial(chain, 5)
    pages = shop.store(ids(8, seed=1))
    with pytest.raises(ValueError, match="under another identity"):
        shop.index.publish(chain, 0, pages[:1])
    with pytest.raises(ValueError, match="pages of 8 tokens, the index of 4"):
        shop.index.match(PrefixQuery(Chain(ROOT, 8)))
    shop.index.check()


# ---- eviction


def test_leaves_go_first_and_the_branch_that_was_used_last_goes_last(shop: Shop) -> None:
    a, b = ids(20), ids(12, seed=1)
    shop.store(a)
    shop.store(a[:8] + b)
    shop.hit(a)
    gone: list[bytes] = []
    shop.index.on_evict = lambda page, key, provenance, tokens: gone.append(key)
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert gone == shop.chain(a[:8] + b).digests[:1:-1] + shop.chain(a).digests[::-1]


def test_evicting_everything_leaves_nothing(shop: Shop) -> None:
    for seed in range(8):
        shop.store(ids(21, seed), provenance=bounded(4) if seed % 2 else EXACT)
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert (shop.pool.free, shop.index.pages, shop.index.counters.evicted) == (64, 0, 48)


def test_kvp_05_the_latest_conversation_survives() -> None:
    """Room for one and a half conversations: A, B, A, B. Each is whole when it has just been stored."""
    shop = Shop(pages=15)
    a, b = ids(40), ids(40, seed=1)
    for tokens in (a, b, a, b):
        shop.store(tokens)
        assert shop.hit(tokens).tokens == 40
        assert shop.pool.cached <= 15
    assert shop.index.counters.evicted <= 15


def test_kvp_05_what_cannot_fit_evicts_nothing() -> None:
    shop = Shop(pages=15)
    a = ids(40)
    shop.store(a)
    with pytest.raises(CacheFull, match="16 pages are needed; 5 are free and 10 can be evicted"):
        shop.pool.allocate(16)
    assert shop.hit(a).tokens == 40


def test_a_pinned_prefix_stays(shop: Shop) -> None:
    a = ids(22)
    pages = shop.store(a)
    pin = shop.index.pin(PrefixQuery(shop.chain(a)))
    assert (pin.tokens, shop.index.pins, shop.pool.owned) == (22, 1, 6)
    again = shop.index.pin(PrefixQuery(shop.chain(a[:8])))
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert shop.hit(a).pages == pages[:5]
    shop.index.unpin(pin)
    with pytest.raises(ValueError, match="not held"):
        shop.index.unpin(pin)
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert shop.hit(a).tokens == 8
    shop.index.unpin(again)
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert (shop.pool.free, shop.index.pins) == (64, 0)


def test_a_pinned_partial_page_outlives_the_longer_one(shop: Shop) -> None:
    a = ids(8)
    shop.store(a[:6])
    pin = shop.index.pin(PrefixQuery(shop.chain(a[:6])))
    shop.store(a)
    while shop.index.evict_one() is not None:
        shop.index.check()
    assert shop.hit(a).tokens == 6
    shop.index.unpin(pin)


def test_stored_ends_are_bounded_and_pages_without_them_go() -> None:
    shop = Shop(pages=512)
    for seed in range(100):
        shop.store(ids(7, seed))
    assert len(shop.index._ends) == 64
    assert shop.index.pages == 100 + 64, "complete pages stay, partial ones cannot be found without their tokens"
    assert shop.hit(ids(7, 99)).tokens == 7
    assert shop.hit(ids(7, 0)).tokens == 4
    assert shop.pool.free + shop.pool.cached == 512


# ---- accounts


def test_counters_add_up(shop: Shop) -> None:
    a = ids(18)
    shop.store(a)
    shop.hit(a)
    shop.hit(ids(18, seed=5))
    counters = shop.index.counters
    assert (counters.lookups, counters.hits) == (3, 1)
    assert (counters.tokens_asked, counters.tokens_matched, counters.published) == (54, 18, 5)


def test_bookkeeping_is_small() -> None:
    """At most 256 bytes a page, pages of 128 tokens, prefixes of 32 pages (the full size is a benchmark)."""
    generator = np.random.default_rng(0)
    total = 8192
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool = PagePool(total)
    index = PrefixIndex(pool, 128)
    for _ in range(total // 32):
        chain, pages = Chain(ROOT, 128), pool.allocate(32)
        chain.extend(generator.integers(0, 129280, 32 * 128 - 5))
        index.publish(chain, 0, pages[:31])
        index.publish_partial(chain, pages[31])
        pool.release(pages)
        del chain, pages
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert pool.cached == total
    assert used / total <= 256
