"""The inline assembly that decodes packed rows, executed here line by line: every code, no GPU and no Triton needed.

Triton's interpreter cannot run assembly, so the kernels' tests do not see a wrong selector or mask before they meet a GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvist.kernels.device
from kvist.quant import unpack_fp8, unpack_main_fp4

SOURCE = (Path(kvist.kernels.device.__file__).parent / "planes_triton.py").read_text()
WORD = 0xFFFFFFFF


def assembly(name: str) -> str:
    """The body of one block of the source."""
    found = re.search(rf'{name} = tl\.constexpr\("""(.*?)"""\)', SOURCE, re.DOTALL)
    assert found is not None, f"{name} is not in planes_triton.py"
    return found.group(1).strip().strip("{}")


def value(bits: int) -> Tensor:
    """A bfloat16 from its bits."""
    return torch.tensor(bits - ((bits & 0x8000) << 1), dtype=torch.int16).view(torch.bfloat16)


def bits_of(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF


def twice(number: float) -> int:
    """The same bfloat16 in both halves of a word."""
    return bits_of(number) * 0x10001


def product(a: int, b: int) -> int:
    """mul.rn.bf16x2: rounded once, subnormals kept."""
    halves = [(value((a >> at) & 0xFFFF).double() * value((b >> at) & 0xFFFF).double()).bfloat16() for at in (0, 16)]
    return sum((int(half.view(torch.int16)) & 0xFFFF) << at for half, at in zip(halves, (0, 16), strict=True))


def permuted(a: int, b: int, selector: int) -> int:
    source = [(word >> (8 * i)) & 255 for word in (a, b) for i in range(4)]
    return sum(source[(selector >> (4 * i)) & 7] << (8 * i) for i in range(4))


def run(body: str, registers: dict[str, int]) -> dict[str, int]:
    """Execute a block; an instruction that the table lacks is a KeyError."""
    table = {
        "mov.b32": lambda a: a,
        "prmt.b32": permuted,
        "shl.b32": lambda a, n: (a << n) & WORD,
        "shr.b32": lambda a, n: a >> n,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "mul.rn.bf16x2": product,
    }
    for line in (part.strip() for part in body.split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        to, *sources = (part.strip() for part in rest.split(","))
        registers[to] = table[name](*(registers[x] if x in registers else int(x, 0) for x in sources))
    return registers


def halves(*words: int) -> list[float]:
    return [float(value((word >> at) & 0xFFFF)) for word in words for at in (0, 16)]


@pytest.mark.parametrize("scale", [0x01, 0x07, 0x38, 0x55, 0x7E], ids=hex)
def test_every_fp4_byte(scale: int) -> None:
    """Scales from the smallest subnormal to 448."""
    factor = float(torch.tensor([scale], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    for first in range(0, 256, 4):
        codes = [first, first + 1, first + 2, first + 3]
        word = sum(code << (8 * i) for i, code in enumerate(codes))
        got = run(assembly("_FP4_ASM"), {"$4": word, "$5": twice(factor), "$6": twice(factor)})
        row = torch.tensor([[*codes, 0, 0, 0, 0]], dtype=torch.uint8)
        want = unpack_main_fp4(row, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)[0]
        assert halves(got["$0"], got["$1"]) == want[0:8:2].tolist()
        assert halves(got["$2"], got["$3"]) == want[1:8:2].tolist()


@pytest.mark.parametrize("scale", [105, 127, 140])
def test_every_fp8_code(scale: int) -> None:
    """Scales from the format's floor up; the code of NaN apart, which only stands under a NaN scale."""
    for first in range(0, 256, 4):
        codes = [code if code & 0x7F != 0x7F else 0 for code in range(first, first + 4)]
        word = sum(code << (8 * i) for i, code in enumerate(codes))
        got = run(assembly("_FP8_ASM"), {"$2": word, "$3": twice(2.0 ** (scale - 127))})
        row = torch.tensor([codes + [0] * 28], dtype=torch.uint8)
        want = unpack_fp8(row, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)[0]
        assert halves(got["$0"]) == [float(want[0]), float(want[2])]
        assert halves(got["$1"]) == [float(want[1]), float(want[3])]
