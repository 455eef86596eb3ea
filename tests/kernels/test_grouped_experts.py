"""Experts of many rows in CUDA C++, run on a processor: rows laid by expert, tiles, expanded operands, hidden rows, outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvist.kernels.device import pack_fp4_panels, stack_panels, unpack_panels
from kvist.kernels.experts import ResidentBank, experts
from kvist.kernels.experts import grouped as module
from kvist.kernels.experts.gpu_bank import GpuBank
from kvist.kernels.experts.grouped import WIDTHS, lay, run_grouped, width_for
from kvist.kernels.hyper_connections.row import STREAM_SOURCE
from kvist.quant import quantise_fp4_weight
from tests.kernels.cuda_on_cpu import OnCpu, build

WIDTH = 32


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.device, int], dict[str, OnCpu]]:
    @functools.cache
    def made(width: int) -> dict[str, OnCpu]:
        products = module.threads_of(width)
        threads = {"count": 1024, "place": 1024, "gather": 256, "gate_up": products, "down": products}
        folder: Path = tmp_path_factory.mktemp(f"grouped{width}")
        given = folder / "width.cuh"
        given.write_text(f"static const int WIDTH = {width};\n")
        return build((STREAM_SOURCE, given, Path(str(module.__file__)).with_name("grouped.cu")), threads, folder)

    return lambda device, width: made(width)


class Values(ResidentBank):
    """Experts as matrices."""

    def __init__(self, bank: GpuBank) -> None:
        self.bank = bank

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        both = unpack_panels(self.bank.gate_up, index).bfloat16()
        return both[0::2], unpack_panels(self.bank.down, index).bfloat16(), both[1::2]


def bank_of(d: int, f: int, count: int) -> GpuBank:
    ups, downs = [], []
    for _ in range(count):
        gate, up, down = (quantise_fp4_weight(torch.randn(*s) * 2 * s[1] ** -0.5) for s in ((f, d), (f, d), (d, f)))
        ups.append(pack_fp4_panels(*gate, up=up))
        downs.append(pack_fp4_panels(*down))
    return GpuBank(stack_panels(ups), stack_panels(downs))


@pytest.mark.parametrize(
    ("n", "s", "count", "blocks", "width"),
    # Tiles of one width; of several in one launch, the last one short; more rows than one tile takes.
    [(21, 2, 3, 2, WIDTH), (70, 1, 2, 3, WIDTH), (5, 3, 4, 1, WIDTH), (150, 1, 3, 2, 64), (250, 1, 2, 3, 112)],
)
def test_each_choice(n: int, s: int, count: int, blocks: int, width: int, built: Any) -> None:
    torch.manual_seed(n)
    d, f = 256, 128
    bank, x = bank_of(d, f, count), torch.randn(n, d).bfloat16()
    ids = torch.rand(n, count).topk(s, 1).indices.sort(1).values
    if s > 1:
        ids[3, 0] = -1
    weights = torch.rand(n, s)
    each = run_grouped(x, ids, weights, bank, 2.0, width=width, build=built, blocks=blocks).view(n, s, d)
    for slot in range(s):
        own = ids[:, slot : slot + 1]
        want = experts(x, own, weights[:, slot : slot + 1], Values(bank), limit=2.0, form="fp8", impl="wide").double()
        there = own[:, 0] >= 0
        got = each[there, slot].double()
        assert torch.isfinite(got).all()
        assert float((got - want[there]).norm() / want[there].norm()) < 5e-3


def test_rows_are_laid_by_expert(built: Any) -> None:
    ids = torch.tensor([[0, 2], [2, -1], [0, 3], [2, 3]])
    laid = lay(ids, 4, WIDTH, build=built)
    assert laid.tiles.tolist() == [3]
    assert laid.expert[:3].tolist() == [0, 2, 3]
    assert laid.octet[:3].tolist() == [0, 1, 2]
    assert laid.filled[:3].tolist() == [2, 3, 2]
    places = [(i, c) for i, c in enumerate(laid.choice.tolist()) if c >= 0]
    assert places == [(0, 0), (1, 4), (8, 1), (9, 2), (10, 6), (16, 5), (17, 7)]


def test_an_expert_of_many_rows_has_several_tiles(built: Any) -> None:
    laid = lay(torch.zeros(80, 1, dtype=torch.int64), 2, WIDTH, build=built)
    assert laid.tiles.tolist() == [3]
    assert laid.filled[:3].tolist() == [32, 32, 16]
    assert laid.octet[:3].tolist() == [0, 4, 8]


def test_widths() -> None:
    assert width_for(4096 * 6, 128) == 112
    assert width_for(1024 * 6, 128) == 64
    assert all(width_for(rows * 6, 128) in WIDTHS for rows in (64, 512, 1000, 8192, 100_000))


def test_narrow_experts_are_refused(built: Any) -> None:
    bank = bank_of(128, 64, 2)
    with pytest.raises(ValueError, match="not whole blocks"):
        run_grouped(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1), bank, 1.0, build=built, blocks=1)
