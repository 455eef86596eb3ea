"""From bytes in a file to tensors: memory maps, plain reads, and dequantised parameters.

Owns `TensorFiles`, which both load modes share. Must not know which tensors a model has, nor modules.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvist.checkpoint.formats import Checkpoint, CheckpointMismatch, Entry
from kvist.inventory import Parameter, Storage
from kvist.quant import dequantise_fp4_weight, dequantise_fp8_weight, unpack_fp8

Access = Literal["mmap", "read"]
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


class TensorFiles:
    """Reads tensors of an opened checkpoint. `mmap` maps each file once; `read` reads the bytes that are asked for."""

    def __init__(self, checkpoint: Checkpoint, access: Access = "mmap") -> None:
        if access not in ("mmap", "read"):
            raise ValueError(f"access is {access!r}; known: 'mmap', 'read'")
        self.checkpoint, self.access = checkpoint, access
        self._maps: dict[Path, tuple[mmap.mmap, Tensor]] = {}

    def mapped(self, name: str) -> Tensor:
        """The bytes of a tensor as a uint8 view [nbytes] of its mapped file; nothing is read before it is used."""
        entry = self.entry(name)
        if entry.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if entry.file not in self._maps:
            # ACCESS_COPY because torch wants writable memory; pages stay shared with the page cache as nobody writes.
            with entry.file.open("rb") as handle:
                view = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[entry.file] = view, torch.frombuffer(view, dtype=torch.uint8)
        return self._maps[entry.file][1][entry.offset : entry.offset + entry.nbytes]

    def mapped_rows(self, name: str) -> Tensor:
        """`mapped`, announced as read here and there: the kernel then fetches single pages and reads nothing ahead."""
        data, entry = self.mapped(name), self.entry(name)
        first = -(-entry.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (entry.offset + entry.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._maps[entry.file][0].madvise(mmap.MADV_RANDOM, first, last - first)
        return data

    def raw(self, name: str) -> Tensor:
        """A tensor of the file in its own dtype, copied (so aligned, and independent of the file)."""
        entry = self.entry(name)
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointMismatch(f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, which no parameter has")
        data = self.mapped(name).clone() if self.access == "mmap" else self._read(entry)
        return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def dequantised(self, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        """A parameter's values in `dtype` (exact in bfloat16 for FP8 and FP4); F32 ones stay float32."""
        if parameter.storage is Storage.F32:
            return self.raw(parameter.name)
        if parameter.storage is Storage.BF16:
            return self.raw(parameter.name).to(dtype)
        return dequantise(self.raw(parameter.name), self.raw(parameter.scale_name), parameter.storage, dtype)

    def entry(self, name: str) -> Entry:
        """Where a tensor lies. Raises `CheckpointMismatch` if no file holds it."""
        entry = self.checkpoint.entries.get(name)
        if entry is None:
            raise CheckpointMismatch(f"missing tensor {name!r}: none of the files in {self.checkpoint.folder} holds it")
        return entry

    def _read(self, entry: Entry) -> Tensor:
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        with entry.file.open("rb") as handle:
            handle.seek(entry.offset)
            filled = handle.readinto(data.numpy().data)
        if filled != entry.nbytes:
            raise CheckpointMismatch(f"{entry.file}: truncated while tensor {entry.name!r} was read")
        return data


def dequantise(codes: Tensor, scales: Tensor, storage: Storage, dtype: torch.dtype) -> Tensor:
    """Values of a quantised parameter: FP8 in 32x32 blocks, FP4 per row and 32 inputs, a table per row and 32 channels."""
    if storage is Storage.FP8:
        return dequantise_fp8_weight(codes, scales, dtype)
    if storage is Storage.FP4:
        return dequantise_fp4_weight(codes, scales, dtype)
    assert storage is Storage.TABLE, storage
    return unpack_fp8(codes.view(torch.uint8), scales.view(torch.uint8), dtype)
