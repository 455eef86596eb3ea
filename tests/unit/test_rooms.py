"""Padded passes: one shape a room, their own rows as they were, and nothing outside the spare slot touched by the others."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.engine.card import rooms
from kvist.engine.card.passes import Pass, Piece, Prompt, Sizes, cut, plan_pass
from kvist.engine.card.rooms import Room, padded, room_for
from kvist.engine.replay import replay_span
from kvist.presets import preset

PLAN = preset("tiny").plan
SIZES = Sizes(window=PLAN.window, ring=PLAN.window + 3, tails={1: 0, 2: 5}, history=6, back=3, together=4)
SPARE = 9


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ROWS", (24, 40, 64, 128))


def planned(*prompts: tuple[int, int, int], chunk: int = 1000) -> Pass:
    """(slot, total, hit) of prompts that run together."""
    made = [
        Prompt.replayed(slot, np.arange(total, dtype=np.int64) + 100 * slot, replay_span(PLAN, total, hit, "bounded"))
        for slot, total, hit in prompts
    ]
    return plan_pass(next(cut(made, chunk)), SIZES)


HITS = [((0, 21, 16),), ((1, 30, 20),), ((2, 45, 36),), ((0, 9, 0),), ((3, 2, 0),), ((1, 14, 14),)]
TWO = [((0, 21, 16), (4, 30, 26)), ((1, 17, 8), (0, 3, 0)), ((5, 40, 38), (2, 11, 0))]
MANY = [tuple((slot, 20 + slot, 16) for slot in range(count)) for count in (3, 4)]


@pytest.mark.parametrize("group", [HITS, TWO, MANY], ids=["one", "two", "many"])
def test_passes_of_a_room_differ_in_numbers_alone(group: list[tuple[tuple[int, int, int], ...]]) -> None:
    made = [planned(*prompts) for prompts in group]
    found = [room_for(one, SIZES) for one in made]
    assert None not in found
    shapes: dict[Room, set[object]] = {}
    for one, room in zip(made, found, strict=True):
        assert room is not None
        fitted = padded(one, room, SIZES, SPARE)
        shapes.setdefault(room, set()).add((fitted.shape, tuple(fitted.cells.items())))
        assert fitted.rows == (room.rows, room.deep)
        assert list(fitted.arrays) == list(one.arrays), "the order in which they are packed"
    assert all(len(shape) == 1 for shape in shapes.values())
    assert len(shapes) < len(group)


@pytest.mark.parametrize("prompts", [*HITS, *TWO, *MANY])
def test_own_rows_stay_and_others_fall_into_the_spare_slot(prompts: tuple[tuple[int, int, int], ...]) -> None:
    one = planned(*prompts)
    room = room_for(one, SIZES)
    assert room is not None
    new, old = padded(one, room, SIZES, SPARE).arrays, one.arrays
    for name, array in old.items():
        assert np.array_equal(new[name][: len(array)], array), name
        assert new[name].dtype == np.int64
    for half, real in (("encoder", one.rows[0]), ("decoder", one.rows[1])):
        cells = one.cells[half]
        assert (new[f"{half} slot"][real:] == SPARE).all()
        assert not new[f"{half} position"][real:].any()
        first, stop = new[f"{half} first"], new[f"{half} stop"]
        assert (stop[real:] - first[real:] == 1).all(), "a row of the spare slot sees itself"
        total = padded(one, room, SIZES, SPARE).cells[half]
        written = np.concatenate([stop - 1, new[f"{half} carry_to"]])
        assert sorted(written.tolist()) == list(range(total)), "every cell of the buffer is written once"
        assert (new[f"{half} carry_from"][len(old[f"{half} carry_from"]) :] == -1).all()
        more = slice(len(old[f"{half} keep_to"]), None)
        assert (new[f"{half} keep_to"][more] // SIZES.ring == SPARE).all()
        assert (new[f"{half} keep_from"][more] >= cells).all()
        assert (new[f"{half} keep_row"][more] == real).all()
        groups = new[f"{half} together"]
        rows = [row for start, count in groups.tolist() for row in range(start, start + count)]
        assert rows == list(range(len(stop))), "groups hold every row once, in order"
        assert groups[:, 1].min() >= 1
        assert groups[:, 1].max() <= SIZES.together
        slots = new[f"{half} slot"]
        assert all(len(set(slots[start : start + count].tolist())) == 1 for start, count in groups.tolist())
    assert (new["deep"][one.rows[1] :] == one.rows[0]).all()
    assert set(new["wanted"].tolist()) == set(old["wanted"].tolist())
    for ratio, ring in SIZES.tails.items():
        count = len(old[f"group {ratio} slot"])
        assert len(new[f"group {ratio} slot"]) > count
        assert (new[f"group {ratio} slot"][count:] == SPARE).all()
        assert (new[f"group {ratio} members"][count:] == one.rows[0]).all()
        early = new[f"group {ratio} early"][len(old[f"group {ratio} early"]) :]
        assert (early >= count * ratio).all(), "no member of a request's group is replaced"
        for kind in ("early_cell", "keep_cell"):
            more = slice(len(old[f"group {ratio} {kind}"]), None)
            assert ring == 0 or (new[f"group {ratio} {kind}"][more] // ring == SPARE).all()
    for name in ("before", "newest"):
        assert (new[f"{name} slot"][len(old[f"{name} slot"]) :] == SPARE).all()


def test_passes_that_no_room_takes() -> None:
    assert room_for(planned((0, 500, 0)), SIZES) is None, "too many rows"
    assert room_for(planned(*((slot, 5, 0) for slot in range(9))), SIZES) is None, "too many requests"
    assert room_for(planned((0, 60, 0), chunk=20), SIZES) is None, "a prompt's begin wants no logits"
    scored = planned((0, 9, 0))
    scored.arrays["wanted"] = np.arange(3)
    assert room_for(scored, SIZES) is None, "more than a row of a request is wanted"
    assert room_for(plan_pass([Piece(prompt=one, start=0, stop=9) for one in [_plain(0)]], SIZES), SIZES) is not None


def _plain(slot: int) -> Prompt:
    return Prompt.replayed(slot, np.arange(9, dtype=np.int64), replay_span(PLAN, 9, 0, "bounded"))
