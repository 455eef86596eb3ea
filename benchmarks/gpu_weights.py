"""Random stored weights on the device, as panels: any bits are FP4 codes, any but NaN are FP8 codes, scales lie near 2^-8.

Also the same values as matrices, for checks and for peers. Knows no benchmark.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.device import PanelWeight, unpack_panels
from kvist.kernels.device.panels import FP4_BITS, fp4_code
from kvist.kernels.experts import ResidentBank, Triple

SCALES = (114, 122)
"""E8M0 bytes drawn from: 2^-13 to 2^-6, as trained weights of these widths have."""


def random_panels(form: str, outputs: int, inputs: int, *, experts: int = 1, paired: bool = False, seed: int = 0) -> PanelWeight:
    """A weight of the released format with random codes. Widths must be whole panels and chunks."""
    source = torch.Generator("cuda").manual_seed(seed)
    chunks = inputs // (128 if form == "fp4" else 64)
    shape = (experts, outputs // 64, chunks, 64, 64)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=source)
    if form == "fp8":
        codes ^= (codes & 0x7F) == 0x7F
    width = 64 if form == "fp4" else 1
    scales = torch.randint(
        *SCALES, (experts, outputs // 64, chunks, width, 4), dtype=torch.uint8, device="cuda", generator=source
    )
    return PanelWeight(
        codes.view(torch.int16), scales.view(torch.int32).squeeze(-1), outputs, inputs, "fp4" if form == "fp4" else "fp8", paired
    )  # fmt: skip


def random_rows(rows: int, width: int, seed: int) -> Tensor:
    """bfloat16 rows on the device that have passed the FP8 quantiser, as a linear layer's inputs have."""
    from kvist.kernels.quantise import quantise

    source = torch.Generator("cuda").manual_seed(seed)
    return quantise(torch.randn(rows, width, device="cuda", generator=source).bfloat16(), "fp8", impl="gpu")


class Matrices(ResidentBank):
    """The experts of two panel weights as the reference reads them, unpacked when asked for."""

    def __init__(self, gate_up: PanelWeight, down: PanelWeight) -> None:
        self.gate_up, self.down = gate_up, down

    def expert(self, index: int) -> Triple:
        """bfloat16 (gate, down, up)."""
        both = unpack_panels(self.gate_up, index).bfloat16()
        return both[0::2].contiguous(), unpack_panels(self.down, index).bfloat16(), both[1::2].contiguous()


def released_fp4(weight: PanelWeight) -> tuple[Tensor, Tensor]:
    """Codes uint8 [E,R,K/2] and scales uint8 [E,R,K/32] in the released order, for peers that read that."""
    wide = weight.codes.to(torch.int32)
    runs = [fp4_code(wide, places) for places in FP4_BITS]
    codes = torch.cat(runs, -1).to(torch.uint8).transpose(2, 3).flatten(3).flatten(1, 2)
    scales = weight.scales.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)).transpose(2, 3).flatten(3).flatten(1, 2)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous(), scales.contiguous()
