"""Engram rows read from the file: the row cache, distinct rows, prefetch, counters; the values of the mapped table."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvist.checkpoint import EngramStore, FileReads, open_tables, save_checkpoint
from kvist.checkpoint.formats import open_checkpoint
from kvist.checkpoint.row_cache import WAYS, RowCache
from kvist.checkpoint.tensors import TensorFiles
from kvist.inventory import parameters
from kvist.presets import preset
from kvist.testing import bit_equal

CONFIG = preset("tiny")
LAYERS = CONFIG.engram_layer_ids
ROW_BYTES = CONFIG.engram_head_dim + CONFIG.engram_head_dim // 32


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> TensorFiles:
    generator = torch.Generator().manual_seed(0)
    state = {p.name: torch.randn(p.shape, generator=generator) for p in parameters(CONFIG)}
    folder: Path = tmp_path_factory.mktemp("model") / "toy"
    save_checkpoint(CONFIG, state, None, folder)
    return TensorFiles(open_checkpoint(folder))


def plain_pread(descriptor: int, target: memoryview, offset: int) -> int:
    import os

    return os.preadv(descriptor, [target], offset)


def ids_of(*shape: int, seed: int = 0, rows: int = CONFIG.engram_num_embeddings[0]) -> torch.Tensor:
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


def settle(table, condition) -> None:
    end = time.monotonic() + 20
    while not condition(table.counters):
        assert time.monotonic() < end, table.counters
        time.sleep(0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_bytes", [0, 30 * ROW_BYTES, 1 << 20])
@pytest.mark.parametrize("native", [True, False])
def test_rows_are_those_of_the_mapped_table(files, dtype, cache_bytes, native):
    # Without a compiler the store's own choice is the plain form too.
    reads = None if native else FileReads(pread=plain_pread)
    store = EngramStore(files, CONFIG, dtype, cache_bytes=cache_bytes, reads=reads)
    mapped = open_tables(files, CONFIG, dtype)
    for layer in LAYERS:
        for seed, shape in enumerate([(40, 6), (1, 6), (0, 6), (3,), (40, 6)]):
            ids = ids_of(*shape, seed=seed % 3)
            got = store.tables[layer].rows(ids)
            assert got.dtype is dtype
            assert bit_equal(got, mapped[layer].rows(ids))


def test_a_row_that_repeats_is_read_once(files):
    store = EngramStore(files, CONFIG, torch.float32)
    table = store.tables[LAYERS[0]]
    table.rows(torch.tensor([[5, 7, 5], [7, 7, 9]]))
    assert (table.counters.asked, table.counters.distinct, table.counters.read) == (6, 3, 3)
    assert table.counters.bytes_read == 3 * ROW_BYTES
    assert table.counters.hit_rate == 0.0
    table.rows(torch.tensor([9, 5, 8]))
    assert (table.counters.hits, table.counters.read) == (2, 4)
    assert table.counters.hit_rate == 2 / 6
    assert store.counters().asked == 9
    assert table.counters.stall_s > 0


def test_prefetched_rows_are_there_when_asked_for(files):
    table = EngramStore(files, CONFIG, torch.float32).tables[LAYERS[0]]
    ids = ids_of(50, 6)
    table.prefetch(ids)
    distinct = len(ids.unique())
    settle(table, lambda c: c.read_ahead == distinct)
    table.rows(ids)
    assert (table.counters.hits, table.counters.read, table.counters.stall_s) == (distinct, 0, 0.0)


def test_rows_under_way_are_waited_for_not_read_twice(files):
    gate, begun = threading.Event(), threading.Event()

    def slow(descriptor: int, target: memoryview, offset: int) -> int:
        begun.set()
        assert gate.wait(20)
        return plain_pread(descriptor, target, offset)

    table = EngramStore(files, CONFIG, torch.float32, reads=FileReads(pread=slow)).tables[LAYERS[0]]
    table.prefetch(torch.tensor([1, 2, 3]))
    assert begun.wait(20)
    threading.Timer(0.05, gate.set).start()
    table.rows(torch.tensor([2, 3, 4]))
    assert (table.counters.read_ahead, table.counters.read) == (3, 1)
    assert table.counters.stall_s > 0.03


def test_nobody_waits_for_a_prefetch_that_has_not_begun(files):
    gate, begun = threading.Event(), threading.Event()
    first = True

    def slow(descriptor: int, target: memoryview, offset: int) -> int:
        nonlocal first
        if first:
            first = False
            begun.set()
            assert gate.wait(20)
        return plain_pread(descriptor, target, offset)

    table = EngramStore(files, CONFIG, torch.float32, reads=FileReads(pread=slow)).tables[LAYERS[0]]
    table.prefetch(torch.tensor([1]))
    assert begun.wait(20)
    table.prefetch(torch.tensor([10, 11]))
    table.rows(torch.tensor([11]))  # does not wait for the thread, which is busy with row 1
    assert table.counters.read == 1
    gate.set()
    settle(table, lambda c: c.read_ahead == 2)  # rows 1 and 10; row 11 is held


def test_a_long_prefetch_is_cut_into_jobs_and_to_half_the_cache(files):
    cache_bytes = 2 * 300 * (ROW_BYTES + 16)  # two tables of 300 rows, cut to whole sets
    table = EngramStore(files, CONFIG, torch.float32, cache_bytes=cache_bytes).tables[LAYERS[0]]
    capacity = table.cache.capacity
    assert 280 <= capacity <= 300
    table.prefetch(torch.arange(600))
    settle(table, lambda c: c.read_ahead == capacity // 2)
    table.rows(torch.arange(100))
    assert table.counters.hits > 60, "the first rows are those that came"
    long = EngramStore(files, CONFIG, torch.float32).tables[LAYERS[0]]
    long.prefetch(torch.arange(330).repeat(200))
    settle(long, lambda c: c.read_ahead == 330)


def test_too_many_prefetches_are_dropped_and_counted(files):
    gate = threading.Event()

    def slow(descriptor: int, target: memoryview, offset: int) -> int:
        assert gate.wait(20)
        return plain_pread(descriptor, target, offset)

    table = EngramStore(files, CONFIG, torch.float32, reads=FileReads(pread=slow)).tables[LAYERS[0]]
    for row in range(100):
        table.prefetch(torch.tensor([row]))
    assert table.counters.dropped == 36
    gate.set()
    settle(table, lambda c: c.read_ahead == 64)


@pytest.mark.parametrize("bad", [-1, CONFIG.engram_num_embeddings[0], 2**31 - 1])
def test_eng_04_an_id_outside_the_table_never_wraps(files, bad):
    table = EngramStore(files, CONFIG, torch.float32).tables[LAYERS[0]]
    for call in (table.rows, table.prefetch):
        with pytest.raises(ValueError, match=rf"leave the table's 0\.\.{CONFIG.engram_num_embeddings[0] - 1}"):
            call(torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="must be int64"):
        table.rows(torch.tensor([3], dtype=torch.int32))


def test_a_negative_cache_is_refused(files):
    with pytest.raises(ValueError, match="-1 bytes; 0 keeps no rows"):
        EngramStore(files, CONFIG, torch.float32, cache_bytes=-1)


def test_a_dropped_store_ends_its_thread(files):
    store = EngramStore(files, CONFIG, torch.float32)
    table = store.tables[LAYERS[0]]
    table.prefetch(torch.tensor([1]))
    settle(table, lambda c: c.read_ahead == 1)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("engram-ahead")]
    store.close()
    for thread in threads[-1:]:
        thread.join(20)
        assert not thread.is_alive()


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True), max_size=12), st.integers(0, 400))
def test_the_row_cache_gives_back_what_was_put_and_keeps_its_budget(batches, budget):
    cache = RowCache(4, budget, 61)
    assert cache.tags_SW.nbytes + cache.stamps_SW.nbytes + cache.rows_SWB.nbytes <= budget
    for batch in batches:
        ids = np.array(sorted(batch), dtype=np.int64)
        out = np.zeros((len(ids), 4), dtype=np.uint8)
        held = cache.get(ids, out)
        assert (out[held] == ids[held, None]).all()
        cache.put(ids[~held], np.repeat(ids[~held, None], 4, 1).astype(np.uint8))
        tags = cache.tags_SW[cache.tags_SW >= 0]
        assert len(np.unique(tags)) == len(tags), "a row is held once"


def test_the_row_cache_evicts_the_least_recently_used_of_a_set():
    cache = RowCache(1, WAYS * 17, 100)
    assert (cache.sets, cache.capacity) == (1, WAYS)
    row = lambda index: (np.array([index]), np.full((1, 1), index, dtype=np.uint8))  # noqa: E731
    out = np.zeros((1, 1), dtype=np.uint8)
    for index in range(WAYS):
        cache.put(*row(index))
    assert cache.get(np.array([0]), out).all()
    cache.put(*row(99))
    assert [bool(cache.get(np.array([index]), out)[0]) for index in (0, 1, 2, 99)] == [True, False, True, True]
