"""Indices of passes against a plain simulation: rings, tails, groups and windows kept token by token. No GPU, no kernels."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.engine.card.passes import Pass, Piece, Prompt, Sizes, cut, plan_pass
from kvist.engine.replay import replay_span
from kvist.presets import preset

PLAN = preset("tiny").plan
SIZES = Sizes(window=PLAN.window, ring=PLAN.window + 3, tails={1: 0, 2: 5}, history=6, back=3, together=4)
SLOTS = 4


def prompt(slot: int, total: int, hit: int = 0) -> Prompt:
    ids = np.arange(total, dtype=np.int64) + 1000 * (slot + 1)
    return Prompt.replayed(slot, ids, replay_span(PLAN, total, hit, "bounded"))


def passes(prompts: list[Prompt], chunk: int) -> list[Pass]:
    return [plan_pass(pieces, SIZES) for pieces in cut(prompts, chunk)]


@pytest.mark.parametrize("chunk", [1, 3, 8, 64, 1000])
def test_passes_hold_every_row_once_in_order(chunk: int) -> None:
    prompts = [prompt(0, 37), prompt(2, 5), prompt(1, 64, 20)]
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    deep: dict[int, list[int]] = {0: [], 1: [], 2: []}
    finished = []
    for one in passes(prompts, chunk):
        assert one.rows[0] <= chunk
        slots, positions = one.arrays["encoder slot"], one.arrays["encoder position"]
        for slot, position, token in zip(slots, positions, one.arrays["tokens"], strict=True):
            assert token == 1000 * (slot + 1) + position
            seen[int(slot)].append(int(position))
        for row, slot, position in zip(
            one.arrays["deep"], one.arrays["decoder slot"], one.arrays["decoder position"], strict=True
        ):
            assert (slots[row], positions[row]) == (slot, position)
            deep[int(slot)].append(int(position))
        for row, ended in zip(one.arrays["wanted"], one.finished, strict=True):
            assert one.arrays["decoder position"][row] == ended.span.total - 1
            assert one.arrays["decoder slot"][row] == ended.slot
            finished.append(ended.slot)
    for one in prompts:
        assert seen[one.slot] == list(range(one.span.start, one.span.total))
        assert deep[one.slot] == list(range(one.span.decode_from, one.span.total))
    assert sorted(finished) == [0, 1, 2]


@pytest.mark.parametrize("chunk", [2, 7, 500])
@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_windows_are_the_last_entries_before_each_row(half: str, chunk: int) -> None:
    """A buffer and rings of (slot, position) marks, moved as the indices say: every span holds exactly a query's window."""
    rings = np.full((SLOTS * SIZES.ring, 2), -1)
    for one in passes([prompt(3, 41), prompt(0, 30, 24)], chunk):
        arrays = {name: array for name, array in one.arrays.items() if name.startswith(half)}
        position, slot = arrays[f"{half} position"], arrays[f"{half} slot"]
        buffer = np.full((one.cells[half], 2), -1)
        source = arrays[f"{half} carry_from"]
        buffer[arrays[f"{half} carry_to"]] = np.where(source[:, None] >= 0, rings[source], -2)
        buffer[arrays[f"{half} stop"] - 1] = np.stack([slot, position], 1)
        for row in range(len(position)):
            begin = 24 - PLAN.window if slot[row] == 0 else 0
            if half == "decoder":
                begin = (30 if slot[row] == 0 else 41) - PLAN.window
            held = buffer[arrays[f"{half} first"][row] : arrays[f"{half} stop"][row]]
            want = range(max(begin, position[row] - PLAN.window + 1), position[row] + 1)
            assert held.tolist() == [[slot[row], at] for at in want]
        kept = arrays[f"{half} keep_row"]
        assert (buffer[arrays[f"{half} keep_from"]] == np.stack([slot[kept], position[kept]], 1)).all()
        rings[arrays[f"{half} keep_to"]] = buffer[arrays[f"{half} keep_from"]]
    for slot, total in ((3, 41), (0, 30)):
        for position in range(total - PLAN.window, total):
            assert rings[slot * SIZES.ring + position % SIZES.ring].tolist() == [slot, position]


@pytest.mark.parametrize("chunk", [1, 5, 200])
def test_groups_end_once_and_hold_their_tokens(chunk: int) -> None:
    tail = np.full((SLOTS * SIZES.tails[2], 2), -1)
    ended = []
    for one in passes([prompt(1, 23), prompt(2, 34, 28)], chunk):
        group = {name.removeprefix("group 2 "): array for name, array in one.arrays.items() if name.startswith("group 2 ")}
        rows = np.stack([one.arrays["encoder slot"], one.arrays["encoder position"]], 1)
        members = rows[group["members"]]
        members.reshape(-1, 2)[group["early"]] = tail[group["early_cell"]]
        for slot, position, pair in zip(group["slot"], group["position"], members, strict=True):
            assert pair.tolist() == [[slot, position], [slot, position + 1]]
            ended.append((int(slot), int(position)))
        tail[group["keep_cell"]] = rows[group["keep"]]
        alone = one.arrays["group 1 members"]
        assert (rows[alone[:, 0], 1] == one.arrays["group 1 position"]).all()
    # replayed rows of the hit end no group again
    assert ended == [*((1, at) for at in range(0, 22, 2)), *((2, at) for at in range(28, 34, 2))]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_history_holds_what_an_n_gram_looks_back_at(chunk: int) -> None:
    history = np.full((SLOTS, SIZES.history), -1)
    for one in passes([prompt(0, 12), prompt(2, 30, 20)], chunk):
        history[one.arrays["before slot"], one.arrays["before cell"]] = one.arrays["before id"]
        slots, positions, offsets = (one.arrays[name] for name in ("encoder slot", "encoder position", "offset"))
        for slot, position, offset in zip(slots, positions, offsets, strict=True):
            for back in range(int(offset) + 1, SIZES.back + 1):
                if position - back >= 0:
                    assert history[slot, (position - back) % SIZES.history] == 1000 * (slot + 1) + position - back
        history[one.arrays["newest slot"], one.arrays["newest cell"]] = one.arrays["newest id"]
    for slot, total in ((0, 12), (2, 30)):
        assert all(history[slot, at % 6] == 1000 * (slot + 1) + at for at in range(total - SIZES.back, total))


@pytest.mark.parametrize(("total", "hit", "deep", "held"), [(40, 38, 38, 30), (40, 20, 32, 32), (9, 6, 6, 0)])
def test_resumed_prompts_see_the_rings_they_have(total: int, hit: int, deep: int, held: int) -> None:
    """The decoder's stored window serves only rows that follow it without a gap."""
    assert PLAN.window == 8
    one = Prompt.resumed(0, np.arange(total), hit, PLAN.window)
    assert (one.span.start, one.span.decode_from, one.decoder_from) == (hit, deep, held)
    (planned,) = passes([one], 64)
    carried = planned.arrays["encoder carry_from"]
    assert carried.tolist() == [at % SIZES.ring if at >= 0 else -1 for at in range(hit - 7, hit)]
    assert planned.arrays["decoder carry_from"].tolist() == (carried.tolist() if deep == hit else [-1] * 7)


def test_queries_that_share_keys_are_of_one_request() -> None:
    (planned,) = passes([prompt(0, 9), prompt(1, 6)], 64)
    assert planned.arrays["encoder together"].tolist() == [[0, 4], [4, 4], [8, 1], [9, 4], [13, 2]]
    assert planned.reach == 9


def test_passes_of_one_shape_differ_in_numbers_alone() -> None:
    (a,), (b,), (c,) = (passes([prompt(slot, total, 16)], 64) for slot, total in ((0, 26), (3, 26), (0, 27)))
    assert a.shape == b.shape != c.shape
    assert len(a.packed()) == sum(int(np.prod(shape)) for _, shape in a.shape)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="repeat"):
        plan_pass([Piece(prompt=prompt(1, 4), start=0, stop=2), Piece(prompt=prompt(1, 4), start=2, stop=4)], SIZES)
    with pytest.raises(ValueError, match="4 ids for rows up to 5"):
        plan_pass([Piece(prompt=prompt(1, 4), start=0, stop=5)], SIZES)
