"""Host tier, write-behind and prefetch: what is where, what is given up and counted, and that nobody waits for a disk."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvist.cache.host_tier import HostTier
from kvist.cache.identity import EXACT, Chain, page_key, root
from kvist.cache.pool import PagePool
from kvist.cache.prefix import PrefixIndex, PrefixQuery
from kvist.cache.record import Page
from kvist.cache.tiers import Tiers
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import PAGE_BYTES, key, open_store, page, payload


def right(tiers: Tiers, numbers) -> int:
    there = 0
    for number in numbers:
        data = tiers.get(key(number))
        assert data is None or data == payload(number), f"page {number} is wrong"
        there += data is not None
    return there


def test_host_tier_is_bounded_and_forgets_the_least_recent() -> None:
    host = HostTier(4 * PAGE_BYTES + 7)
    for number in range(4):
        host.put(key(number), payload(number))
    assert host.get(key(0)) == payload(0)
    host.touch(key(1))
    host.put(key(4), payload(4))
    host.put(key(5), payload(5))
    assert [host.holds(key(n)) for n in range(6)] == [True, True, False, False, True, True]
    assert host.used_bytes == 4 * PAGE_BYTES and host.evicted == 2 and len(host) == 4
    host.put(key(5), payload(5))
    assert host.used_bytes == 4 * PAGE_BYTES
    host.put(key(6), bytes(5 * PAGE_BYTES))
    assert not host.holds(key(6)) and len(host) == 4, "a page larger than the budget costs nothing"
    assert host.drop(key(5)) and not host.drop(key(5)) and host.used_bytes == 3 * PAGE_BYTES


def test_bad_budgets() -> None:
    for options in ({"host_bytes": -1}, {"host_bytes": 0, "queue_bytes": -1}, {"host_bytes": 0, "read_timeout_s": 0}):
        with pytest.raises(ValueError, match=r"-1|0"):
            Tiers(**{"store": None, **options})


def test_from_host_to_disk_and_back_after_a_restart(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=10 * PAGE_BYTES, store=open_store(tmp_path))
    for number in range(40):
        tiers.offer(page(number))
    assert right(tiers, range(40)) == 40, "written, queued or in host memory: always findable"
    assert tiers.flush(10)
    assert tiers.counters.written == 40 and tiers.counters.queue_dropped == tiers.counters.unwritten == 0
    assert tiers.where([key(39), key(0), key(99)]) == ["host", "disk", None]
    assert right(tiers, range(40)) == 40
    assert tiers.where([key(39), key(29)]) == ["host", "disk"], "what comes from disk is kept in host memory"
    assert tiers.close()
    tiers = Tiers(host_bytes=10 * PAGE_BYTES, store=open_store(tmp_path))
    assert tiers.where([key(1)]) == ["disk"]
    assert right(tiers, range(50)) == 40
    assert (tiers.counters.disk_hits, tiers.counters.misses) == (40, 10)
    tiers.close()


def test_without_a_store(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=10 * PAGE_BYTES, store=None)
    for number in range(12):
        tiers.offer(page(number))
    tiers.prefetch([key(0)])
    assert tiers.flush(1) and right(tiers, range(12)) == 10
    assert tiers.counters.unwritten == 12 and len(tiers.lookups) == 1
    assert tiers.close()


def test_a_store_that_another_process_writes(tmp_path: Path) -> None:
    writer = Tiers(host_bytes=0, store=open_store(tmp_path))
    reader = Tiers(host_bytes=0, store=open_store(tmp_path))
    writer.offer(page(1))
    assert writer.flush(10) and right(reader, range(3)) == 1
    reader.offer(page(2))
    assert reader.flush(1) and reader.counters.unwritten == 1 and right(writer, range(3)) == 1
    reader.close()
    writer.close()


def test_a_slow_disk_costs_old_unwritten_pages_not_time(tmp_path: Path) -> None:
    disk = FaultyFiles(write_delay_s=0.3)
    tiers = Tiers(host_bytes=5 * PAGE_BYTES, store=open_store(tmp_path, files=disk), queue_bytes=8 * PAGE_BYTES)
    start = time.perf_counter()
    for number in range(100):
        tiers.offer(page(number))
        assert tiers.queued_bytes <= 8 * PAGE_BYTES
    assert time.perf_counter() - start < 0.25, "an offer does not wait for the disk"
    disk.write_delay_s = 0.0
    assert tiers.flush(20)
    counts = tiers.counters
    assert counts.queue_dropped >= 80 and counts.written + counts.queue_dropped == counts.offered == 100
    assert right(tiers, range(92, 100)) == 8, "the youngest pages are the ones that are written"
    tiers.close()


def test_slow_reads_become_misses_and_arrive_later(tmp_path: Path) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    store.put([page(n) for n in range(5)])
    tiers = Tiers(host_bytes=10 * PAGE_BYTES, store=store, read_timeout_s=0.05)
    assert right(tiers, [0]) == 1
    disk.read_delay_s = 0.4
    start = time.perf_counter()
    assert right(tiers, [1]) == 0
    assert time.perf_counter() - start < 0.3 and tiers.counters.slow == 1
    time.sleep(0.6)
    assert tiers.where([key(1)]) == ["host"] and right(tiers, [1]) == 1
    assert store.counters.faults == 0
    tiers.close()


def test_prefetch(tmp_path: Path) -> None:
    disk = FaultyFiles(read_delay_s=0.02)
    store = open_store(tmp_path, files=disk)
    store.put([page(n) for n in range(30)])
    tiers = Tiers(host_bytes=20 * PAGE_BYTES, store=store)
    start = time.perf_counter()
    tiers.prefetch([key(n) for n in range(10)])
    assert time.perf_counter() - start < 0.02, "prefetch does not wait"
    assert right(tiers, range(10)) == 10 and tiers.counters.prefetched == 10
    assert store.counters.hits == 10, "each page is read once, though get came while it was on its way"
    tiers.prefetch([key(n) for n in range(100, 103)])
    assert right(tiers, range(100, 103)) == 0
    tiers.close()
    small = Tiers(host_bytes=5 * PAGE_BYTES, store=open_store(tmp_path, files=disk), stage_bytes=3 * PAGE_BYTES)
    disk.read_delay_s = 0.1
    small.prefetch([key(n) for n in range(30)])
    assert (small.counters.prefetched, small.counters.prefetch_skipped) == (5, 25), "no more than memory can take"
    small.close()
    none = Tiers(host_bytes=0, store=open_store(tmp_path), stage_bytes=0)
    none.prefetch([key(0)])
    assert none.counters.prefetch_skipped == 1 and right(none, [0]) == 1
    none.close()


def drop_under_way(tiers: Tiers) -> None:
    """A page that is doubted while it is read ahead does not arrive afterwards."""
    assert tiers.store is not None
    own, reading, go_on = tiers.store.get_many, threading.Event(), threading.Event()

    def held(keys: list[bytes]) -> list[memoryview | None]:
        found = list(own(keys))
        reading.set()
        assert go_on.wait(10)
        return found

    tiers.store.get_many = held  # type: ignore[assignment,method-assign]
    tiers.prefetch([key(25), key(26)])
    assert reading.wait(10)
    tiers.drop([key(25)])
    go_on.set()
    assert right(tiers, [26, 25]) == 1, "a page under doubt came back"
    tiers.store.get_many = own  # type: ignore[method-assign]


def test_pages_read_ahead_wait_without_a_host_tier(tmp_path: Path) -> None:
    """At most `stage_bytes` of them, each given once; a thread that ends early leaves nobody waiting."""
    store = open_store(tmp_path)
    store.put([page(n) for n in range(30)])
    tiers = Tiers(host_bytes=0, store=store, stage_bytes=8 * PAGE_BYTES)
    for first, there in ((0, 8), (8, 4)):
        tiers.prefetch([key(n) for n in range(first, first + there)])
        while any(tiers.arriving(key(n)) for n in range(30)):
            time.sleep(0.001)
    read = store.counters.hits
    assert read == 12
    assert tiers.where([key(11)]) == ["disk"], "where a page came from, whatever has been read of it"
    assert right(tiers, range(4, 12)) == 8
    assert store.counters.hits == read, "what was read ahead is read again"
    assert right(tiers, [4, 0]) == 2
    assert store.counters.hits == read + 2, "given twice, or more was kept than there is room for"
    assert tiers.counters.disk_hits == 10

    drop_under_way(tiers)

    def broken(keys: list[bytes]) -> None:
        raise RuntimeError("can't start new thread")

    store.get_many = broken  # type: ignore[assignment,method-assign]
    tiers.prefetch([key(20), key(21)])
    assert right(tiers, [20, 21]) <= 2
    assert not tiers.arriving(key(20)) and not tiers.arriving(key(21))
    tiers.close()


def test_write_errors_lose_the_copy_not_the_page(tmp_path: Path) -> None:
    disk = FaultyFiles()
    tiers = Tiers(host_bytes=50 * PAGE_BYTES, store=open_store(tmp_path, files=disk))
    disk.write_errors = 1
    tiers.offer(page(1))
    assert tiers.flush(10)
    assert tiers.counters.unwritten == 1 and tiers.store is not None and tiers.store.counters.write_errors == 1
    assert right(tiers, [1]) == 1
    tiers.offer(page(1))
    assert tiers.flush(10) and tiers.counters.written == 1
    with pytest.raises(ValueError, match="3 bytes"):
        tiers.offer(Page(key(2), b"abc"))
    tiers.close()


def test_the_payload_is_copied_when_offered(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=0, store=open_store(tmp_path))
    device = bytearray(payload(1))
    tiers.offer(Page(key(1), memoryview(device)))
    device[:] = bytes(PAGE_BYTES)
    assert tiers.flush(10) and right(tiers, [1]) == 1
    tiers.close()


def test_threads_of_every_kind_at_once(tmp_path: Path) -> None:
    budget = 4096 + 60 * (2048 + 160)
    store = open_store(tmp_path, budget_bytes=budget)
    tiers = Tiers(host_bytes=20 * PAGE_BYTES, store=store, queue_bytes=30 * PAGE_BYTES)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(200):
                number = rng.randrange(150)
                match rng.randrange(4):
                    case 0:
                        tiers.offer(page(number))
                    case 1:
                        tiers.prefetch([key(n) for n in range(number, number + 5)])
                    case 2:
                        tiers.touch([key(number)])
                    case _:
                        right(tiers, [number])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and tiers.flush(20)
    counts = tiers.counters
    assert counts.offered == counts.written + counts.queue_dropped + counts.already_queued + counts.unwritten
    assert tiers.queued_bytes == 0 and tiers.host.used_bytes <= tiers.host.budget_bytes
    assert store.stat().pages <= 60 and store.counters.faults == 0, store.counters
    assert tiers.close()


def test_the_prefix_index_finds_pages_in_both_tiers(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=2 * PAGE_BYTES, store=open_store(tmp_path))
    chain = Chain(root(bytes(16), "v1", b"", 4), 4)
    chain.extend(list(range(20)))
    for digest in chain.digests[:4]:
        tiers.offer(Page(page_key(digest, EXACT), payload(1), tokens=4))
    assert tiers.flush(10)
    index = PrefixIndex(PagePool(8), 4, tiers.lookups)
    match = index.match(PrefixQuery(chain, limit=19))
    assert [entry.tier for entry in match.lower] == ["disk", "disk", "host", "host"]
    assert match.lower[1].key == page_key(chain.digests[1], EXACT)
    tiers.close()


def held_up(tiers: Tiers, name: str) -> tuple[threading.Event, threading.Event]:
    """The store's call of this name stops at its end for once: it has begun, and it may go on."""
    assert tiers.store is not None
    own, begun, go_on = getattr(tiers.store, name), threading.Event(), threading.Event()

    def late(pages: list[bytes]) -> object:
        found = own(pages)
        found = list(found) if name == "get_many" else found
        setattr(tiers.store, name, own)
        begun.set()
        assert go_on.wait(10)
        return found

    setattr(tiers.store, name, late)
    return begun, go_on


def test_a_read_from_before_a_doubt_answers_nobody_who_asks_after_it(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=0, store=open_store(tmp_path))
    assert tiers.store is not None
    tiers.store.put([page(0)])
    begun, go_on = held_up(tiers, "get_many")
    tiers.prefetch([key(0)])
    assert begun.wait(10)
    tiers.drop([key(0)])
    assert not tiers.arriving(key(0))
    tiers.offer(page(0)._replace(payload=payload(1)))
    assert tiers.flush(10)
    tiers.prefetch([key(0)])
    go_on.set()
    while key(0) in tiers._arriving:
        time.sleep(0.001)
    assert tiers.get(key(0)) == payload(1)
    assert tiers.close()


def test_a_page_under_doubt_while_it_is_written(tmp_path: Path) -> None:
    with closing(Tiers(host_bytes=0, store=open_store(tmp_path))) as tiers:
        begun, go_on = held_up(tiers, "put")
        for number in range(3):
            tiers.offer(page(number))
        assert begun.wait(10)
        tiers.drop([key(1)])
        assert not tiers.in_memory(key(1))
        go_on.set()
        assert tiers.flush(10)
        assert right(tiers, range(3)) == 2, "a page under doubt came back"
    with closing(open_store(tmp_path)) as store:
        assert store.contains_many([key(n) for n in range(3)]) == {key(0), key(2)}


def test_after_the_end_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=0, store=open_store(tmp_path), read_timeout_s=5)
    assert tiers.store is not None
    tiers.store.put([page(0)])
    assert tiers.close()
    assert tiers.get(key(0)) is None
    assert tiers.counters.slow == 1
    assert not tiers.arriving(key(0))


def test_the_writer_survives_a_queue_that_is_dropped_while_it_waits_for_more(tmp_path: Path) -> None:
    tiers = Tiers(host_bytes=0, store=open_store(tmp_path))
    tiers.offer(page(0))
    time.sleep(0.005)  # the writer is awake and lingers
    tiers.drop([key(0)])
    time.sleep(0.05)
    for number in range(1, 5):
        tiers.offer(page(number))
    assert tiers.flush(10), "pages stay unwritten"
    assert right(tiers, range(1, 5)) == 4 and tiers.counters.written == 4
    assert tiers.close()


def test_a_write_that_raises_costs_its_pages_and_not_the_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the store raises is said and counted; who waits for the queue is not left waiting, later pages are written."""
    store = open_store(tmp_path)
    put, calls = store.put, list[int]()

    def put_or_fail(pages: Sequence[Page]) -> int:
        calls.append(len(pages))
        if len(calls) == 1:
            raise RuntimeError("no such device")
        return put(pages)

    store.put = put_or_fail  # type: ignore[method-assign]
    with closing(Tiers(host_bytes=0, store=store)) as tiers:
        tiers.offer(page(0))
        assert tiers.flush(10)
        assert tiers.counters.unwritten == 1
        assert "no such device" in caplog.text
        tiers.offer(page(1))
        assert tiers.flush(10)
        assert tiers.counters.written == 1
        assert tiers.get(key(0)) is None
        assert right(tiers, [1]) == 1
