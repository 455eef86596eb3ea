"""Experts of one layer on a GPU, as panels. Must not know kernels."""

from __future__ import annotations

from kvist.kernels.device.panels import PanelWeight
from kvist.kernels.experts.bank import ResidentBank


class GpuBank(ResidentBank):
    """Experts of one layer on the device: `gate_up` paired panels of 2F outputs, `down` panels of D outputs."""

    def __init__(self, gate_up: PanelWeight, down: PanelWeight) -> None:
        if not gate_up.paired or down.inputs * 2 != gate_up.outputs or down.outputs != gate_up.inputs:
            raise ValueError(
                f"gate+up {gate_up.outputs} x {gate_up.inputs} (paired: {gate_up.paired}) and down {down.outputs} x "
                f"{down.inputs} are not one SwiGLU"
            )
        if gate_up.outputs % 64 or down.outputs % 64 or gate_up.inputs % 32 or down.inputs % 32:
            raise ValueError(
                f"expert width {down.inputs} and model width {down.outputs} must be multiples of 32 and 64 for impl 'gpu'; "
                "use impl 'ref'"
            )
        self.gate_up, self.down = gate_up, down
