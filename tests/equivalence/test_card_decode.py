"""Steps on a card beside the reference model: all layer roles, ragged batches, steps that end groups and begin pages, and runs
of several rows a request whose last ones are taken back.

Runs on a GPU with graphs, or anywhere under Triton's interpreter (TRITON_INTERPRET=1) without; elsewhere it skips and says so.

Bounds. Given the reference's own inputs, a layer's change of the streams is off by what sums in another order and the roundings
behind them make of it: the median is held to 0.03 and the worst to 0.2. Logits carry eight layers of such falls and are held to
0.5, on rows that can be judged: where the reference itself moves by 0.2 or more when its sums are float32 (or, at the released
heads, when its layers are off by the 0.03 that a layer may be), a choice of experts or rows is a near-tie. Random weights make
many of them.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kvist.engine.card.check import Beside, Step

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NEAR_TIE = 0.2
# Contexts, steps and rows a step: groups of 2 and pages of 8 begin and end inside, and inside a run.
CASES = [((13,), 4, 1), ((13, 6, 31), 3, 1), ((13, 6), 2, 3)]


@pytest.mark.parametrize(("contexts", "steps", "rows"), CASES, ids=str)
def test_small_widths(contexts: tuple[int, ...], steps: int, rows: int) -> None:
    from kvist.engine.card.check import Beside, small_config

    within(Beside(small_config(), contexts, steps, rows=rows, page_tokens=8, device=DEVICE), 0.0)


@pytest.mark.skipif(INTERPRETED, reason="released head widths are too much for the interpreter; needs a GPU")
@pytest.mark.parametrize(
    ("contexts", "steps", "rows"), [((255,), 4, 1), ((130, 383, 60), 4, 1), ((255,), 3, 6), ((130, 383, 60), 3, 4)], ids=str
)
def test_released_heads(contexts: tuple[int, ...], steps: int, rows: int) -> None:
    """The kernels of released widths (attention and selection in CUDA C++ on Hopper)."""
    from kvist.engine.card.check import Beside, released_heads_config

    within(Beside(released_heads_config(), contexts, steps, rows=rows, page_tokens=None, device=DEVICE), 0.03)


def test_rows_that_are_taken_back_leave_no_trace() -> None:
    """Drafts that are rejected, in groups, pages and rings, against runs that never had them: the same bits from then on."""
    from kvist.engine.card.check import Beside, small_config
    from kvist.engine.card.device_model import Batch

    said = []
    for drafted in (False, True):
        both = Beside(small_config(), (13, 6), 2, rows=3, page_tokens=8, device=DEVICE)
        own = [both.ids[slot][context : context + 6].tolist() for slot, context in enumerate(both.contexts)]
        # One request keeps one row, the other two; what is taken back ended a group of the first, and of a page of the second.
        if drafted:
            tokens = (own[0][0], 99, 77, *own[1][:2], 55)
            first, _ = both.card.decode(Batch(tokens=tokens, positions=(13, 6), slots=(0, 1), lengths=(3, 3)))
            first = first[[0, 3, 4]]
        else:
            tokens = (own[0][0], *own[1][:2])
            first, _ = both.card.decode(Batch(tokens=tokens, positions=(13, 6), slots=(0, 1), lengths=(1, 2)))
        first = first.clone()
        tokens = (*own[0][1:4], *own[1][2:5])
        then, _ = both.card.decode(Batch(tokens=tokens, positions=(14, 8), slots=(0, 1), lengths=(3, 3)))
        said.append((first, then.clone()))
    for plain, drafted_NV in zip(*said, strict=True):
        assert torch.isfinite(plain).all()
        torch.testing.assert_close(drafted_NV, plain, rtol=0, atol=0)


def within(both: Beside, nudge: float) -> None:
    spreads: list[tuple[float, ...]] = []
    steps: list[Step] = []
    for number in range(both.steps):
        spreads.append(both.spread(number, nudge))
        steps.append(both.step(number))
    spread = [own for line in spreads for own in line]
    layers = [off for step in steps for off in step.layers]
    errors = [off for step in steps for off in step.errors]
    agree = [same for step in steps for same in step.agree]
    judged = [off for step, own in zip(steps, spreads, strict=True) for off in step.judged(own, NEAR_TIE)]
    worst = max(judged, default=0.0)
    print(
        f"layers off by {statistics.median(layers):.4f} (median), {max(layers):.4f} (worst); logits {worst:.4f} (worst of "
        f"{len(judged)} of {len(errors)}; the reference itself {max(spread):.4f}); {sum(agree)} of {len(agree)} best ids agree"
    )
    print(
        "logits by row, and the reference's own",
        [(round(off, 3), round(own, 3)) for off, own in zip(errors, spread, strict=True)],
    )
    print("swayed by the card's layers, and off from there", [
        (round(a, 3), round(b, 3)) for step in steps for a, b in zip(step.swayed, step.followed, strict=True)
    ])  # fmt: skip
    print("by layer", [round(max(step.layers[i] for step in steps), 4) for i in range(len(steps[0].layers))])
    assert statistics.median(layers) < 0.03
    assert max(layers) < 0.2
    assert worst < 0.5, [(step.errors, own, step.swayed, step.followed) for step, own in zip(steps, spreads, strict=True)]
    follow = [off < 0.5 for step in steps for off in step.followed]
    assert sum(follow) >= 0.9 * len(follow)


@pytest.mark.skipif(INTERPRETED, reason="streams are a GPU's")
def test_the_shared_expert_beside_the_routed_ones() -> None:
    from kvist.engine.card.check import Beside, small_config

    plain, overlapped = (
        Beside(small_config(), (13, 6), 2, rows=3, page_tokens=8, device=DEVICE, overlap=overlap).run()
        for overlap in (False, True)
    )
    assert plain == overlapped


@pytest.mark.skipif(INTERPRETED, reason="released head widths are too much for the interpreter; needs a GPU")
def test_a_rows_keys_beside_its_queries() -> None:
    from kvist.engine.card.check import Beside, released_heads_config

    plain, beside = (
        Beside(released_heads_config(), (255,), 3, page_tokens=None, device=DEVICE, overlap=overlap).run()
        for overlap in (False, True)
    )
    assert plain == beside


@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a GPU")
def test_a_loop_of_replays_says_what_single_steps_say() -> None:
    """Eight tokens by replays alone, the best id fed back on the device, against eight steps fed by the host."""
    from kvist.engine.card.check import Beside, small_config
    from kvist.engine.card.device_model import Batch

    said = []
    for replayed in (False, True):
        both = Beside(small_config(), (13,), 9, page_tokens=8, device=DEVICE)
        token, tokens = int(both.ids[0][13]), []
        held = both.card.buffers(1)
        batch = Batch(tokens=(token,), positions=(13,), slots=(0,))
        held.fill(batch, both.state.spare)
        again = both.card.runner(held, 22, advance=True)
        for step in range(8):
            if replayed:
                again()
                tokens.append(int(held.best_M[0]))
            else:
                _, best = both.card.decode(Batch(tokens=(token,), positions=(13 + step,), slots=(0,)))
                token = int(best[0])
                tokens.append(token)
        said.append(tokens)
    assert said[0] == said[1]


@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a GPU")
@pytest.mark.parametrize(("contexts", "rows"), [((130, 383, 60), 1), ((130, 383, 60), 4), ((255,), 1)], ids=str)
def test_a_graph_gives_the_bits_of_its_launches(contexts: tuple[int, ...], rows: int) -> None:
    """A replay, twice, against the same step launched one by one: nothing in it depends on what runs beside what."""
    from kvist.engine.card.check import Beside, released_heads_config

    both = Beside(released_heads_config(), contexts, 2, rows=rows, page_tokens=None, device=DEVICE)
    for number in range(2):
        batch = both.batch(number)
        first, again = (both.card.decode(batch)[0].clone() for _ in range(2))
        both.card.graphs = False
        launched = both.card.decode(batch)[0].clone()
        both.card.graphs = True
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        torch.testing.assert_close(launched, first, rtol=0, atol=0)


@pytest.mark.parametrize("contexts", [(13,), (13, 6)], ids=str)
def test_drafts(contexts: tuple[int, ...]) -> None:
    """A block of drafts, its heads and its tokens, with windows that the reference has filled."""
    from kvist.engine.card.check import Beside, drafting_config

    drafted = Beside(drafting_config(), contexts, 1, page_tokens=8, device=DEVICE).draft(0)
    assert max(drafted.errors) < 0.2
    assert drafted.tokens == drafted.follow
    assert drafted.confidence < 0.2 * drafted.scale


def test_speculation_counts_what_it_accepts() -> None:
    """Cycles of drafting and plain steps: positions, and the drafts that were right by the model's own best ids."""
    from kvist.engine.card.check import Beside, drafting_config
    from kvist.engine.card.speculate import Luck, Speculation
    from kvist.engine.speculation import FixedPolicy

    both = Beside(drafting_config(), (13, 6), 3, rows=6, page_tokens=8, device=DEVICE)
    luck = Luck((1.0, 0.0, 1.0, 1.0, 1.0), DEVICE)
    loop = Speculation(both.card, FixedPolicy(3), 2, reach=24, luck=luck)
    loop.begin([5, 7], [13, 6], [0, 1], filled=True)
    drafted = loop.cycle()
    assert (drafted.tokens, drafted.rows, loop.positions) == (4, 8, [15, 8]), "the first draft is right, the second is not"
    loop.policy = FixedPolicy(0)
    assert (loop.cycle().tokens, loop.positions) == (2, [16, 9])
    loop.luck, loop.policy = None, FixedPolicy(1)
    newest = loop.heads_4R[0].clone()
    cycle = loop.cycle()
    held = both.card.buffers(2, 2)
    best_RL, tokens_RL = held.best_M.view(2, 2), held.tokens_M.view(2, 2)
    right_R = best_RL[:, 0] == tokens_RL[:, 1]
    assert torch.equal(tokens_RL[:, 0], newest)
    assert torch.equal(tokens_RL[:, 1], loop.tokens_RB[:, 0])
    assert torch.equal(loop.accepted_R, right_R.long())
    assert cycle.tokens == 2 + int(right_R.sum())
    assert torch.equal(loop.heads_4R[0], torch.where(right_R, best_RL[:, 1], best_RL[:, 0]))
    assert loop.heads_4R[1].tolist() == loop.positions


def test_refusals() -> None:
    from kvist.engine.card.check import Beside, small_config
    from kvist.engine.card.device_model import Batch, BatchTooLarge, RunTooLong

    both = Beside(small_config(), (3,), 2, page_tokens=8, device=DEVICE)
    with pytest.raises(BatchTooLarge, match="65 requests"):
        both.card.buffers(65)
    with pytest.raises(RunTooLong, match="2 rows"):
        both.card.decode(Batch(tokens=(5, 5), positions=(3,), slots=(0,), lengths=(2,)))
    with pytest.raises(ValueError, match="runs of"):
        both.card.decode(Batch(tokens=(5, 5), positions=(3,), slots=(0,), lengths=(1,)))
    with pytest.raises(ValueError, match="slot 1 is outside"):
        both.card.decode(Batch(tokens=(5,), positions=(3,), slots=(1,)))
    with pytest.raises(ValueError, match="token id 256"):
        both.card.decode(Batch(tokens=(256,), positions=(3,), slots=(0,)))
    with pytest.raises(ValueError, match="hold 8 tokens"):
        both.card.decode(Batch(tokens=(5,), positions=(8,), slots=(0,)))
    with pytest.raises(ValueError, match="repeat"):
        both.card.decode(Batch(tokens=(5, 5), positions=(3, 3), slots=(0, 0)))
