"""Pages of `v41-flash-slim` between host memory, a disk and the card (imported only where Triton is), beside plain copies.

They move as an engine's do: kept by the tiers, brought by its `CardPages`. Every byte is compared. $KVIST_BENCH_DIR names the
disk. Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import WrongResult
from benchmarks.page_disk import BATCH, CHUNK, drop_page_cache, key, open_store, scratch
from benchmarks.slim import Case
from benchmarks.slim_cases import random_state
from benchmarks.slim_prefill import hit_prompts
from kvist.cache.page_file import FILE_NAME
from kvist.cache.record import Page
from kvist.cache.tiers import Tiers
from kvist.engine.card.device_model import DeviceModel
from kvist.engine.card.prefill import Prefill
from kvist.engine.card.weights import CardWeights
from kvist.engine.page_bytes import CardPages

ROUNDS = 9
DISK_ROUNDS, DISK_S = (9, 40), 10.0
"""Alternating rounds of a disk: at least, at most; none begins later than so many seconds after the first."""
SUFFIX = 16

Found = tuple[float, float, dict[str, float], str]


def measure_pages(weights: CardWeights, case: Case, said: Callable[[str], None]) -> Found:
    """Milliseconds that a context's pages take, those of a plain copy of as many bytes, other values, and what to report."""
    whole = replace(case, context=case.context + SUFFIX, suffix=SUFFIX)
    state = random_state(weights.config, whole, weights.embed.device)
    pool_PB, count = state.rows.bytes_PB, case.context // state.layout.page_tokens
    pages, keys = state.rows.table[0, :count].tolist(), [key(number) for number in range(count)]
    host_PB = pool_PB[pages].cpu().pin_memory()
    if case.place == "from disk":
        return _from_disk(pool_PB, host_PB, pages, keys)
    flat = torch.empty(host_PB.shape, dtype=torch.uint8, device=weights.embed.device)
    with closing(Tiers(host_bytes=2 * host_PB.nbytes, store=None)) as tiers:
        card = CardPages.of(pool_PB, tiers)
        if case.place == "to host memory":
            other_PB = torch.zeros_like(host_PB).pin_memory()
            times = _rounds({"pages": lambda: card.read(pages), "copy": lambda: other_PB.copy_(flat)})
            for got, want in zip(card.read(pages), host_PB, strict=True):
                _require(torch.frombuffer(got, dtype=torch.uint8), want)
            return times["pages"], times["copy"], {}, _text(times, host_PB.nbytes)
        for name, page in zip(keys, card.read(pages), strict=True):
            tiers.offer(Page(name, page))
        prefill = Prefill(DeviceModel(weights, state))
        prompts, _ = hit_prompts(weights, replace(case, suffix=SUFFIX))
        again, logits_RV = prefill.captured(prompts)

        def first_token() -> None:
            card.write(pages, tiers.get_many(keys))
            again(prompts)
            logits_RV.argmax(1).tolist()

        times = _rounds({
            "pages": lambda: card.write(pages, tiers.get_many(keys)), "copy": lambda: flat.copy_(host_PB, non_blocking=True),
            "replay": lambda: again(prompts), "first token": first_token,
        })  # fmt: skip
        pool_PB[pages] = 0
        if card.write(pages, tiers.get_many(keys)) != count:
            raise WrongResult(f"not all pages came back: {tiers.counters}")
        _require(pool_PB[pages].cpu(), host_PB)
    text = _text(times, host_PB.nbytes) + (
        f"; first token by a graph {times['first token']:.2f} ms after the request, the replay alone takes {times['replay']:.2f}"
    )
    return times["pages"], times["copy"], {"restored and first token": times["first token"], "replay": times["replay"]}, text


def _text(times: dict[str, float], nbytes: int) -> str:
    rates = {name: nbytes / times[name] / 1e6 for name in ("pages", "copy")}
    return (
        f"{nbytes / 1e6:.1f} MB in {times['pages']:.3f} ms, {rates['pages']:.1f} GB/s; a plain copy in the same run "
        f"{rates['copy']:.1f} GB/s ({100 * rates['pages'] / rates['copy']:.0f} % of it)"
    )


def _require(got_PB: Tensor, want_PB: Tensor) -> None:
    if not torch.equal(got_PB, want_PB):
        raise WrongResult(f"{int((got_PB != want_PB).sum())} bytes of {want_PB.numel()} are not what they were")


def _rounds(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each variant by the host's clock, device work included, in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 1):
        for name, variant in variants.items():
            taken = _clocked(variant)
            if number:
                times[name].append(taken)
    return {name: statistics.median(line) for name, line in times.items()}


def _clocked(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _from_disk(pool_PB: Tensor, host_PB: Tensor, pages: list[int], keys: list[bytes]) -> Found:
    """Restored, and the store's file read plainly, in turn from a disk whose pages are in no memory."""
    with scratch() as folder:
        store = open_store(folder, host_PB.shape[1])
        published = [Page(name, row.numpy().data.cast("B")) for name, row in zip(keys, host_PB, strict=True)]
        if sum(store.put(published[at : at + BATCH]) for at in range(0, len(keys), BATCH)) != len(keys):
            raise WrongResult(f"not all pages were stored: {store.counters}")
        store.flush()
        with closing(Tiers(host_bytes=0, store=store, stage_bytes=2 * host_PB.nbytes)) as tiers:
            card, file = CardPages.of(pool_PB, tiers), folder / FILE_NAME

            def restored() -> None:
                tiers.prefetch(keys)
                if card.write(pages, tiers.get_many(keys)) != len(pages):
                    raise WrongResult(f"not all pages came back: {store.counters}")

            restored()
            times: dict[str, list[float]] = {"pages": [], "copy": []}
            ways: list[tuple[str, Callable[[], None]]] = [("pages", restored), ("copy", lambda: _read(file))]
            stop = time.perf_counter() + DISK_S
            while len(times["copy"]) < DISK_ROUNDS[0] or (len(times["copy"]) < DISK_ROUNDS[1] and time.perf_counter() < stop):
                for name, work in ways:
                    drop_page_cache(folder)
                    times[name].append(_clocked(work))
                ways.reverse()
            pool_PB[pages] = 0
            restored()
            _require(pool_PB[pages].cpu(), host_PB)
        value, plain = statistics.median(times["pages"]), statistics.median(times["copy"])
        return value, plain, {}, _disk_text(times, host_PB.nbytes, file.stat().st_size)


def _disk_text(times: dict[str, list[float]], nbytes: int, file_bytes: int) -> str:
    """Rates of pages' bytes and of the file's, and how one round's compare."""
    rates = {"pages": nbytes, "copy": file_bytes}
    shares = sorted(100 * nbytes / file_bytes * plain / own for own, plain in zip(times["pages"], times["copy"], strict=True))
    said = {name: [size / taken / 1e6 for taken in sorted(times[name], reverse=True)] for name, size in rates.items()}
    return (
        f"{nbytes / 1e6:.1f} MB at {_spread(said['pages'], '.2f')} GB/s, the file read plainly at {_spread(said['copy'], '.2f')}"
        f"; in {len(shares)} alternating rounds {_spread(shares, '.0f')} % of it"
    )


def _spread(line: Sequence[float], form: str) -> str:
    """Median (quartiles)."""
    low, middle, high = statistics.quantiles(line, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
