"""What checkpoint files hold, without a checkpoint: a mapped table's rows, FP4 experts written as FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvist.checkpoint import CheckpointMismatch
from kvist.checkpoint.convert import fp4_as_fp8
from kvist.checkpoint.tables import EngramTable
from kvist.quant import dequantise_fp4_weight, quantise_fp4_weight


def test_a_mapped_table_is_never_read_whole(tmp_path):
    rows = 1 << 22
    codes, scales = tmp_path / "codes", tmp_path / "scales"
    for file, width in ((codes, 256), (scales, 8)):
        with file.open("wb") as handle:
            handle.truncate(rows * width)
    planes = [torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8) for file in (codes, scales)]
    table = EngramTable(planes[0].view(rows, 256), planes[1].view(rows, 8), torch.float32)
    before = resident_bytes()
    values = table.rows(torch.arange(0, rows, rows // 64))
    assert values.shape == (64, 256)
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_fp4_to_fp8_is_exact_or_refused():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 96, generator=generator) * torch.exp2(torch.randint(-5, 6, (70, 1), generator=generator))
    packed, scales = quantise_fp4_weight(weight)
    codes, blocks = fp4_as_fp8(packed, scales, "w")
    factors = blocks.float().repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)
    assert torch.equal(codes.float() * factors, dequantise_fp4_weight(packed, scales, torch.float32))
    rows = torch.full((64, 32), 6.0)
    rows[:, 5] = 0.5
    rows[3] *= 2.0**-14
    fp4_as_fp8(*quantise_fp4_weight(rows), "w")
    rows[3] *= 0.5
    with pytest.raises(CheckpointMismatch, match="experts_w1"):
        fp4_as_fp8(*quantise_fp4_weight(rows), "experts_w1")
