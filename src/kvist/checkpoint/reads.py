"""Positioned reads of tensors while a model runs: any failure becomes a named error of the one who asked.

Owns file descriptors and `ReadFailed`. A memory map would kill the process with SIGBUS when a file shrinks or its disk
fails, so what is fetched while serving is read, not mapped; the kernel's page cache is shared either way. Must not know
caches, experts or tables.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvist.checkpoint.formats import Entry
from kvist.kernels.native import native_or_none

PreadInto = Callable[[int, memoryview, int], int]
"""(file descriptor, target, file offset) -> bytes read, 0 at the end of the file; raises OSError. Tests put faults here."""


class ReadFailed(RuntimeError):
    """Bytes of a weight file could not be read; only the requests that need them fail, and a later one tries again."""


def _pread_into(descriptor: int, target: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [target], offset)


class FileReads:
    """Reads ranges of a checkpoint's files, each opened once. Safe to use from several threads."""

    def __init__(self, *, random_access: bool = False, pread: PreadInto | None = None) -> None:
        self.random_access, self.pread = random_access, pread
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._descriptors)

    def range_into(self, file: Path, offset: int, target: memoryview, what: str) -> None:
        """Fill `target` from `offset` of `file`; `what` names the bytes in an error. Raises `ReadFailed`."""
        pread = self.pread or _pread_into
        filled = 0
        try:
            descriptor = self._descriptor(file)
            while filled < len(target):
                count = pread(descriptor, target[filled:], offset + filled)
                if count <= 0:
                    raise ReadFailed(self._short(file, offset + filled, offset + len(target), what))
                filled += count
        except OSError as error:
            raise ReadFailed(f"{file}: {what} cannot be read at byte {offset + filled}: {error}") from error

    def rows_into(self, entry: Entry, row_bytes: int, ids: np.ndarray, out: np.ndarray, what: str) -> None:
        """Rows `ids` (int64 [n]) of a tensor whose rows take `row_bytes` -> `out` uint8 [n, row_bytes]. Raises `ReadFailed`."""
        native = native_or_none() if self.pread is None else None
        if native is None:
            for at, index in enumerate(ids.tolist()):
                where = f"row {index} of {what}"
                self.range_into(entry.file, entry.offset + index * row_bytes, memoryview(out[at]), where)
            return
        try:
            descriptor = self._descriptor(entry.file)
        except OSError as error:
            raise ReadFailed(f"{entry.file}: {what} cannot be read: {error}") from error
        code = ctypes.c_int(0)
        done = native.kvist_read_rows(
            descriptor, entry.offset, row_bytes, ids.ctypes.data, len(ids), out.ctypes.data, ctypes.addressof(code)
        )
        if done == len(ids):
            return
        index = int(ids[done])
        start = entry.offset + index * row_bytes
        if code.value:
            cause = os.strerror(code.value)
            raise ReadFailed(f"{entry.file}: row {index} of {what} cannot be read at byte {start}: {cause}")
        raise ReadFailed(self._short(entry.file, start, start + row_bytes, f"row {index} of {what}"))

    def _short(self, file: Path, at: int, wanted: int, what: str) -> str:
        size = os.fstat(self._descriptors[file]).st_size
        return (
            f"{file}: {what} ends at byte {wanted}, but only bytes below {at} could be read; the file has {size} bytes now. "
            "It was cut short or replaced while the model runs: restore it, or restart with a complete checkpoint"
        )

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                if self.random_access and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                self._descriptors[file] = descriptor
            return self._descriptors[file]


def private_buffer(nbytes: int) -> Tensor:
    """uint8 [nbytes] whose memory goes back to the system with the tensor.

    Large pieces that several threads allocate and free in turn would stay in the allocator's arenas, beyond any budget.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def adjacent_runs(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries of one file that lie one after another, grouped so that each group is one read."""
    runs: list[list[Entry]] = []
    for entry in sorted(entries, key=lambda entry: (str(entry.file), entry.offset)):
        last = runs[-1][-1] if runs else None
        if last is not None and last.file == entry.file and last.offset + last.nbytes == entry.offset:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _close_all(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
