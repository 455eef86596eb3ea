"""A bank for the card out of weights in memory: values back to the codes of their format, then panels.

Imports Triton through `gpu.py`; import it where it is used. Must not know layers or files.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvist.kernels.device import PanelWeight, pack_fp4_panels, pack_fp8_panels, stack_panels
from kvist.kernels.device.stored import fp4_codes, fp8_codes
from kvist.kernels.experts.gpu import GpuBank


def pack_bank(experts: Sequence[tuple[Tensor, Tensor, Tensor]], form: str, name: str) -> GpuBank:
    """Experts as (w1 gate, w2 down, w3 up) values, of `form` fp4 or fp8, on the device that they lie on.

    Raises `NotReleasedFormat` for values that the format cannot hold, ValueError for sizes that the operator does not take.
    """
    pairs = [_swiglu(*weights, form, f"{name}.{number}") for number, weights in enumerate(experts)]
    return GpuBank(stack_panels([gate_up for gate_up, _ in pairs]), stack_panels([down for _, down in pairs]))


def _swiglu(w1: Tensor, w2: Tensor, w3: Tensor, form: str, name: str) -> tuple[PanelWeight, PanelWeight]:
    codes_of, packed = (fp4_codes, pack_fp4_panels) if form == "fp4" else (fp8_codes, pack_fp8_panels)
    gate, down, up = (codes_of(weight, f"{name}.{part}") for weight, part in ((w1, "w1"), (w2, "w2"), (w3, "w3")))
    return packed(*gate, up), packed(*down)
