"""Prefill, replay and resuming on a card beside the reference model: chunks that end inside groups, pages and windows, hits of
several requests in one pass, decode behind all of them.

Runs on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1); elsewhere it skips and says so.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from kvist.engine.card.check import Step
    from kvist.engine.card.check_prefill import PrefillBeside, Prefilled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def small(contexts: tuple[int, ...], chunk: int, steps: int = 1) -> PrefillBeside:
    from kvist.engine.card.check import small_config
    from kvist.engine.card.check_prefill import PrefillBeside

    return PrefillBeside(small_config(), contexts, steps, chunk=chunk, page_tokens=8, device=DEVICE)


def within(found: list[Prefilled], steps: list[Step]) -> None:
    """`Prefilled.faults` says why these bounds; steps are judged as in `test_card_decode.py`, one row of a request each."""
    for one in found:
        print(one)
    layers = [off for step in steps for off in step.layers]
    print("steps", [(round(max(step.layers), 4), round(max(step.errors), 4)) for step in steps])
    assert not [one.faults() for one in found if one.faults()]
    assert statistics.median(layers) < 0.03


@pytest.mark.parametrize(("contexts", "chunk"), [((29,), 64), ((29,), 7), ((13, 6, 21), 11)], ids=str)
def test_prefill_then_decode(contexts: tuple[int, ...], chunk: int) -> None:
    both = small(contexts, chunk, steps=2)
    within([both.compare(both.cold(contexts))], both.run())


@pytest.mark.parametrize(("totals", "hits", "chunk"), [((21, 27), (16, 24), 64), ((32, 17), (32, 4), 9)], ids=str)
def test_hits_without_windows_are_replayed_together(totals: tuple[int, ...], hits: tuple[int, ...], chunk: int) -> None:
    both = small(totals, chunk)
    within([both.compare(both.cold(hits)), both.compare(both.hits(totals, hits))], both.run())


@pytest.mark.parametrize(("totals", "hits"), [((19, 30), (16, 12)), ((33, 18), (32, 4))], ids=str)
def test_requests_are_resumed_with_their_windows(totals: tuple[int, ...], hits: tuple[int, ...]) -> None:
    both = small(totals, 64)
    within([both.compare(both.cold(hits)), both.compare(both.resumed(totals, hits))], both.run())


def test_refusals() -> None:
    from kvist.engine.card.passes import Prompt
    from kvist.engine.card.prefill import Prefill
    from kvist.engine.replay import replay_span

    both = small((9,), 64, steps=0)
    with pytest.raises(ValueError, match="chunk is 0"):
        Prefill(both.card, chunk=0)

    def prompt(slot: int, ids: list[int], total: int) -> Prompt:
        return Prompt.replayed(slot, np.array(ids), replay_span(both.config.plan, total, 0, "bounded"))

    for prompts, reason in (
        ([], "a prompt needs one of its own"),
        ([prompt(0, [5] * 9, 9), prompt(0, [5] * 9, 9)], "slots .0, 0."),
        ([prompt(1, [5] * 9, 9)], "slot 1 is outside 0..0"),
        ([prompt(0, [5] * 8, 9)], "8 ids for a prompt of 9"),
        ([prompt(0, [5] * 8 + [256], 9)], "token id 256 is outside"),
        ([prompt(0, [5] * 17, 17)], "hold 16 tokens, 17 are needed"),
    ):
        with pytest.raises(ValueError, match=reason):
            both.prefill.run(prompts)


@pytest.mark.skipif(INTERPRETED, reason="released head widths are too much for the interpreter; needs a GPU")
@pytest.mark.parametrize(("contexts", "chunk"), [((700,), 4096), ((700,), 300), ((400, 131, 260), 512)], ids=str)
def test_released_heads(contexts: tuple[int, ...], chunk: int) -> None:
    """The kernels of released widths, among them those for many queries; then hits, then resuming."""
    from kvist.engine.card.check import released_heads_config
    from kvist.engine.card.check_prefill import PrefillBeside

    both = PrefillBeside(released_heads_config(), contexts, 1, chunk=chunk, page_tokens=None, device=DEVICE)
    hits = tuple(context // 2 // 2 * 2 for context in contexts)
    found = [both.compare(both.cold(hits)), both.compare(both.resumed(contexts, hits))]
    within([*found, both.compare(both.hits(contexts, hits))], both.run())


def test_rows_that_nobody_asks_for_leave_the_same_windows() -> None:
    """In the last layer only rows whose logits are wanted go on: all others leave the bits that they left before."""
    from kvist.engine.card.passes import cut, plan_pass

    totals, hits = (21, 27), (16, 24)
    both = small(totals, 64)
    both.compare(both.cold(hits))
    planned = plan_pass(next(cut(both.hits(totals, hits), 64)), both.prefill.bringer.sizes)
    ends, found = planned.arrays["wanted"], []
    assert planned.rows[1] > len(ends)
    for wanted in (np.arange(planned.rows[1]), ends, ends[:0]):
        planned.arrays["wanted"] = wanted
        state, bringer = both.state, both.prefill.bringer
        with torch.inference_mode():
            state.codes.fill_(7)
            logits_WV = both.prefill.compute(bringer.derive(planned, bringer.send(planned)))
        parts = state.codes, state.scales, state.rows.bytes_PB, state.history, *state.tails.values()
        found.append((logits_WV, [part.clone() for part in parts]))
    (all_MV, kept), *others = found
    for _, left in others:
        assert all(torch.equal(a, b) for a, b in zip(left, kept, strict=True))
    (ends_WV, _), (none_WV, _) = others
    off_W = (ends_WV - all_MV[torch.from_numpy(ends).to(DEVICE)]).norm(dim=1) / ends_WV.norm(dim=1)
    assert off_W.max() < 0.05, off_W  # few rows are multiplied in other tiles
    assert len(none_WV) == 0


@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a GPU")
def test_a_captured_pass_says_what_plain_ones_say() -> None:
    totals, hits = (21, 27), (16, 24)
    both = small(totals, 64)
    both.compare(both.cold(hits))
    prompts = both.hits(totals, hits)
    want_RV, _ = both.prefill.run(prompts)
    again, got_RV = both.prefill.captured(prompts)
    with torch.inference_mode():
        got_RV.zero_()
    again(prompts)
    assert torch.equal(got_RV, want_RV)
    with pytest.raises(ValueError, match="another pass"):
        again(prompts[:1])


@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("way", ["kept", "one at a time", "not captured"])
def test_small_passes_say_the_same_launched_captured_and_replayed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other lengths share a room's graph; each is near the pass without padding, as a row among others may be."""
    from kvist.engine.card import small_passes
    from kvist.engine.card.passes import cut, plan_pass
    from kvist.engine.card.rooms import room_for
    from kvist.engine.card.small_passes import SmallPasses, WatchedPrefill

    totals, hits = (21, 27), (16, 24)
    both = small(totals, 64)
    both.compare(both.cold(hits))
    sizes = both.prefill.bringer.sizes
    ways = [both.hits(totals, hits), both.hits(totals, hits)[:1], both.hits(totals, hits)[1:]]
    plans = [plan_pass(next(cut(prompts, 64)), sizes) for prompts in ways]
    rooms = [room_for(planned, sizes) for planned in plans]
    assert None not in rooms
    assert rooms[1] == rooms[2] != rooms[0]

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no memory for a graph")

    if way == "one at a time":
        monkeypatch.setattr(small_passes, "MOST_GRAPHS", 1)
    if way == "not captured":
        monkeypatch.setattr(torch.cuda, "graph", refuse)
    passes, said = SmallPasses(WatchedPrefill(both.card)), []
    run = passes.run
    for _ in range(3):
        said.append([run(planned) for planned in plans])
    for number, prompts in enumerate(ways):
        want_RV, _ = both.prefill.run(prompts)
        for logits_RV, finite_N in (line[number] for line in said):
            assert torch.equal(logits_RV, said[0][number][0])
            assert len(finite_N) == plans[number].rows[0]
            assert finite_N.all()
        off_R = (said[0][number][0] - want_RV).norm(dim=1) / want_RV.norm(dim=1)
        assert off_R.max() < 0.5, off_R
    assert len(passes._graphs) == {"kept": 2, "one at a time": 1, "not captured": 0}[way]
