"""Passes of few rows padded to one of few shapes, so that a graph captured for a shape serves every pass that fits in it.

Rows of the spare slot fill a pass up: each sees itself alone, and what they write falls where nobody looks. Pure arithmetic on
`passes.py`'s arrays. Must not know weights, kernels or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvist.engine.card.passes import NONE, Ints, Pass, Sizes

ROWS = (160, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of padded passes. Up to so many launching costs more than a card needs for its work (40 layers: 165 ms of a host)."""
RUNS = (1, 2, 4, 8)
"""Requests of padded passes."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A shape: rows of the encoder and the decoder half, requests."""

    rows: int
    deep: int
    runs: int


def spare_rows(runs: int) -> int:
    """Rows of the spare slot that a room of so many requests must have: groups of queries that are scored together are filled up
    by them."""
    return 2 + 2 * runs


def room_for(planned: Pass, sizes: Sizes) -> Room | None:
    """The smallest room of a pass; None for one of too many rows or requests, or of which nothing, or more than a row of each
    request, is wanted."""
    (rows, deep), wanted = planned.rows, len(planned.arrays["wanted"])
    runs = next((most for most in RUNS if most >= len(planned.pieces)), None)
    if runs is None or not 0 < wanted <= runs:
        return None
    spare = spare_rows(runs)
    usual = runs * (sizes.window + 8)
    held = [
        next((most for most in (*first, *ROWS) if most >= count + spare), None) for count, first in ((rows, ()), (deep, (usual,)))
    ]
    if held[0] is None or held[1] is None:
        return None
    return Room(rows=held[0], deep=held[1], runs=runs)


def padded(planned: Pass, room: Room, sizes: Sizes, spare: int) -> Pass:
    """The pass with rows of the slot `spare` behind its own in both halves; rows wanted are repeated up to `room.runs`."""
    arrays, (rows, deep) = dict(planned.arrays), planned.rows

    def fill(name: str, length: int, value: int) -> None:
        arrays[name] = _longer(arrays[name], length, value)

    fill("tokens", room.rows, 0)
    fill("offset", room.rows, 0)
    for name, each in (("before", sizes.back), ("newest", sizes.history)):
        if f"{name} slot" in arrays:
            for kind, value in (("slot", spare), ("cell", 0), ("id", 0)):
                fill(f"{name} {kind}", room.runs * each, value)
    cells = {
        "encoder": _fill_half("encoder", arrays, rows, room.rows, room.runs, sizes, spare),
        "decoder": _fill_half("decoder", arrays, deep, room.deep, room.runs, sizes, spare),
    }
    fill("deep", room.deep, rows)
    fill("wanted", room.runs, int(arrays["wanted"][0]))
    for ratio, ring in sizes.tails.items():
        name, groups = f"group {ratio}", len(arrays[f"group {ratio} slot"])
        most = room.rows // ratio + room.runs
        fill(f"{name} members", most, rows)
        fill(f"{name} slot", most, spare)
        fill(f"{name} position", most, 0)
        if ring:
            # Into the first member of a group of the spare slot, which is always there.
            fill(f"{name} early", room.runs * (ratio - 1), groups * ratio)
            fill(f"{name} early_cell", room.runs * (ratio - 1), spare * ring)
            fill(f"{name} keep", room.runs * ring, rows)
            fill(f"{name} keep_cell", room.runs * ring, spare * ring)
    return replace(planned, arrays=arrays, cells=cells)


def _fill_half(name: str, arrays: dict[str, Ints], rows: int, most: int, runs: int, sizes: Sizes, spare: int) -> int:
    """Fill a half of `rows` rows up to `most`; the cells of its window buffer."""
    before, more = sizes.window - 1, most - rows
    held = len(arrays[f"{name} carry_to"])
    own = rows + held + np.arange(more)
    empty = most + held + np.arange(runs * before - held)
    for kind, line in (
        ("position", np.zeros(more)), ("slot", np.full(more, spare)), ("first", own), ("stop", own + 1),
        ("carry_from", np.full(len(empty), NONE)), ("carry_to", empty),
    ):  # fmt: skip
        arrays[f"{name} {kind}"] = np.concatenate([arrays[f"{name} {kind}"], line.astype(np.int64)])
    for kind, value in (("keep_row", rows), ("keep_from", int(own[0])), ("keep_to", spare * sizes.ring)):
        arrays[f"{name} {kind}"] = _longer(arrays[f"{name} {kind}"], runs * sizes.window, value)
    together = arrays[f"{name} together"]
    parts = np.array_split(np.arange(rows, most), -(-most // sizes.together) + runs - len(together))
    lines = np.array([(part[0], len(part)) for part in parts], dtype=np.int64)
    arrays[f"{name} together"] = np.concatenate([together, lines])
    return most + runs * before


def _longer(array: Ints, length: int, value: int) -> Ints:
    """The array with `value` behind it, up to `length` rows."""
    more = length - len(array)
    assert more >= 0, f"{len(array)} numbers where a room holds {length}"
    return np.concatenate([array, np.full((more, *array.shape[1:]), value, dtype=np.int64)])
