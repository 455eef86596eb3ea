"""A growing list of compressed rows or index keys of one request: as values, or as the released bytes.

Must not know layers or requests. Design section 3: packed storage gives the same bits as fake-quantised values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.quant import pack_main_fp4, pack_mxfp4, unpack_main_fp4, unpack_mxfp4

FIRST_ROWS = 64


class RowStore:
    """Rows of one kind: `main` (FP4, groups of 16) or `key` (MXFP4, groups of 32). Reads return [M, width] in `dtype`."""

    def __init__(self, kind: str, packed: bool, dtype: torch.dtype) -> None:
        assert kind in ("main", "key"), kind
        self.kind, self.packed, self.dtype = kind, packed, dtype
        self.planes: list[Tensor] = []
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def append(self, rows: Tensor) -> None:
        """Add rows [G, width]: unquantised values if `packed`, which are packed here; else values kept as they are."""
        new = list(self._pack(rows)) if self.packed else [rows]
        if rows.requires_grad or (self.planes and self.planes[0].requires_grad):
            self.planes = new if not self.planes else [torch.cat(p) for p in zip(self._valid(), new, strict=True)]
        else:
            self._write(new)
        self.length += len(rows)

    def read(self) -> Tensor:
        """All rows so far."""
        planes = self._valid()
        if not self.packed:
            return planes[0]
        unpack = unpack_main_fp4 if self.kind == "main" else unpack_mxfp4
        return unpack(planes[0], planes[1], self.dtype)

    def fork(self) -> RowStore:
        """A copy whose later rows do not reach this one."""
        twin = RowStore(self.kind, self.packed, self.dtype)
        twin.planes, twin.length = [plane[: self.length].clone() for plane in self.planes], self.length
        return twin

    def truncate(self, length: int) -> None:
        """Forget rows from `length` on."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def _pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return pack_main_fp4(rows) if self.kind == "main" else pack_mxfp4(rows)

    def _valid(self) -> list[Tensor]:
        return [plane[: self.length] for plane in self.planes]

    def _write(self, new: list[Tensor]) -> None:
        need = self.length + len(new[0])
        if not self.planes:
            self.planes = [p.new_empty(max(FIRST_ROWS, need), *p.shape[1:]) for p in new]
        elif need > len(self.planes[0]):
            grown = [p.new_empty(max(need, 2 * len(p)), *p.shape[1:]) for p in self.planes]
            for old, fresh in zip(self.planes, grown, strict=True):
                fresh[: self.length] = old[: self.length]
            self.planes = grown
        for plane, rows in zip(self.planes, new, strict=True):
            plane[self.length : need] = rows
