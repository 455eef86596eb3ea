"""How GPU launches are cut, without a GPU: parts divide the work, stay within the room, and beat one part where that is slow."""

from __future__ import annotations

import pytest
import torch

from kvist.kernels.device.arrivals import MOST_PARTS, parts_for
from kvist.kernels.hyper_connections.hopper import ROOM, ROWS, STEP, form_of, parts_of
from kvist.kernels.sparse_attention.hopper import MOST_SHARES, MOST_TILES, cut_of

CPU = torch.device("cpu")  # counted as an H200: 132 multiprocessors


@pytest.mark.parametrize("programs", [1, 14, 40, 64, 216, 256, 4000])
@pytest.mark.parametrize("steps", [1, 18, 20, 40, 64, 96, 128, 131])
def test_parts_are_equal_and_have_room(programs: int, steps: int) -> None:
    part = parts_for(programs, steps, 792, CPU)
    assert steps % part == 0
    assert part == 1 or programs * part <= 792
    assert part <= MOST_PARTS


def test_few_programs_are_cut_and_full_waves_are_not() -> None:
    """40 programs of 128 steps (5120 x 8192) leave most multiprocessors idle; 256 of 20 fill two waves as they are."""
    assert parts_for(40, 128, 792, CPU) == 16
    assert parts_for(256, 20, 792, CPU) == 1
    assert parts_for(40, 128, 0, CPU) == 1


@pytest.mark.parametrize("width", [64, 192, 256, 5120])
@pytest.mark.parametrize("rows", [2, 16, 17, 64, 300, 4096, 100000])
def test_parts_of_streams_cover_all_channels_once(rows: int, width: int) -> None:
    parts, columns, tiles = parts_of(rows, width, 132), form_of(rows, width).columns, -(-rows // ROWS)
    assert parts % columns == 0
    assert (width // STEP) % parts == 0
    assert tiles * parts <= max(ROOM * 132, tiles * columns)


@pytest.mark.parametrize("tiles", [1, 2, 10, 11, 80])
@pytest.mark.parametrize("items", [1, 6, 16, 64, 384])
def test_shares_of_attention_hold_their_tiles(items: int, tiles: int) -> None:
    shares, parts = cut_of(items, tiles, 132)
    assert -(-tiles // shares) <= MOST_TILES
    assert 1 <= shares <= min(MOST_SHARES, tiles)
    assert 512 % parts == 0


def test_attention_is_cut_as_far_as_the_card_has_room() -> None:
    """Ten tiles: one query fills it with shares and parts, 64 queries with two blocks each, more queries are not cut."""
    shares, parts = cut_of(1, 10, 132)
    assert 20 <= shares * parts <= 132
    assert cut_of(64, 10, 132) == (2, 1)
    assert cut_of(384, 10, 132) == (1, 1)
