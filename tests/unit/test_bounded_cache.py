"""The cache behind expert banks: budget, order of eviction, held values, look-ahead, failures, several threads."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvist.checkpoint.bounded import BoundedCache


class Source:
    """Loads `("value", key)`; can be held back, and fails for the keys in `bad`."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.bad: set[int] = set()
        self.gates: dict[int, threading.Event] = {}
        self.lock = threading.Lock()

    def load(self, key: int) -> tuple[str, int]:
        gate = self.gates.get(key)
        if gate is not None:
            assert gate.wait(20)
        with self.lock:
            self.loaded.append(key)
        if key in self.bad:
            raise OSError(f"no {key}")
        return "value", key

    def gate(self, key: int) -> threading.Event:
        self.gates[key] = threading.Event()
        return self.gates[key]


@pytest.fixture
def source():
    return Source()


def cache_of(source: Source, budget: int, size: int = 10) -> BoundedCache[int, tuple[str, int]]:
    return BoundedCache(source.load, lambda key: size, budget, name="test")


def use(cache, *keys: int) -> None:
    with cache.hold(keys) as values:
        assert values == [("value", key) for key in keys]


def settle(cache, condition) -> None:
    """Wait until what threads do has come about."""
    end = time.monotonic() + 20
    while not condition(cache.counters()):
        assert time.monotonic() < end, cache.counters()
        time.sleep(0.001)


def test_hits_misses_and_least_recently_used_first_out(source):
    cache = cache_of(source, 30)
    use(cache, 1, 2)
    use(cache, 3)
    use(cache, 1)
    use(cache, 4)  # 2 was used longest ago
    use(cache, 1, 3)
    assert source.loaded == [1, 2, 3, 4] or source.loaded == [2, 1, 3, 4]
    use(cache, 2)
    assert source.loaded[-1] == 2
    counters = cache.counters()
    assert (counters.hits, counters.misses, counters.evictions) == (3, 5, 2)
    assert (counters.held_bytes, counters.peak_bytes, counters.bytes_read) == (30, 30, 50)


def test_one_byte_less_evicts_one_more(source):
    for budget, loads in ((30, 3), (29, 4)):
        source.loaded.clear()
        cache = cache_of(source, budget)
        for key in (1, 2, 3, 1):
            use(cache, key)
        assert len(source.loaded) == loads


def test_what_is_held_stays_and_a_caller_without_room_waits(source):
    cache = cache_of(source, 20)
    order = []

    def other() -> None:
        with cache.hold([3, 4]):
            order.append("other")

    with cache.hold([1]):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.02)
        assert cache.counters().held_bytes <= 20
        order.append("first")
    thread.join(20)
    assert order == ["first", "other"]
    assert cache.counters().peak_bytes == 20


def test_a_portion_beyond_the_budget_is_the_callers_mistake(source):
    with pytest.raises(AssertionError, match="must fit"), cache_of(source, 20).hold([1, 2, 3]):
        pass


def test_look_ahead_loads_and_counts(source):
    cache = cache_of(source, 40)
    with cache.hold([1], then=[2, 3]):
        settle(cache, lambda c: c.bytes_read == 30)
    use(cache, 2)
    use(cache, 2)
    counters = cache.counters()
    assert (counters.ahead_loads, counters.ahead_hits, counters.hits, counters.misses) == (2, 1, 2, 1)


def test_look_ahead_takes_no_room_that_is_held_and_never_waits(source):
    cache = cache_of(source, 30)
    with cache.hold([1, 2], then=[3, 4, 5]):
        assert cache.counters().ahead_loads == 1
    cache.ahead([1, 2, 3])
    assert cache.counters().ahead_loads == 1


def test_look_ahead_does_not_evict_what_it_was_asked_for(source):
    cache = cache_of(source, 30)
    use(cache, 1)
    use(cache, 2)
    use(cache, 3)
    cache.ahead([4, 1, 2])  # 3 may go for 4; 1 and 2 are wanted
    settle(cache, lambda c: c.bytes_read == 40)
    use(cache, 1, 2, 4)
    assert sorted(source.loaded) == [1, 2, 3, 4]


def test_a_demanded_key_overtakes_queued_look_ahead(source):
    cache = cache_of(source, 50)
    gate = source.gate(1)
    cache.ahead([1, 2, 3])  # one thread: 2 and 3 wait behind 1
    use(cache, 3)
    assert source.loaded == [3]
    assert cache.counters().late == 1
    gate.set()
    use(cache, 1, 2)
    assert sorted(source.loaded) == [1, 2, 3]


def test_room_is_taken_from_look_ahead_that_has_not_begun(source):
    cache = cache_of(source, 30)
    gate = source.gate(1)
    cache.ahead([1, 2, 3])
    use(cache, 4, 5)
    assert sorted(source.loaded) == [4, 5]
    gate.set()
    settle(cache, lambda c: c.bytes_read == 30)
    assert 2 not in source.loaded
    assert 3 not in source.loaded


def test_a_failed_load_is_an_error_of_the_caller_and_tried_again(source):
    cache = cache_of(source, 30)
    source.bad.add(2)
    with pytest.raises(OSError, match="no 2"), cache.hold([1, 2]):
        pass
    counters = cache.counters()
    assert (counters.failures, counters.held_bytes) == (1, 10)
    use(cache, 1)
    source.bad.clear()
    use(cache, 2)
    assert cache.counters().failures == 1


def test_a_failed_look_ahead_is_nobodys_error(source):
    cache = cache_of(source, 30)
    source.bad.add(2)
    with cache.hold([1], then=[2]):
        settle(cache, lambda c: c.failures == 1)
    source.bad.clear()
    use(cache, 2)
    assert cache.counters().held_bytes == 20


@pytest.mark.parametrize("mended", [True, False])
def test_a_load_that_began_before_the_caller_came_is_tried_again(source, mended):
    """What another caller's failed portion still reads must not fail the next one, if what was wrong has been put right."""
    gate, load = source.gate(1), source.load

    def then_mended(key: int) -> tuple[str, int]:
        try:
            return load(key)
        finally:
            if mended:
                source.bad.discard(key)

    source.bad, source.load = {1}, then_mended
    cache = cache_of(source, 30)
    cache.ahead([1])
    settle(cache, lambda counters: counters.ahead_loads == 1)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(use, cache, 2, 1)
        settle(cache, lambda counters: counters.late == 1)
        gate.set()
        if mended:
            later.result(20)
        else:
            with pytest.raises(OSError, match="no 1"):
                later.result(20)
    assert source.loaded.count(1) == 2
    assert source.loaded.count(2) == 1
    settle(cache, lambda counters: counters.held_bytes == (20 if mended else 10))
    use(cache, 2)


def test_stall_is_the_time_that_a_caller_waits(source):
    cache = cache_of(source, 30)
    gate = source.gate(1)
    threading.Timer(0.05, gate.set).start()
    use(cache, 1)
    stalled = cache.counters().stall_s
    assert 0.03 < stalled < 5
    use(cache, 1)
    assert cache.counters().stall_s == stalled


@pytest.mark.parametrize("closed", [True, False])
def test_a_dropped_cache_ends_its_threads(source, closed):
    cache = BoundedCache(source.load, lambda key: 10, 30, name=f"ending-{closed}")
    use(cache, 1, 2)
    own = [thread for thread in threading.enumerate() if thread.name.startswith(f"ending-{closed}")]
    assert own
    if closed:
        cache.close()
    else:
        del cache
        gc.collect()
    for thread in own:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(4))
def test_random_use_by_four_threads_keeps_the_budget(source, seed):
    """Right values, never more than the budget, and at the end nothing held but what is cached."""
    cache = cache_of(source, 120)
    source.bad = {13}
    problems = []

    def work(own: int) -> None:
        choice = random.Random(4 * seed + own)
        for _ in range(150):
            keys = choice.sample(range(20), choice.randint(1, 3))
            then = choice.sample(range(20), 4)
            try:
                with cache.hold(keys, then) as values:
                    if values != [("value", key) for key in keys] or 13 in keys:
                        problems.append(values)
            except OSError:
                if 13 not in keys:
                    problems.append(keys)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=60))  # raises what a thread raised
    assert not problems
    settle(cache, lambda c: c.bytes_read == 10 * (len(source.loaded) - c.failures))
    counters = cache.counters()
    assert counters.peak_bytes <= 120
    assert counters.held_bytes == 10 * len(cache._entries)
    assert all(not entry.pins for entry in cache._entries.values())


def test_an_evicted_value_is_gone_at_once(source):
    """Not at the next garbage collection: values are large, and what lingers is beyond the budget."""

    class Value:
        pass

    cache = BoundedCache(lambda key: Value(), lambda key: 10, 20, name="test")
    gc.disable()
    try:
        with cache.hold([1], then=[2]) as values:
            references = [weakref.ref(values[0])]
        settle(cache, lambda c: c.bytes_read == 20)
        with cache.hold([2]) as values:
            references.append(weakref.ref(values[0]))
        del values
        with cache.hold([3, 4]):
            pass
        end = time.monotonic() + 20
        while any(reference() is not None for reference in references):  # a thread may be about to let go
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        gc.enable()


def test_the_owner_is_told_of_evicted_values_once_nobody_holds_them(source):
    told: list[tuple[str, int]] = []
    cache = BoundedCache(source.load, lambda key: 10, 20, name="test", evicted=told.append)
    with cache.hold([1]):
        use(cache, 2)
        use(cache, 3)
        assert told == [("value", 2)]
        source.bad.add(4)
        with pytest.raises(OSError, match="no 4"), cache.hold([4]):
            pass
        assert told == [("value", 2), ("value", 3)]
    source.bad.clear()
    use(cache, 4, 5)
    assert told == [("value", 2), ("value", 3), ("value", 1)]


def test_a_value_can_stand_in_for_one_that_cannot_be_loaded(source):
    cache = cache_of(source, 30)
    source.bad.add(2)
    with cache.hold([1, 2], instead=lambda key, error: (str(error), -key)) as values:
        assert values == [("value", 1), ("no 2", -2)]
    source.bad.clear()
    use(cache, 2)  # the substitute was not kept
