"""Packed copies of weights: of values, made once and kept as long as the weight lives, and of stored FP4 codes.

A weight whose values all fit bfloat16 (every stored format does) is packed as bfloat16 pairs, any other as float32; FP4
codes stay four bits and are expanded tile by tile to the same pairs, so that a product has the same bits either way.
A copy is made anew when the weight was written to (torch's version counter) or moved. Must not know layers.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.kernels.native.calls import f32, native_or_none

BF16, F32 = 0, 1
LANES = 16
FP4_GROUP_BYTES = 16
LARGE_PAGE = 1 << 21


class Packed(NamedTuple):
    """`data` words or codes in panels of 16 outputs (layout: kvist.h); `pointer` its address; `outputs` of the weight."""

    data: Tensor
    pointer: int
    kind: int
    outputs: int


class _Entry(NamedTuple):
    owner: weakref.ref[Tensor]
    address: int
    version: int
    packed: Packed


_entries: dict[tuple[int, int, bool], _Entry] = {}


def packed(w: Tensor, groups: int = 1, *, wide: bool = False) -> Packed:
    """The packed copy of `w` [outputs, inputs]; with `groups`, each of as many equal parts of the outputs in its own panels.

    `wide` forces float32. Inference tensors have no version counter; theirs are taken as never written to.
    """
    key = (id(w), groups, wide)
    entry = _entries.get(key)
    version = -1 if w.is_inference() else w._version
    if entry is not None and entry.owner() is w and entry.version == version and entry.address == w.data_ptr():
        return entry.packed
    made = pack(w.detach(), groups, wide=wide)
    owner = weakref.ref(w, lambda _: _entries.pop(key, None))
    _entries[key] = _Entry(owner, w.data_ptr(), version, made)
    return made


def pack(w: Tensor, groups: int = 1, *, wide: bool = False) -> Packed:
    """A packed copy that the caller keeps; see `packed`."""
    native = native_or_none()
    assert native is not None, "callers run the reference where there is no library"
    outputs, inputs = w.shape
    each = outputs // groups
    panels = -(-each // LANES)
    source = f32(w)
    for kind in (F32,) if wide else (BF16, F32):
        depth = inputs if kind == F32 else -(-inputs // 2)
        data = _room(4 * groups * panels * depth * LANES).view(torch.int32).view(groups, panels, depth, LANES)
        step = panels * depth * LANES * 4
        if all(
            native.kvist_pack(source[g * each].data_ptr() if each else 0, each, inputs, kind, data.data_ptr() + g * step)
            for g in range(groups)
        ):
            return Packed(data, data.data_ptr(), kind, outputs)
    raise AssertionError("every float32 weight can be packed as float32")


def _room(nbytes: int) -> Tensor:
    """uint8 [nbytes] in large pages where the system gives them (a tenth faster to read, measured on a virtual machine)."""
    if nbytes < 2 * LARGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    native = native_or_none()
    assert native is not None
    # What lies before the first large page is never touched, so it costs addresses only.
    whole = torch.empty(nbytes + LARGE_PAGE, dtype=torch.uint8)
    room = whole[-whole.data_ptr() % LARGE_PAGE :][:nbytes]
    native.kvist_ask_large_pages(room.data_ptr(), nbytes)
    return room


def packed_fp4_bytes(outputs: int, inputs: int) -> int:
    """Bytes of `pack_fp4`: codes and scales of whole panels."""
    depth = -(-inputs // 2)
    groups = -(-depth // FP4_GROUP_BYTES)
    return -(-outputs // LANES) * LANES * 4 * (-(-depth // 4) + -(-groups // 4))


def pack_fp4(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Packed:
    """Stored FP4 codes [outputs, inputs / 2] and E8M0 scales [outputs, ceil(inputs / 32)], any one-byte dtypes, in panels.

    `out`: contiguous uint8 of `packed_fp4_bytes` to write to.
    """
    native = native_or_none()
    assert native is not None, "callers run the reference where there is no library"
    outputs, depth = codes.shape
    if tuple(scales.shape) != (outputs, -(-depth // FP4_GROUP_BYTES)):
        raise ValueError(f"FP4 codes {list(codes.shape)} need a scale for every 16 bytes of a row, got {list(scales.shape)}")
    source, factors = codes.contiguous(), scales.contiguous()
    data = _room(packed_fp4_bytes(outputs, 2 * depth)) if out is None else out
    assert data.is_contiguous() and data.nbytes == packed_fp4_bytes(outputs, 2 * depth), "room for whole panels"
    kind = native.kvist_pack_fp4(source.data_ptr(), factors.data_ptr(), outputs, depth, data.data_ptr())
    return Packed(data, data.data_ptr(), kind, outputs)
