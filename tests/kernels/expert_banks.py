"""Random experts for tests of kernels, in panels, and the same ones as matrices for the reference. Knows no kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.device import pack_fp4_panels, pack_fp8_panels, stack_panels, unpack_panels
from kvist.kernels.experts import ResidentBank
from kvist.kernels.experts.gpu_bank import GpuBank
from kvist.quant import quantise_fp4_weight, quantise_fp8_weight


class Values(ResidentBank):
    """Experts as matrices."""

    def __init__(self, bank: GpuBank) -> None:
        self.bank = bank

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        both = unpack_panels(self.bank.gate_up, index)
        return both[0::2], unpack_panels(self.bank.down, index), both[1::2]


def bank_of(form: str, d: int, f: int, count: int) -> GpuBank:
    store, pack = (quantise_fp4_weight, pack_fp4_panels) if form == "fp4" else (quantise_fp8_weight, pack_fp8_panels)
    ups, downs = [], []
    for _ in range(count):
        gate, up, down = (store(torch.randn(*shape) * 2 * shape[1] ** -0.5) for shape in ((f, d), (f, d), (d, f)))
        ups.append(pack(*gate, up=up))
        downs.append(pack(*down))
    return GpuBank(stack_panels(ups), stack_panels(downs))
