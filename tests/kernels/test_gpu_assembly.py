"""The inline assembly that expands stored codes, executed instruction by instruction in Python against the formats' tables.

Triton's interpreter cannot run assembly, so this is how it is known to be right without a GPU. Needs Triton to import the
operators; skips without it and says so.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from torch import Tensor

from kvist.kernels.device.panels import Form, pack_fp4_panels, pack_fp8_panels
from kvist.quant import dequantise_fp4_weight, dequantise_fp8_weight

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
INSTRUCTION = re.compile(r"(and|shl|shr|lop3|mul)\.([\w.]+)\s+([^;]+);")


def halves(word: int) -> Tensor:
    """The two bfloat16 of a 32-bit register, low half first."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def execute(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Run the few PTX instructions that the decoders use; raises KeyError for a register that nothing wrote."""

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for operation, kind, operands in INSTRUCTION.findall(text):
        target, *sources = (part.strip() for part in operands.split(","))
        a, b = value(sources[0]), value(sources[1])
        if operation == "and":
            result = a & b
        elif operation == "shl":
            result = (a << b) & 0xFFFFFFFF
        elif operation == "shr":
            result = a >> b
        elif operation == "lop3":
            assert sources[3] == "0xEA", "(a & b) | c"
            result = (a & b) | value(sources[2])
        elif kind == "lo.u32":
            result = (a * b) & 0xFFFFFFFF
        else:
            assert kind == "bf16x2"
            low, high = (halves(a) * halves(b)).view(torch.int16).tolist()
            result = (low & 0xFFFF) | (high & 0xFFFF) << 16
        registers[target] = result
    return registers


def factor(scale: int, bias: int) -> int:
    """A run's power of two, as both halves of a register."""
    half = (scale + bias) << 7
    return half | half << 16


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_every_code_expands_to_its_value(form: Form) -> None:
    """All codes in every place of a word, under scales from tiny to the largest that panels accept."""
    from kvist.kernels.device import gpu

    runs, bias, most = (4, 126, 128) if form == "fp4" else (2, 120, 134)
    scales = [3, 100, 119, most][:runs]
    torch.manual_seed(5)
    if form == "fp4":
        codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
        stored = torch.tensor(scales, dtype=torch.uint8).repeat(64, 1)
        panels, values = pack_fp4_panels(codes, stored), dequantise_fp4_weight(codes, stored, torch.float32)
        text = gpu._FP4_ASM.value
    else:
        codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
        codes = codes.masked_fill((codes & 0x7F) == 0x7F, 1)
        stored = torch.tensor(scales, dtype=torch.uint8).repeat(2, 1)
        panels, values = pack_fp8_panels(codes, stored), dequantise_fp8_weight(codes, stored, torch.float32)
        text = gpu._FP8_ASM.value
    factors = {f"${runs + 1 + run}": factor(scales[run], bias) for run in range(runs)}
    pairs = panels.codes[0, 0, 0].contiguous().view(torch.int32)
    for row in range(64):
        for pair in range(16):
            done = execute(text, {f"${runs}": int(pairs[row, pair]) & 0xFFFFFFFF, **factors})
            for run in range(runs):
                wanted = values[row, 32 * run + 2 * pair : 32 * run + 2 * pair + 2]
                assert torch.equal(halves(done[f"${run}"]).float(), wanted), (row, pair, run)
