"""A page that is intact and yet wrong: bytes that decode to NaN under a valid checksum (KVP-03)."""

from __future__ import annotations

from pathlib import Path

from kvist.cache.identity import page_key
from kvist.cache.record import Page
from kvist.engine.errors import NonFiniteLogits
from kvist.engine.request import Job, Request
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import judge
from tests.equivalence.test_engine_replay import prompt_of
from tests.equivalence.test_engine_restart import SIZE, start, stop


def test_a_page_that_fails_after_it_was_restored_is_not_tried_for_ever(tmp_path: Path) -> None:
    """KVP-03: the first try may fail, the second is computed cold; the page is gone from every tier."""
    prompt = prompt_of(45)
    first = start(tmp_path)
    job = Job(-1, Request(prompt=prompt), 0.0)
    first.engine.pages.enter(job)
    tiers, layout = first.engine.pages.tiers, first.engine.memory.layout
    assert job.chain is not None and tiers is not None
    for number, digest in enumerate(job.chain.digests):
        tiers.offer(Page(page_key(digest, 0), b"\x7f" * layout.page_bytes, SIZE, 0, job.chain.parent(number)))
    stop(first)
    second = start(tmp_path)
    ends = []
    for _ in range(2):
        number = second.add(Request(prompt=prompt, max_tokens=5, ignore_end=True))
        second.finish()
        ends.append(second.outcomes[number].end)
    assert ends[0] is not None and isinstance(ends[0].error, NonFiniteLogits)
    assert ends[1] is not None and ends[1].reason == "length"
    assert ends[1].usage.cached_tokens == 0
    assert second.engine.pages.tiers is not None and second.engine.pages.tiers.store is not None
    assert second.engine.pages.tiers.store.counters.corrupt == {"refuted": 11}
    judge(toy(0, True), second.outcomes[number])
    stop(second)
    third = start(tmp_path)
    number = third.add(Request(prompt=prompt, max_tokens=5, ignore_end=True))
    third.finish()
    judge(toy(0, True), third.outcomes[number])
    stop(third)
