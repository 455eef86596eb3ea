"""Places of new rows: by hand, and Triton's against torch's, behind pages and at positions where angles are large."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kvist.kernels.device import GpuUnavailable
from kvist.kernels.row_places import RowPlaces, row_places

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FREQ = torch.tensor([[1.0, 0.5, 0.01], [0.25, 0.125, 1e-6]], device=DEVICE)
TABLE = torch.tensor([[3, 1, -1], [0, 2, 4]], dtype=torch.int32, device=DEVICE)


def places(positions: list[int], slots: list[int], ratios: tuple[int, ...], impl: str, page_tokens: int = 8) -> RowPlaces:
    position_N, slot_N = (torch.tensor(part, device=DEVICE) for part in (positions, slots))
    return row_places(
        position_N, slot_N, TABLE, FREQ, ratios=ratios, window=5, cells=7, page_tokens=page_tokens, heads=3, impl=impl
    )


def test_by_hand() -> None:
    made = places([0, 11, 23, 24], [0, 1, 0, 1], (1, 2), "ref")
    assert made.span_N2.tolist() == [[0, 1], [7, 12], [19, 24], [20, 25]]
    assert made.cell_N.tolist() == [0, 4, 2, 3]
    # Position 23 of slot 0 has no page, position 24 lies behind the table; 0 and 24 end no group of two.
    assert made.groups[1].page_N.tolist() == [3, 2, -1, -1]
    assert made.groups[2].page_N.tolist() == [-1, 2, -1, -1]
    assert made.groups[2].row_N.tolist() == [0, 1, 3, 0]
    assert made.groups[2].visible_N.tolist() == [0, 6, 12, 12]
    torch.testing.assert_close(made.groups[2].rope[0][1], (10 * FREQ[1]).cos())
    torch.testing.assert_close(made.plain[1][3], (24 * FREQ[0]).sin())
    assert made.heads[0].shape == (12, 3)


@pytest.mark.skipif(not CAN_RUN, reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1")
@pytest.mark.parametrize("ratios", [(), (1,), (1, 2), (2, 4)], ids=str)
def test_gpu(ratios: tuple[int, ...]) -> None:
    size = 1 << 19
    positions, slots = [0, 1, 6, 7, 8, 23, 1048575, 3 * size - 1, 3 * size], [0, 1, 1, 1, 0, 0, 1, 1, 0]
    for page_tokens in (8, size):
        got, want = (places(positions, slots, ratios, impl, page_tokens) for impl in ("gpu", "ref"))
        for name in ("slot_N", "span_N2", "cell_N"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for ratio in ratios:
            mine, theirs = got.groups[ratio], want.groups[ratio]
            for a, b in zip(mine[:3], theirs[:3], strict=True):
                assert torch.equal(a, b)
            torch.testing.assert_close(mine.rope, theirs.rope, rtol=0, atol=1e-6)
        for name in ("plain", "yarn", "heads"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=1e-6)


def test_unknown_impl_and_no_gpu() -> None:
    with pytest.raises(ValueError, match="known: ref, gpu"):
        places([0], [0], (1,), "fast")
    if not CAN_RUN:
        with pytest.raises(GpuUnavailable):
            places([0], [0], (1,), "gpu")
