"""Engram tables: FP8 rows with a power-of-two scale per 32 channels, mapped from the file or held in memory.

Owns row lookup; a table is never dequantised as a whole. Must not know hashing or gates. Source: facts section 8.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvist.checkpoint.tensors import TensorFiles
from kvist.config import ModelConfig
from kvist.inventory import Parameter, Storage, parameters
from kvist.kernels.engram.cpu import table_rows
from kvist.quant import unpack_fp8

TableAccess = Literal["mmap", "memory"]


class EngramTable:
    """Rows of one Engram layer: codes u8 [rows, dim] and scales u8 [rows, dim / 32], mapped or resident.

    Satisfies the model's `EngramReader`. `dtype` is that of the values handed out.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.dtype = codes.view(torch.uint8), scales.view(torch.uint8), dtype

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, ids: Tensor) -> Tensor:
        """int64 ids [...] on any device -> values [..., dim] there. Touches only these rows. ValueError: id out of range."""
        if self.dtype is torch.float32:
            found = table_rows(self.codes, self.scales, ids)
            if found is not None:
                return found
        at = check_row_ids(ids, len(self.codes), self.codes.device)
        values = unpack_fp8(self.codes[at], self.scales[at], self.dtype)
        return values.view(*ids.shape, self.codes.shape[1]).to(ids.device)

    def prefetch(self, ids: Tensor) -> None:
        """Resident rows are here; mapped ones come with the kernel's page faults."""


def check_row_ids(ids: Tensor, rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The ids [n] on `device`, if all are int64 in 0..rows-1 (an id never wraps around). Raises ValueError."""
    at = ids.reshape(-1).to(device)
    if at.dtype != torch.int64:
        raise ValueError(f"Engram row ids must be int64, got {at.dtype}")
    if at.numel() and (int(at.min()) < 0 or int(at.max()) >= rows):
        raise ValueError(f"Engram row ids {int(at.min())}..{int(at.max())} leave the table's 0..{rows - 1}")
    return at


def table_parameters(config: ModelConfig) -> dict[int, Parameter]:
    """The table parameter of each Engram layer, by layer index."""
    return {p.layer: p for p in parameters(config) if p.storage is Storage.TABLE}


def open_tables(
    files: TensorFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    access: TableAccess = "mmap",
    device: torch.device | str = "cpu",
) -> dict[int, EngramTable]:
    """Tables by layer index. `mmap` leaves them in the file (rows come through the page cache); `memory` copies the codes
    to `device`, one byte a value."""
    if access not in ("mmap", "memory"):
        raise ValueError(f"engram is {access!r}; known: 'mmap', 'memory'")
    tables = {}
    for layer, parameter in table_parameters(config).items():
        planes = []
        for spec in parameter.specs():
            plane = files.mapped_rows(spec.name) if access == "mmap" else files.raw(spec.name).view(torch.uint8).to(device)
            planes.append(plane.view(spec.shape))
        tables[layer] = EngramTable(planes[0], planes[1], dtype)
    return tables
