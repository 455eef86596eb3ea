"""Where no GPU kernel can run, the cache operators say so by name and say what runs instead; nothing falls back in silence."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvist.kernels.device import GpuUnavailable, interpreted
from kvist.kernels.index_select import select
from kvist.kernels.sparse_attention import sparse_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or interpreted()),
    reason="the kernels can run here",
)


def test_attention_is_refused_by_name() -> None:
    q, keys, sink = torch.zeros(1, 2, 32), torch.zeros(3, 32), torch.zeros(2)
    with pytest.raises(GpuUnavailable, match="impl 'ref'"):
        sparse_attention(q, keys, torch.tensor([[0, 3]]), None, None, sink, window=4, impl="gpu")


def test_selection_is_refused_by_name() -> None:
    q, weight, keys = torch.zeros(1, 2, 32), torch.zeros(1, 2), torch.zeros(4, 32)
    with pytest.raises(GpuUnavailable, match="impl 'ref'"):
        select(q, weight, keys, torch.tensor([4]), k=2, block_size=4, impl="gpu")
