"""Window entries moved: the reference by hand, the kernel against it (on a GPU, or under Triton's interpreter)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kvist.kernels.window_rows import move_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = pytest.param("gpu", marks=pytest.mark.skipif(not RUNS, reason="needs Triton and a GPU, or TRITON_INTERPRET=1"))


def entries(count: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    codes, scales = (torch.randint(0, 256, (count, size), generator=source).to(torch.uint8) for size in (width, width // 32))
    return codes.to(DEVICE), scales.to(DEVICE)


@pytest.mark.parametrize("impl", ["ref", ON_GPU])
@pytest.mark.parametrize(("held", "room", "width", "count"), [(7, 12, 64, 5), (300, 200, 512, 150), (3, 9, 96, 9), (4, 4, 32, 0)])
def test_entries_go_where_they_should(held: int, room: int, width: int, count: int, impl: str) -> None:
    source, target = entries(held, width, 1), entries(room, width, 2)
    order = torch.Generator().manual_seed(3)
    from_K = torch.randint(-1, held, (count,), generator=order)
    to_K = torch.randperm(room, generator=order)[:count]
    want = [part.clone() for part in target]
    for part, values in zip(want, source, strict=True):
        for at, to in zip(from_K.tolist(), to_K.tolist(), strict=True):
            part[to] = values[at] if at >= 0 else 0
    move_rows(source, from_K.to(DEVICE), target, to_K.to(DEVICE), impl=impl)
    assert all(torch.equal(got, part) for got, part in zip(target, want, strict=True))


def test_refusals() -> None:
    places = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"entries of \(64, 2\) bytes into \(32, 1\)"):
        move_rows(entries(2, 64, 1), places, entries(2, 32, 1), places)
    with pytest.raises(ValueError, match="no impl 'cpu'"):
        move_rows(entries(2, 64, 1), places, entries(2, 64, 1), places, impl="cpu")
