"""A few rows through chosen experts in one launch, on a processor: entries, units, both ways of summing, and a row's bits.

Arithmetic, layouts, rings and barriers between blocks are the source's own (`cuda_on_cpu.py`); only timing is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.row import counters
from kvist.kernels.experts import experts
from kvist.kernels.experts import few as module
from kvist.kernels.experts.few import few_experts
from kvist.kernels.hyper_connections.row import STREAM_SOURCE
from kvist.kernels.quantise import quantise
from tests.kernels.cuda_on_cpu import Together, build
from tests.kernels.expert_banks import Values, bank_of

Builder = Callable[[torch.device], dict[str, Any]]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    source = Path(str(module.__file__)).with_name("few.cu")
    made = build((STREAM_SOURCE, source), {"experts_few": module.THREADS}, tmp_path_factory.mktemp("few"))
    return lambda device: {name: Together(kernel) for name, kernel in made.items()}


def rows_of(n: int, d: int, k: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    x = quantise(torch.randn(n, d).bfloat16(), "fp8")
    return x, torch.rand(n, count).topk(k, 1).indices.sort(1).values, torch.rand(n, k)


@pytest.mark.parametrize(
    ("n", "k", "count", "d", "f", "blocks", "with_shared"),
    # Rows alone with their experts and not; all rows of the same experts; units of fewer chunks than warps and of more.
    [
        (2, 2, 9, 256, 128, 3, True), (3, 3, 40, 128, 256, 4, False), (8, 2, 2, 128, 128, 2, True), (3, 2, 3, 1664, 128, 2, True),
        (3, 1, 2, 128, 1664, 2, False),
    ],
)  # fmt: skip
def test_rows_and_their_bits(n: int, k: int, count: int, d: int, f: int, blocks: int, with_shared: bool, kernel: Builder) -> None:
    torch.manual_seed(n)
    bank, (x, ids, weights) = bank_of("fp4", d, f, count), rows_of(n, d, k, count)
    shared = bank_of("fp8", d, f, 1) if with_shared else None
    triple = None if shared is None else Values(shared).expert(0)
    for _ in range(2):
        got = few_experts(x, ids, weights, bank, shared, limit=2.0, build=kernel, blocks=blocks)
        want = experts(x, ids, weights, Values(bank), limit=2.0, form="fp8", shared=triple, impl="wide")
        assert torch.isfinite(got).all()
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 5e-3
        assert not counters(bank.down.codes, 1).any()
        for row in (0, n - 2):
            own = slice(row, row + 1)
            alone = few_experts(x[own], ids[own], weights[own], bank, shared, limit=2.0, build=kernel, blocks=2)
            assert torch.equal(alone[0], got[row])
        ids[n // 2, 0] = -1
        ids[n - 1] = -1


def test_a_broken_row_leaves_its_neighbours_alone(kernel: Builder) -> None:
    torch.manual_seed(1)
    bank, (x, ids, weights) = bank_of("fp4", 128, 128, 3), rows_of(4, 128, 2, 3)
    want = few_experts(x, ids, weights, bank, limit=2.0, build=kernel, blocks=2)
    x[1] = float("nan")
    got = few_experts(x, ids, weights, bank, limit=2.0, build=kernel, blocks=2)
    others = [0, 2, 3]
    assert torch.equal(got[others], want[others])
    assert torch.isnan(got[1]).any()


def test_more_rows_are_refused(kernel: Builder) -> None:
    bank, given = bank_of("fp4", 128, 128, 3), rows_of(9, 128, 2, 3)
    with pytest.raises(ValueError, match="9 rows of 2 choices"):
        few_experts(*given, bank, limit=2.0, build=kernel, blocks=2)
