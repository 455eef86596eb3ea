"""The disk store: a million small pages (open, lookup, memory), and streams of released-size pages against plain files.

$KVIST_BENCH_DIR names the disk, $KVIST_STORE_GB the bytes of the streams (20 GB). Every page that is read is compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases import Benchmark, Case, CountedCase, Options, WrongResult
from benchmarks.page_disk import BATCH, Payloads, drop_page_cache, fill, key, open_store, scratch, stream, time_lookups
from kvist.cache.tiers import Tiers
from kvist.page_layout import PageLayout
from kvist.presets import preset

OPEN_ALLOWED_S = 2.0
LOOKUP_ALLOWED_US = 200.0
SMALL_PAGE = 4096
PREFIX_TOKENS = 128 * 1024
GIGABYTES_VARIABLE = "KVIST_STORE_GB"
_MEMORY = """
import sys
from pathlib import Path
from benchmarks.page_disk import Payloads, open_store, time_lookups
folder, pages = Path(sys.argv[1]), int(sys.argv[2])
store = open_store(folder, 4096)
time_lookups(store, Payloads(4096), pages, 20_000, read=True)
print(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
"""


def _passed() -> None:
    """What a case measures is compared page by page while it is measured."""


def _case(name: str, value: float, unit: str, peers: dict[str, float], *, higher: bool = False) -> Case:
    return CountedCase(
        name=name, count=lambda: value, check=_passed, unit=unit, better="higher" if higher else "lower", peers=peers
    )


def _many(pages: int, folder: Path) -> Iterator[Case]:
    payloads, label = Payloads(SMALL_PAGE), f"{pages:,} pages of 4 KiB"
    store = open_store(folder, SMALL_PAGE)
    start = time.perf_counter()
    fill(store, payloads, range(pages), batch=2000)
    store.flush()
    yield _case(f"publish, {label}", pages / (time.perf_counter() - start), "pages/s", {}, higher=True)
    store.close()
    store = open_store(folder, SMALL_PAGE)
    stat = store.stat()
    store.close()
    yield _case(f"index bytes a page, {label}", stat.index_bytes / pages, "bytes", {"counted in the budget": 160.0})
    drop_page_cache(folder)
    start = time.perf_counter()
    store = open_store(folder, SMALL_PAGE)
    cold_s = time.perf_counter() - start
    cold = time_lookups(store, payloads, pages, 2000, read=True)
    store.close()
    start = time.perf_counter()
    store = open_store(folder, SMALL_PAGE)
    warm_s = time.perf_counter() - start
    if store.stat().pages != pages:
        raise WrongResult(f"{store.stat().pages} of {pages} pages after opening")
    yield _case(f"open, page cache dropped, {label}", cold_s, "s", {"again": warm_s, "allowed": OPEN_ALLOWED_S})
    found = time_lookups(store, payloads, pages, 20_000, read=False)
    read = time_lookups(store, payloads, pages, 20_000, read=True)
    store.close()
    allowed = {"allowed": LOOKUP_ALLOWED_US}
    yield _case(f"lookup, {label}", found.at(0.5), "us", {"p99": found.at(0.99), **allowed})
    yield _case(f"lookup and page, {label}", read.at(0.5), "us", {"p99": read.at(0.99)})
    yield _case(f"lookup and page, page cache dropped, {label}", cold.at(0.5), "us", {"p99": cold.at(0.99)})


def _memory(folder: Path, pages: int) -> float:
    command = [sys.executable, "-c", _MEMORY, str(folder), str(pages)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[1])
    if run.returncode:
        raise WrongResult(run.stderr)
    return int(run.stdout) / 1024


def _small(folder: Path, pages: int) -> float:
    store = open_store(folder, SMALL_PAGE)
    fill(store, Payloads(SMALL_PAGE), range(pages), batch=2000)
    store.close()
    return _memory(folder, pages)


def _streams(page_bytes: int, total: int, folder: Path) -> Iterator[Case]:
    result = stream(folder, page_bytes, total, min(total, 1_000_000_000))
    size = f"{result.payload_bytes / 1e9:.3g} GB of {page_bytes:,}-byte pages"
    for kind, name in (("write", "sequential write, on disk"), ("read", "sequential read, page cache dropped")):
        value, plain = result.rate(f"store_{kind}"), result.rate(f"plain_{kind}")
        yield CountedCase(
            name=f"{name}, {size}",
            count=lambda value=value: value,  # type: ignore[misc]
            check=_passed,
            unit="GB/s",
            better="higher",
            floor=plain,
            peers={"plain files": plain},
        )


def _at_the_budget(page_bytes: int, pages: int, folder: Path) -> Case:
    payloads = Payloads(page_bytes)
    store = open_store(folder, page_bytes, budget_bytes=4096 + pages * (page_bytes + 1000))
    fill(store, payloads, range(pages), BATCH)
    start = time.perf_counter()
    fill(store, payloads, range(pages, 3 * pages), BATCH)
    store.flush()
    rate = 2 * pages * page_bytes / (time.perf_counter() - start) / 1e9
    if store.counters.evicted < pages or store.counters.faults:
        raise WrongResult(f"{store.counters}")
    for number in range(3 * pages - 100, 3 * pages):
        payloads.require(number, store.get(key(number)))
    store.close()
    return _case(f"write at the budget, each page evicts one of {pages:,}", rate, "GB/s", {}, higher=True)


def _restore(page_bytes: int, pages: int, folder: Path) -> Case:
    payloads = Payloads(page_bytes)
    store = open_store(folder, page_bytes)
    fill(store, payloads, range(pages), BATCH)
    store.close()
    drop_page_cache(folder)
    start = time.perf_counter()
    tiers = Tiers(host_bytes=2 * pages * page_bytes, store=open_store(folder, page_bytes))
    keys = [key(number) for number in range(pages)]
    tiers.prefetch(keys)
    data = [tiers.get(wanted) for wanted in keys]
    taken = time.perf_counter() - start
    for number, page in enumerate(data):
        payloads.require(number, page)
    tiers.close()
    name = f"restore a prefix of {PREFIX_TOKENS:,} tokens ({pages * page_bytes / 1e6:.0f} MB) to host memory, opening included"
    return _case(name, taken * 1e3, "ms", {})


def _build(options: Options) -> Iterator[Case]:
    layout = PageLayout.of(preset("v41-flash"))
    pages = 20_000 if options.quick else 1_000_000
    total = 300_000_000 if options.quick else int(float(os.environ.get(GIGABYTES_VARIABLE, "20")) * 1e9)
    with scratch() as folder:
        for name in ("many", "few", "budget", "prefix", "stream"):
            (folder / name).mkdir()
        yield from _many(pages, folder / "many")
        few = _small(folder / "few", 1000)
        peers = {"with 1,000 pages": few}
        yield _case(f"memory of a reading process, {pages:,} pages", _memory(folder / "many", pages), "MiB", peers)
        for file in (folder / "many").iterdir():
            file.unlink()
        yield _at_the_budget(layout.page_bytes, 1000 if options.quick else 5000, folder / "budget")
        yield _restore(layout.page_bytes, PREFIX_TOKENS // layout.page_tokens, folder / "prefix")
        yield from _streams(layout.page_bytes, total, folder / "stream")


BENCHMARK = Benchmark(
    name="page-store",
    summary="disk store: a million pages opened and looked up; page streams against plain files, page cache dropped",
    build=_build,
)
