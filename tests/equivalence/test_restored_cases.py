"""Pages from disk in awkward ways: a bad one amid a prefix, pages that land elsewhere, history without its reasoning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvist.cache.identity import page_key
from kvist.cache.page_file import HEAD_BYTES
from kvist.engine.request import Job, Request
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Watched, judge
from tests.equivalence.test_engine_replay import prompt_of
from tests.equivalence.test_engine_restart import SIZE, ask, start, stop

TRUNK = prompt_of(45)


def slots_of(watched: Watched, prompt: list[int]) -> list[int]:
    """Where the store keeps the whole pages of a prompt, in order."""
    job = Job(-1, Request(prompt=prompt), 0.0)
    watched.engine.pages.enter(job)
    tiers = watched.engine.pages.tiers
    assert job.chain is not None and tiers is not None and tiers.store is not None
    assert tiers.flush()
    keys = [page_key(digest, 0) for digest in job.chain.digests]
    entries = tiers.store._index.find_many(keys)
    return [entries[key].slot for key in keys]


@pytest.mark.parametrize("fault", ["flipped", "exchanged", "another tenant's"])
@pytest.mark.parametrize("number", [0, 5, 10])
def test_one_bad_page_amid_a_prefix(tmp_path: Path, fault: str, number: int) -> None:
    """The hit ends before it, to the page; the rest is computed; the reply is that of a cold run; the page mends itself."""
    first = start(tmp_path)
    ask(first, TRUNK)
    if fault == "another tenant's":
        foreign = first.add(Request(prompt=prompt_of(44, 3), max_tokens=1, salt=b"x", ignore_end=True))
        first.finish()
        assert first.outcomes[foreign].end is not None
    slots = slots_of(first, TRUNK)
    stop(first)
    path = next(tmp_path.rglob("pages.kv"))
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:20], "little")
    bad = HEAD_BYTES + slots[number] * size
    if fault == "flipped":
        data[bad + 200] ^= 8
    else:
        # Two pages of one prompt, or one of somebody else's, each whole and with its own proof.
        free = [slot for slot in range((len(data) - HEAD_BYTES) // size) if slot not in slots]
        other = slots[(number + 1) % 11] if fault == "exchanged" else free[0]
        at = HEAD_BYTES + other * size
        data[bad : bad + size], data[at : at + size] = data[at : at + size], data[bad : bad + size]
    path.write_bytes(bytes(data))
    lowest = min(number, (number + 1) % 11) if fault == "exchanged" else number
    hits = []
    for _ in range(2 if fault != "exchanged" else 3):  # the second bad page of a pair may be found a start later
        again = start(tmp_path)
        outcome = ask(again, TRUNK)
        hits.append(outcome.end.usage.cached.get("disk", 0))
        judge(toy(0, True), outcome)
        stop(again)
    assert hits[0] == lowest * SIZE
    assert hits[-1] == 44


def test_pages_that_land_in_another_order(tmp_path: Path) -> None:
    """PDX-03: page ids of the second engine are a random permutation; rows of every source by logical position are the same."""
    first = start(tmp_path)
    cold = ask(first, TRUNK)
    stop(first)
    second = start(tmp_path)
    random.Random(4).shuffle(second.engine.pages.pool._free)
    number = second.add(Request(prompt=TRUNK, max_tokens=6, ignore_end=True, sampling=cold.request.sampling))
    second.step()
    job = second.engine.jobs[number]
    assert job.pages != sorted(job.pages)
    session_rows = {}
    for engine in (second.engine, None):
        memory, slot = (engine.memory, job.slot) if engine is not None else _computed_cold()
        assert slot is not None
        for spec in memory.plan.kv_sources:
            count = 44 // spec.ratio
            held = memory.rows.main(spec.index, slot, torch.arange(count), torch.float32)
            keys = memory.rows.keys(spec.index, slot, count, torch.float32)
            known = session_rows.setdefault(spec.index, (held, keys))
            assert torch.equal(known[0], held)
            assert torch.equal(known[1], keys)
    second.finish()
    judge(toy(0, True), second.outcomes[number])
    stop(second)


def _computed_cold():  # type: ignore[no-untyped-def]
    """Memory and slot of an engine that has just read the trunk without any cache."""
    from kvist.engine.budget import EngineConfig
    from kvist.engine.engine import Engine

    made = Watched(Engine(toy(0, True), EngineConfig(pages=60, page_tokens=SIZE, replay="exact", speculation="off")))
    number = made.add(Request(prompt=TRUNK, max_tokens=9, ignore_end=True))
    while not made.outcomes[number].tokens:
        made.step()
    return made.engine.memory, made.engine.jobs[number].slot


def test_history_without_its_reasoning_is_found_after_a_restart(tmp_path: Path) -> None:
    """KVP-07: turn two says the reply of turn one without its reasoning; pages up to the parting come from disk."""
    question, reasoning, answer = prompt_of(22), prompt_of(30, 1), prompt_of(6, 2)
    first = start(tmp_path)
    ask(first, question)
    ask(first, question + reasoning + answer)
    stop(first)
    second = start(tmp_path)
    turn = ask(second, question + answer + prompt_of(9, 3))
    assert turn.end.usage.cached.get("disk", 0) == 20, "whole pages before the parting"
    judge(toy(0, True), turn)
    stop(second)
