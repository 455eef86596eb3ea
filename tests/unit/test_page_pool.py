"""The page pool: counts after every call, order of eviction, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.cache.pool import NO_PAGE, CacheFull, PagePool


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.free, pool.owned, pool.cached


def cached(pool: PagePool, count: int) -> list[int]:
    """Pages that only the index keeps, each released at its own time."""
    pages = pool.allocate(count)
    for page in pages:
        pool.keep(page)
        pool.release([page])
    return pages


def test_a_page_goes_round() -> None:
    pool = PagePool(3)
    assert counts(pool) == (3, 0, 0)
    (page,) = pool.allocate(1)
    assert counts(pool) == (2, 1, 0)
    pool.keep(page)
    pool.retain([page])
    pool.release([page])
    assert counts(pool) == (2, 1, 0)
    pool.release([page])
    assert counts(pool) == (2, 0, 1)
    pool.retain([page])
    assert counts(pool) == (2, 1, 0)
    pool.drop(page)
    assert counts(pool) == (2, 1, 0)
    pool.release([page])
    assert counts(pool) == (3, 0, 0)


def test_pages_are_handed_out_ascending_and_once() -> None:
    pool = PagePool(5)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert set(pool.allocate(2)).isdisjoint(first)


def test_least_recently_released_goes_first() -> None:
    pool = PagePool(4)
    a, b, c = cached(pool, 3)
    pool.retain([a])
    pool.release([a])
    gone: list[int] = []
    pool.on_evict = gone.append
    pool.allocate(3)
    assert gone == [b, c]
    assert counts(pool) == (0, 3, 1)


def test_retained_pages_are_not_evicted() -> None:
    pool = PagePool(3)
    a, b, c = cached(pool, 3)
    pool.retain([a, c])
    assert pool.evict_one() == b
    assert pool.evict_one() is None
    assert counts(pool) == (1, 2, 0)


def chained(pool: PagePool, count: int, before: int = NO_PAGE) -> list[int]:
    """Pages that the index keeps, one behind the other, still owned."""
    pages = pool.allocate(count)
    for page in pages:
        pool.keep(page, before)
        before = page
    return pages


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_run_of_pages_is_kept_as_one_after_the_other(count: int, owned: bool) -> None:
    at_once, one_by_one = PagePool(9), PagePool(9)
    for pool in (at_once, one_by_one):
        root, *others = chained(pool, 3)
        pool.release([*others, root][: 2 if owned else 3])
    pages = at_once.allocate(count)
    at_once.keep_run(pages, others[-1])
    assert chained(one_by_one, count, before=others[-1]) == pages
    for pool in (at_once, one_by_one):
        assert (pool.available, counts(pool)) == (6 - count, (6 - count, count + owned, 3 - owned))
        pool.release(pages)
        gone = [pool.evict_one() for _ in range(count + 3)]
        assert gone == [*pages[::-1], *others[::-1], None if owned else root]


def test_a_page_goes_after_those_behind_it() -> None:
    pool = PagePool(5)
    a, b = chained(pool, 2)
    (c,) = chained(pool, 1, before=a)
    for page in (a, c, b):
        pool.release([page])
    gone: list[int] = []
    pool.on_evict = gone.append
    pool.allocate(5)
    assert gone == [c, b, a]


def test_what_lies_before_an_owned_page_is_not_available() -> None:
    pool = PagePool(8)
    a, b, c, d = chained(pool, 4)
    (e,) = chained(pool, 1, before=a)
    pool.release([a, b, c, d, e])
    assert (pool.available, counts(pool)) == (8, (3, 0, 5))
    pool.retain([d])
    assert (pool.available, counts(pool)) == (4, (3, 1, 4))
    assert pool.evict_one() == e
    assert pool.evict_one() is None
    pool.retain([b])
    assert (pool.available, counts(pool)) == (4, (4, 2, 2))
    pool.release([d])
    assert (pool.available, counts(pool)) == (6, (4, 1, 3))
    with pytest.raises(CacheFull, match="7 pages are needed; 4 are free and 2 can be evicted of 8"):
        pool.allocate(7)
    assert counts(pool) == (4, 1, 3), "nothing was evicted in vain"
    assert len(pool.allocate(6)) == 6
    assert pool.kept(a)


def test_a_chain_is_released_around_a_page_of_others() -> None:
    """A request owns the pages before and behind one that it never held: an own copy was not exchanged."""
    pool = PagePool(4)
    a, b, c = chained(pool, 3)
    pool.release([b])
    assert (pool.available, counts(pool)) == (1, (1, 2, 1))
    pool.release([a, c])
    assert (pool.available, counts(pool)) == (4, (1, 0, 3))
    pool.retain([a, c])
    assert (pool.available, counts(pool)) == (1, (1, 2, 1))


def test_a_request_that_cannot_fit_evicts_nothing() -> None:
    pool = PagePool(4)
    cached(pool, 2)
    pool.allocate(1)
    with pytest.raises(CacheFull, match="4 pages are needed; 1 are free and 2 can be evicted of 4"):
        pool.allocate(4)
    assert counts(pool) == (1, 1, 2)


def test_allocating_nothing_evicts_nothing() -> None:
    pool = PagePool(1)
    cached(pool, 1)
    assert pool.allocate(0) == []
    assert counts(pool) == (0, 0, 1)


def test_an_old_time_in_the_queue_is_put_right() -> None:
    pool = PagePool(8)
    pages = cached(pool, 8)
    for _ in range(3):
        for page in pages[:7]:
            pool.retain([page])
            pool.release([page])
    assert pool.evict_one() == pages[7]
    assert [pool.evict_one() for _ in range(7)] == pages[:7]
    assert counts(pool) == (8, 0, 0)


def test_the_same_page_twice_in_one_call_counts_twice() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.retain([page, page])
    assert pool.references(page) == 3
    pool.release([page, page, page])
    assert counts(pool) == (2, 0, 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda pool: pool.release([0, 1]), "page 1 is released more often"),
        (lambda pool: pool.release([0, 0]), "page 0 is released more often"),
        (lambda pool: pool.retain([0, 1]), "page 1 is free"),
        (lambda pool: pool.retain([0, 4]), "page 4 does not exist"),
        (lambda pool: pool.release([-1]), "page -1 does not exist"),
        (lambda pool: pool.keep(1), "page 1 is free"),
        (lambda pool: pool.keep(2), "page 2 is kept already"),
        (lambda pool: pool.keep(0, 1), "page 1 is not kept; page 0 cannot"),
        (lambda pool: pool.keep_run([0, 1]), "page 1 is free"),
        (lambda pool: pool.keep_run([0, 2]), "page 2 is kept already"),
        (lambda pool: pool.keep_run([0, 0]), "stands there twice"),
        (lambda pool: pool.keep_run([0, 4]), "page 4 does not exist"),
        (lambda pool: pool.keep_run([0], 1), "page 1 is not kept; page 0 cannot"),
        (lambda pool: pool.drop(0), "page 0 has 0 pages"),
        (lambda pool: pool.drop(2), "page 2 has 1 pages"),
        (lambda pool: pool.allocate(-1), "-1 pages"),
    ],
)
def test_misuse_is_named_and_changes_nothing(call: Callable[[PagePool], object], reason: str) -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    pool.keep(pages[2])
    pool.keep(pages[3], pages[2])
    pool.release([1])
    before = counts(pool), [pool.references(page) for page in pages]
    with pytest.raises(ValueError, match=reason):
        call(pool)
    assert before == (counts(pool), [pool.references(page) for page in pages])


@pytest.mark.parametrize("total", [0, -1, 1 << 31])
def test_sizes_of_a_pool(total: int) -> None:
    with pytest.raises(ValueError, match=str(total)):
        PagePool(total)
