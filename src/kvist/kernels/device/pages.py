"""The pages of a device pool as GPU operators take them, and the check that all tensors of a call lie where kernels run.

Owns no kernel and imports no Triton. Must not know attention, scores or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.kernels.device.require import interpreted, require_gpu

H200_MULTIPROCESSORS = 132


@dataclass(frozen=True, kw_only=True)
class DevicePages:
    """One source layer's rows in a device pool.

    `bytes_PB` uint8 [pages, page bytes]; `table_ST` int32 [slots, pages a slot]; `rows` a page holds of this source; the
    four planes' byte offsets in a page (see `kvist.page_layout`).
    """

    bytes_PB: Tensor
    table_ST: Tensor
    rows: int
    main_codes: int
    main_scales: int
    key_codes: int
    key_scales: int

    def __post_init__(self) -> None:
        if self.bytes_PB.dtype is not torch.uint8 or not self.bytes_PB.is_contiguous():
            raise ValueError(f"the page pool must be contiguous uint8, got {self.bytes_PB.dtype}")
        if self.table_ST.dtype is not torch.int32 or not self.table_ST.is_contiguous():
            raise ValueError(f"page tables must be contiguous int32, got {self.table_ST.dtype}")
        if self.rows < 1:
            raise ValueError(f"a page holds {self.rows} rows; at least 1")

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self.bytes_PB.shape[1]


def require_on_gpu(operator: str, *tensors: Tensor | None) -> None:
    """Raises `GpuUnavailable` where kernels cannot run, ValueError for a tensor elsewhere or one that needs a gradient."""
    require_gpu()
    for tensor in tensors:
        if tensor is None:
            continue
        if not interpreted() and not tensor.is_cuda:
            raise ValueError(f"{operator}: impl 'gpu' takes tensors of a CUDA device, got {tensor.device}; move them first")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{operator}: impl 'gpu' has no gradients; use impl 'ref' or torch.no_grad()")


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; an H200's number where kernels are interpreted."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
