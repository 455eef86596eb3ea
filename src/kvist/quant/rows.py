"""Cache rows as bytes: main entry (d/2 + d/16), index key (d/2 + d/32), window entry (d + d/32); codes, then scales.

Owns the byte counts and the order inside one row. Must not know pages, planes, alignment or layers.
Source: reference facts, section 11 (288, 68 and 528 bytes at the released dimensions).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.quant.cache_formats import (
    FP8_GROUP,
    MAIN_FP4_GROUP,
    MXFP4_GROUP,
    pack_fp8,
    pack_main_fp4,
    pack_mxfp4,
    unpack_fp8,
    unpack_main_fp4,
    unpack_mxfp4,
)


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How one row of `dim` values becomes bytes. `pack` and `unpack` are the quantiser's two directions."""

    name: str
    group: int
    codes_per_byte: int
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor, torch.dtype], Tensor]

    def code_bytes(self, dim: int) -> int:
        """Bytes of the codes of a row of `dim` values. ValueError if dim is not a positive multiple of the group."""
        if dim <= 0 or dim % self.group:
            raise ValueError(f"{self.name}: row dimension {dim} is not a positive multiple of the group size {self.group}")
        return dim // self.codes_per_byte

    def scale_bytes(self, dim: int) -> int:
        """Bytes of the scales of a row of `dim` values (one a group)."""
        return self.code_bytes(dim) * self.codes_per_byte // self.group

    def row_bytes(self, dim: int) -> int:
        """Bytes of a whole row of `dim` values."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def to_bytes(self, x: Tensor) -> Tensor:
        """float32 or bfloat16 [..., dim] -> u8 [..., row_bytes(dim)]."""
        codes, scales = self.pack(x)
        return torch.cat((codes, scales), dim=-1)

    def from_bytes(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """u8 [..., row_bytes(dim)] -> dtype [..., dim]; dim follows from the length. ValueError if no dim fits."""
        bytes_per_group = self.group // self.codes_per_byte + 1
        row_bytes = rows.shape[-1]
        if rows.dtype != torch.uint8 or row_bytes % bytes_per_group:
            raise ValueError(
                f"{self.name}: got {rows.dtype} rows of {row_bytes} elements; "
                f"expected uint8 and a multiple of {bytes_per_group} bytes ({self.group} values)"
            )
        groups = row_bytes // bytes_per_group
        return self.unpack(rows[..., : row_bytes - groups], rows[..., row_bytes - groups :], dtype)


MAIN_ENTRY = RowFormat(name="main entry", group=MAIN_FP4_GROUP, codes_per_byte=2, pack=pack_main_fp4, unpack=unpack_main_fp4)
INDEX_KEY = RowFormat(name="index key", group=MXFP4_GROUP, codes_per_byte=2, pack=pack_mxfp4, unpack=unpack_mxfp4)
WINDOW_ENTRY = RowFormat(name="window entry", group=FP8_GROUP, codes_per_byte=1, pack=pack_fp8, unpack=unpack_fp8)
