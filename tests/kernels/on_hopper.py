"""Where tests of CUDA sources run: on a Hopper card, or the same sources on the processor (`cuda_on_cpu.py`), which shows wrong
arithmetic, layouts, indices and barriers, but neither a missing wait for a matrix product nor what the compiler makes of them.

Knows no operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from kvist.kernels.device.pages import DevicePages
from tests.kernels.cuda_on_cpu import OnCpu, build

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"


def processor_kernels(sources: Mapping[tuple[Path, ...], Mapping[str, int]], folder: Path) -> dict[str, OnCpu]:
    """Kernels of source files put together (name -> threads a block), for the processor; none on a Hopper card."""
    made: dict[str, OnCpu] = {}
    for paths, threads in sources.items():
        if not ON_HOPPER:
            made |= build(paths, dict(threads), folder)
    return made


def use(monkeypatch: pytest.MonkeyPatch, module: ModuleType, built: Mapping[str, OnCpu]) -> None:
    """Where there is no card: a module's launches go to the processor's kernels, on a card of two multiprocessors, so that
    blocks serve many items."""
    if built:
        monkeypatch.setattr(module, "kernels", lambda *_: built)
        monkeypatch.setattr(module, "multiprocessors", lambda _: 2)


def far_apart(pages: DevicePages) -> DevicePages:
    """The same pages more than 2^31 bytes apart, as in a large pool: from the third on, places need more than 32 bits."""
    count, size = pages.bytes_PB.shape
    shape = (count, (1 << 31) + 4096)
    # A processor's memory of zeros is there once it is written to.
    far: Tensor = (
        torch.empty(shape, dtype=torch.uint8, device=DEVICE) if ON_HOPPER else torch.from_numpy(np.zeros(shape, np.uint8))
    )
    far[:, :size] = pages.bytes_PB
    return replace(pages, bytes_PB=far)
