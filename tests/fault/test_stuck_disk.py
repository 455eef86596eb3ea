"""A disk call that never returns: closing is bounded and says what it waits for, and a process ends without it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvist.cache.tiers import Tiers
from kvist.cache.workers import Workers, within
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import PAGE_BYTES, key, open_store, page

PATIENCE_S, SOON_S = 0.2, 10.0


@pytest.mark.parametrize(
    ("kind", "said"), [("read", "a read of pages"), ("write", "a write of pages"), ("sync", "the store's close")]
)
def test_closing_is_bounded_and_says_what_it_waits_for(
    tmp_path: Path, kind: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyFiles()
    store = open_store(tmp_path, files=disk)
    assert store.put([page(0)]) == 1
    monkeypatch.setattr("kvist.cache.tiers.ANSWER_S", PATIENCE_S)
    tiers = Tiers(host_bytes=2 * PAGE_BYTES, store=store, read_timeout_s=PATIENCE_S)
    disk.stuck, disk.stuck_at = threading.Event(), kind
    if kind == "read":
        assert tiers.get(key(0)) is None
        assert tiers.counters.slow == 1
    else:
        tiers.offer(page(1))
    began = time.monotonic()
    with caplog.at_level(logging.ERROR):
        assert not tiers.close(PATIENCE_S)
    assert time.monotonic() - began < SOON_S
    (record,) = caplog.records
    assert f"has not answered {said} within {PATIENCE_S} s" in record.getMessage()
    assert str(tmp_path) in record.getMessage()
    # The disk wakes up: what waited for it ends, and what was stored is intact.
    disk.stuck.set()
    if kind != "sync":
        store.close()
    deadline = time.monotonic() + SOON_S
    while any(thread.name.startswith("kvist-page") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    again = open_store(tmp_path)
    assert again.get(key(0)) == page(0).payload
    again.close()


def test_a_process_ends_without_its_disk(tmp_path: Path) -> None:
    """As every program does: without having closed anything, a read of its under way."""
    open_store(tmp_path).close()
    code = f"""
import threading
from pathlib import Path
from kvist.cache.tiers import Tiers
from tests.fault.faulty_files import FaultyFiles
from tests.fault.page_writer import key, open_store, page
disk = FaultyFiles()
store = open_store(Path({str(tmp_path)!r}), files=disk)
store.put([page(0)])
tiers = Tiers(host_bytes=0, store=store, read_timeout_s=0.1)
disk.stuck = threading.Event()
assert tiers.get(key(0)) is None
print("went on", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_workers_run_in_order_cancel_what_has_not_begun_and_wait_no_longer_than_told() -> None:
    started, release, order = threading.Event(), threading.Event(), list[int]()
    workers = Workers(1, "kvist-test")

    def first() -> int:
        started.set()
        release.wait(60)
        order.append(0)
        return 7

    running, failing = workers.submit(first), workers.submit(order.index, 5)
    started.wait(60)
    last = workers.submit(order.append, 1)
    release.set()
    assert running.result(60) == 7
    with pytest.raises(ValueError, match="5"):
        failing.result(60)
    last.result(60)
    assert order == [0, 1]
    release.clear()
    started.clear()
    running = workers.submit(first)
    started.wait(60)
    late = workers.submit(order.append, 2)
    assert not workers.close(0.05)
    assert late.cancelled()
    with pytest.raises(RuntimeError, match="kvist-test"):
        workers.submit(order.append, 3)
    release.set()
    assert workers.close(60)
    assert running.result() == 7
    assert order == [0, 1, 0]


def test_a_call_within_a_time() -> None:
    release = threading.Event()
    assert not within(0.05, release.wait, "kvist-test")
    release.set()
    assert within(60, release.wait, "kvist-test")
    assert within(None, release.wait, "kvist-test")
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0, "kvist-test")
