"""The best id of each row: implementations agree, the lower id wins, a NaN never does. Triton's runs where Triton can."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kvist.kernels.best_token import best_token
from kvist.kernels.device import GpuUnavailable

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)
needs_kernels = pytest.mark.skipif(not CAN_RUN, reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(n: int, size: int) -> torch.Tensor:
    """Logits with ties in each row, a NaN in the first."""
    logits = torch.randn(n, size, generator=torch.Generator().manual_seed(n)).bfloat16().float()
    logits[:, size // 3] = logits[:, size // 2] = 9.0
    logits[0, 1] = float("nan")
    return logits.to(DEVICE)


def test_the_lower_of_equals_and_no_nan() -> None:
    logits = rows(3, 60)
    assert best_token(logits).tolist() == [20, 20, 20]
    assert best_token(torch.full((1, 4), float("nan"))).tolist() == [0]


def test_bias_is_rounded_to_bfloat16() -> None:
    # 1 + 2^-9 is 1 in bfloat16: both ids then stand at 2.
    embedded, head = torch.ones(1, 2).bfloat16(), torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]]).bfloat16()
    assert best_token(torch.ones(1, 2), (embedded, head)).tolist() == [0]


@needs_kernels
@pytest.mark.parametrize(("n", "size", "rank"), [(1, 256, 0), (3, 9001, 0), (2, 300, 16), (5, 257, 64), (70, 200, 128)])
def test_gpu(n: int, size: int, rank: int) -> None:
    logits, source = rows(n, size), torch.Generator().manual_seed(1)
    bias = None
    if rank:
        made = (torch.randn(count, rank, generator=source).bfloat16().to(DEVICE) for count in (n, size))
        bias = (next(made), next(made))
    want = best_token(logits, bias)
    for _ in range(2):  # the second call finds the counters as the first left them
        assert torch.equal(best_token(logits, bias, impl="gpu"), want)


@needs_kernels
def test_rows_apart_and_refusals() -> None:
    logits = rows(6, 300)
    assert torch.equal(best_token(logits[::2], impl="gpu"), best_token(logits[::2]))
    with pytest.raises(ValueError, match="rank 40"):
        best_token(logits, (torch.ones(6, 40).bfloat16(), torch.ones(300, 40).bfloat16()), impl="gpu")
    with pytest.raises(ValueError, match="float16"):
        best_token(logits.half(), impl="gpu")


def test_unknown_impl_and_no_gpu() -> None:
    with pytest.raises(ValueError, match="known: ref, gpu"):
        best_token(torch.ones(1, 2), impl="fast")
    if not CAN_RUN:
        with pytest.raises(GpuUnavailable):
            best_token(torch.ones(1, 2), impl="gpu")
