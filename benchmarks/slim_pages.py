"""Pages of `v41-flash-slim` between host memory, a disk and the card (imported only where Triton is), beside plain copies.

Every byte is compared. $KVIST_BENCH_DIR names the disk. Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import WrongResult
from benchmarks.page_disk import BATCH, drop_page_cache, key, open_store, scratch
from benchmarks.slim import Case
from benchmarks.slim_cases import random_state
from benchmarks.slim_prefill import hit_prompts
from kvist.cache.record import HEADER_BYTES, Page
from kvist.engine.card.device_model import DeviceModel
from kvist.engine.card.page_mover import PageMover
from kvist.engine.card.prefill import Prefill
from kvist.engine.card.weights import CardWeights

ROUNDS = 9
SUFFIX = 16
CHUNK = 1 << 20

Found = tuple[float, float, dict[str, float], str]


def measure_pages(weights: CardWeights, case: Case, said: Callable[[str], None]) -> Found:
    """Milliseconds that a context's pages take, those of a plain copy of as many bytes, other values, and what to report."""
    whole = replace(case, context=case.context + SUFFIX, suffix=SUFFIX)
    state = random_state(weights.config, whole, weights.embed.device)
    count = case.context // state.layout.page_tokens
    pages = state.rows.table[0, :count].tolist()
    host_PB = state.rows.bytes_PB[pages].cpu().pin_memory()
    mover = PageMover(state.rows)
    if case.place == "from disk":
        return _from_disk(mover, state.rows.bytes_PB, host_PB, pages)
    flat = torch.empty(host_PB.shape, dtype=torch.uint8, device=weights.embed.device)
    other_PB = torch.zeros_like(host_PB).pin_memory()
    if case.place == "to host memory":
        times = _rounds({"pages": lambda: mover.save(pages, other_PB), "copy": lambda: other_PB.copy_(flat)})
        mover.save(pages, other_PB)
        _require(other_PB, host_PB)
        return *_summary(times, host_PB.nbytes, {}), _text(times, host_PB.nbytes)
    prefill = Prefill(DeviceModel(weights, state))
    prompts, _ = hit_prompts(weights, replace(case, suffix=SUFFIX))
    again, logits_RV = prefill.captured(prompts)

    def first_token() -> None:
        mover.restore(host_PB, pages)
        again(prompts)
        logits_RV.argmax(1).tolist()

    times = _rounds({
        "pages": lambda: mover.restore(host_PB, pages), "copy": lambda: flat.copy_(host_PB, non_blocking=True),
        "replay": lambda: again(prompts), "first token": first_token,
    })  # fmt: skip
    state.rows.bytes_PB[pages] = 0
    mover.restore(host_PB, pages)
    torch.cuda.synchronize()
    _require(state.rows.bytes_PB[pages].cpu(), host_PB)
    peers = {"restored and first token": times["first token"], "replay alone": times["replay"]}
    text = _text(times, host_PB.nbytes) + (
        f"; first token {times['first token']:.2f} ms after the request, the replay alone takes {times['replay']:.2f}"
    )
    return *_summary(times, host_PB.nbytes, peers), text


def _summary(times: dict[str, float], nbytes: int, peers: dict[str, float]) -> tuple[float, float, dict[str, float]]:
    return times["pages"], times["copy"], peers


def _text(times: dict[str, float], nbytes: int) -> str:
    rates = {name: nbytes / times[name] / 1e6 for name in ("pages", "copy")}
    return (
        f"{nbytes / 1e6:.1f} MB in {times['pages']:.3f} ms, {rates['pages']:.1f} GB/s; a plain copy in the same run "
        f"{rates['copy']:.1f} GB/s ({100 * rates['pages'] / rates['copy']:.0f} % of it)"
    )


def _require(got_PB: Tensor, want_PB: Tensor) -> None:
    if not torch.equal(got_PB, want_PB):
        bad = int((got_PB != want_PB).any(1).sum())
        raise WrongResult(f"{bad} of {len(want_PB)} pages are not what they were")


def _rounds(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each variant by the host's clock, device work included, in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 1):
        for name, variant in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            variant()
            torch.cuda.synchronize()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(line) for name, line in times.items()}


def _from_disk(mover: PageMover, pool_PB: Tensor, host_PB: Tensor, pages: list[int]) -> Found:
    keys = [key(number) for number in range(len(pages))]
    with scratch() as folder:
        (folder / "store").mkdir()
        store = open_store(folder / "store", host_PB.shape[1])
        published = [Page(name, row.numpy().data.cast("B")) for name, row in zip(keys, host_PB, strict=True)]
        if sum(store.put(published[at : at + BATCH]) for at in range(0, len(keys), BATCH)) != len(keys):
            raise WrongResult(f"not all pages were stored: {store.counters}")
        store.flush()
        plain = folder / "plain"
        plain.write_bytes(host_PB.numpy().data)

        def restored() -> None:
            came = mover.restore_from(
                lambda first, stop, memory: store.read_into(keys[first:stop], memory), pages,
                record_bytes=store.geometry.slot_bytes, page_at=HEADER_BYTES,
            )  # fmt: skip
            if came != len(pages):
                raise WrongResult(f"not all pages came back: {store.counters}")

        times: dict[str, list[float]] = {"pages": [], "copy": []}
        for _ in range(ROUNDS):
            for name, work in (("pages", restored), ("copy", lambda: _read(plain))):
                drop_page_cache(folder / "store")
                drop_page_cache(folder)
                torch.cuda.synchronize()
                start = time.perf_counter()
                work()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - start))
        pool_PB[pages] = 0
        restored()
        torch.cuda.synchronize()
        _require(pool_PB[pages].cpu(), host_PB)
        store.close()
    medians = {name: statistics.median(line) for name, line in times.items()}
    return *_summary(medians, host_PB.nbytes, {}), _text(medians, host_PB.nbytes)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
