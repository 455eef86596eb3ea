"""The disk store without faults: bytes come back, the budget holds, the right pages go, processes share a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvist.cache.maintenance import export, verify
from kvist.cache.page_file import Geometry, _let_go
from kvist.cache.record import HEADER_BYTES, CorruptPage, Page, check, pack_header, read_header
from kvist.cache.store import PageStore
from kvist.cache.store_errors import NewerStore, NotAStore, OtherModel, ReadOnlyStore, StoreBudgetTooSmall, StoreUnwritable
from kvist.config import replace
from kvist.page_layout import PageLayout
from kvist.presets import preset
from tests.fault.page_writer import MODEL, PAGE_BYTES, key, open_store, page, payload

SLOT = Geometry.new(page_bytes=PAGE_BYTES, page_tokens=4, model=MODEL).slot_bytes


def budget_for(pages: float) -> int:
    return 4096 + int(pages * (SLOT + 160))


def found(store: PageStore, numbers: range) -> set[int]:
    """Numbers of pages that come back; a wrong page fails."""
    there = set()
    for number in numbers:
        data = store.get(key(number))
        if data is not None:
            assert data == payload(number), f"page {number} has other bytes"
            there.add(number)
    return there


def test_a_record_is_proved_by_every_field() -> None:
    good = pack_header(page(1), MODEL, 7) + payload(1)
    promised = {"model": MODEL, "key": key(1), "sequence": 7, "payload_bytes": PAGE_BYTES}
    stored = check(good, **promised)
    assert stored.payload == payload(1)
    assert stored.header.parent == key(0) and stored.header.provenance == 1 and stored.header.tokens == 4
    for change, reason in (
        ({"model": b"another model 16"}, "model"),
        ({"key": key(2)}, "stale"),
        ({"sequence": 8}, "stale"),
        ({"payload_bytes": PAGE_BYTES - 1}, "layout"),
    ):
        with pytest.raises(CorruptPage) as caught:
            check(good, **promised | change)
        assert caught.value.reason == reason
    for raw, reason in (
        (good[:-1], "truncated"),
        (good[: HEADER_BYTES - 1], "truncated"),
        (b"X" + good[1:], "foreign"),
        (good[:8] + b"\2" + good[9:], "version"),
        (good[:-1] + bytes([good[-1] ^ 1]), "checksum"),
    ):
        with pytest.raises(CorruptPage) as caught:
            check(raw, **promised)
        assert caught.value.reason == reason


def test_every_bit_of_a_record_is_covered() -> None:
    page_bytes = 32
    good = pack_header(page(1, page_bytes), MODEL, 7) + payload(1, page_bytes)
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPage):
            check(bad, model=MODEL, key=key(1), sequence=7, payload_bytes=page_bytes)


def test_pages_come_back_in_this_process_and_the_next(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put([page(n) for n in range(40)]) == 40
    assert found(store, range(50)) == set(range(40))
    assert store.put([page(n) for n in range(30, 60)]) == 30
    assert (store.counters.published, store.counters.already_there) == (60, 10)
    assert [data is None for data in store.get_many([key(3), key(99), key(4)])] == [False, True, False]
    store.close()
    again = PageStore.open(tmp_path)
    assert again.geometry.model == MODEL and again.geometry.page_tokens == 4
    assert found(again, range(70)) == set(range(60))
    assert again.counters.faults == 0
    again.close()


def test_memory_of_pages_that_were_let_go_is_used_again() -> None:
    pool = [bytearray(4) for _ in range(4)]
    views = [memoryview(pool[0])[1:], memoryview(pool[2])[:2].toreadonly()]
    free = {id(buffer) for buffer in _let_go(pool)}
    assert free == {id(pool[1]), id(pool[3])}
    del views[0]
    assert len(_let_go(pool)) == 3


@pytest.mark.parametrize("keep", [0, 1, 5, 200])
def test_pages_that_a_reader_keeps_are_not_overwritten(tmp_path: Path, keep: int) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(200)])
    kept: list[tuple[int, memoryview]] = []
    for number, data in enumerate(store.get_many([key(n) for n in range(200)])):
        assert data is not None and data.readonly
        kept.append((number, data[7:]))
        del data
        kept = [(n, view) for n, view in kept if n % 200 >= 200 - keep or n > number - keep]
        for n, view in kept:
            assert view == payload(n)[7:], f"page {n} was overwritten when page {number} was read"
    assert len(kept) == keep
    store.close()


def test_payload_may_be_any_buffer(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    array = np.frombuffer(payload(1), dtype=np.uint8).reshape(2, -1)
    store.put([Page(key(1), memoryview(array)), Page(key(2), bytearray(payload(2)))])
    assert found(store, range(4)) == {1, 2}
    store.close()


def test_slots_are_whole_blocks_where_that_is_cheap() -> None:
    released = Geometry.new(page_bytes=113_920, page_tokens=128, model=MODEL)
    assert released.slot_bytes == 114_688  # 28 blocks: 0.56 % more than record's 114,048
    assert Geometry.new(page_bytes=4096, page_tokens=4, model=MODEL).slot_bytes == 4608


def test_budget_holds_and_the_least_recently_wanted_go(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=budget_for(20.5))
    assert store.stat().capacity == 20
    for number in range(20):
        store.put([page(number)])
    assert found(store, range(3)) == {0, 1, 2}  # a read is a wish to keep
    for number in range(20, 35):
        store.put([page(number)])
    assert found(store, range(40)) == {0, 1, 2, *range(18, 35)}
    assert store.counters.evicted == 15
    stat = store.stat()
    assert stat.file_bytes <= budget_for(20.5) and stat.pages == 20
    store.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= budget_for(20.5) + 32_768  # an empty index has 20 KiB


def test_a_prefix_goes_from_its_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=budget_for(10))
    store.put([page(n) for n in range(10)])
    store.put([page(n) for n in range(100, 104)])
    assert found(store, range(200)) == {*range(6), *range(100, 104)}
    store.touch([key(n) for n in range(6)])
    store.put([page(n) for n in range(200, 206)])
    assert found(store, range(300)) == {*range(4), *range(200, 206)}
    store.close()


def test_pages_of_one_batch_do_not_push_each_other_out(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=budget_for(8))
    store.put([page(n) for n in range(8)])
    assert store.put([page(n) for n in (7, 6, 5, 20, 21, 22, 23)]) == 7
    assert found(store, range(30)) == {7, 6, 5, 20, 21, 22, 23, 0}
    store.close()


def test_clock_survives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=budget_for(8))
    for number in range(8):
        store.put([page(number)])
    found(store, range(2))
    store.close()
    store = open_store(tmp_path, budget_bytes=budget_for(8))
    store.put([page(n) for n in range(8, 12)])
    assert found(store, range(12)) == {0, 1, 6, 7, 8, 9, 10, 11}
    store.close()


@pytest.mark.parametrize("case", ["KVP-05"])
def test_kvp_05_budget_of_one_and_a_half_entries(tmp_path: Path, case: str) -> None:
    store = open_store(tmp_path, budget_bytes=budget_for(1.5))
    for number in (1, 2, 1, 2):
        assert store.put([page(number)]) == 1
        assert found(store, range(4)) == {number}, case
        assert store.stat().file_bytes <= budget_for(1.5)
    assert store.put([page(5), page(6)]) == 1, "more pages than fit: the beginning of the chain is kept"
    assert found(store, range(9)) == {5}
    store.close()
    with pytest.raises(StoreBudgetTooSmall, match=r"holds no page: one needs [\d,]+ bytes"):
        open_store(tmp_path / "other", budget_bytes=budget_for(0.99))
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["writer.lock"]


def test_a_smaller_budget_gives_disk_space_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put([page(n) for n in range(50)])
    found(store, range(0, 50, 7))
    store.close()
    store = open_store(tmp_path, budget_bytes=budget_for(12))
    assert store.stat().file_bytes <= budget_for(12)
    assert len(there := found(store, range(50))) == 12 and set(range(0, 50, 7)) <= there
    assert store.shrink(5) == 7 and len(found(store, range(50))) == 5
    assert store.stat().file_bytes == 4096 + 5 * SLOT
    store.close()
    store = open_store(tmp_path)
    assert len(found(store, range(50))) == 5 and store.counters.faults == 0
    store.close()


def test_second_writer_reads_and_says_so(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.put([page(1)])
    second = open_store(tmp_path)
    assert second.read_only and second.notice is not None
    assert f"process {os.getpid()}" in second.notice and "read-only" in second.notice
    assert found(second, range(3)) == {1}
    first.put([page(2)])
    assert found(second, range(3)) == {1, 2}
    for change in (lambda: second.put([page(3)]), lambda: second.drop(key(1)), lambda: second.shrink(0)):
        with pytest.raises(ReadOnlyStore, match="read-only"):
            change()
    first.close()
    second.close()
    third = open_store(tmp_path)
    assert not third.read_only and third.notice is None
    third.close()


@pytest.mark.parametrize("case", ["KVP-01"])
def test_kvp_01_other_model(tmp_path: Path, case: str) -> None:
    store = open_store(tmp_path)
    store.put([page(1)])
    store.close()
    for option in ({"model": b"another model 16"}, {"page_bytes": PAGE_BYTES + 1}, {"page_tokens": 8}):
        for read_only in (False, True):
            with pytest.raises(OtherModel, match=r"directory of its own"):
                open_store(tmp_path, read_only=read_only, **option)
    store = open_store(tmp_path)
    assert found(store, range(3)) == {1}, case
    store.close()


def test_newer_versions_are_refused_and_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "index")
    store.put([page(1)])
    store._index._open().execute("PRAGMA user_version = 2")
    store.close()
    with pytest.raises(NewerStore, match="index version 2; this program reads versions up to 1"):
        open_store(tmp_path / "index")
    store = open_store(tmp_path / "file")
    store.close()
    head = bytearray((tmp_path / "file" / "pages.kv").read_bytes())
    newer = store.geometry.pack().replace(b"KVISTSTO\1", b"KVISTSTO\2")
    fields = newer[:64]
    head[:80] = fields + xxhash.xxh3_128(fields).digest()
    (tmp_path / "file" / "pages.kv").write_bytes(head)
    before = (tmp_path / "file" / "pages.kv").read_bytes()
    with pytest.raises(NewerStore, match="format version 2"):
        open_store(tmp_path / "file")
    assert (tmp_path / "file" / "pages.kv").read_bytes() == before


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnwritable, match="cannot be used for a store"):
        open_store(tmp_path / "file" / "store")
    with pytest.raises(NotAStore, match=r"pages\.kv is missing"):
        open_store(tmp_path / "nothing", read_only=True)
    with pytest.raises(NotAStore, match=r"pages\.kv is missing"):
        PageStore.open(tmp_path)
    (tmp_path / "pages.kv").write_bytes(b"something else\n" * 1000)
    with pytest.raises(NotAStore, match="not a page file"):
        open_store(tmp_path)
    assert (tmp_path / "pages.kv").read_bytes() == b"something else\n" * 1000
    with pytest.raises(ValueError, match="16"):
        open_store(tmp_path, model=b"short")


def test_wrong_pages_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="1499 bytes"):
        store.put([Page(key(1), bytes(PAGE_BYTES - 1))])
    with pytest.raises(ValueError, match="key of 3"):
        store.put([Page(b"key", bytes(PAGE_BYTES))])
    assert store.stat().pages == 0
    store.close()


@pytest.mark.parametrize("case", ["KVP-11"])
@pytest.mark.parametrize("page_tokens", [2, 8])
def test_kvp_11_every_plane_comes_back(tmp_path: Path, page_tokens: int, case: str) -> None:
    config = replace(preset("tiny"))
    assert {spec.ratio for spec in config.plan.kv_sources} == {1, 2}, case
    layout = PageLayout.of(config, page_tokens)
    store = open_store(tmp_path, page_bytes=layout.page_bytes, page_tokens=page_tokens)
    data = payload(37, layout.page_bytes)
    store.put([Page(key(37), data)])
    back = store.get(key(37))
    assert back is not None
    for plane in layout.planes:
        rows = slice(plane.offset, plane.offset + plane.nbytes)
        assert back[rows] == data[rows], (plane.layer, plane.kind)
    store.close()


def test_verify_and_export(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put([page(n) for n in range(9)])
    assert verify(store).good and verify(store).pages == 9
    assert export(store, tmp_path / "out") == 9
    assert (tmp_path / "out" / f"{key(4).hex()}.page").read_bytes() == payload(4)
    assert len((tmp_path / "out" / "pages.jsonl").read_text().splitlines()) == 9
    with pytest.raises(ValueError, match="not empty"):
        export(store, tmp_path / "out")
    store.close()


def test_the_store_needs_no_torch() -> None:
    program = "import sys, kvist.cache.tiers, kvist.cache.maintenance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_headers_alone_tell_whose_page_it_is() -> None:
    header = read_header(pack_header(page(5), MODEL, 3))
    assert (header.key, header.parent, header.model, header.sequence) == (key(5), key(4), MODEL, 3)
