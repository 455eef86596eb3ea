"""What the GPU operators share: whether they can run here, named refusals, and weights laid out for them.

Owns `GpuUnavailable` and the panel layout. Triton itself is imported only by the `gpu` modules. Must not know layers.
"""

from kvist.kernels.device.panels import PanelWeight, pack_fp4_panels, pack_fp8_panels, stack_panels, unpack_panels
from kvist.kernels.device.require import GpuUnavailable, interpreted, require_bfloat16, require_device, require_gpu

__all__ = [
    "GpuUnavailable",
    "PanelWeight",
    "interpreted",
    "pack_fp4_panels",
    "pack_fp8_panels",
    "require_bfloat16",
    "require_device",
    "require_gpu",
    "stack_panels",
    "unpack_panels",
]
