"""Packed copies of weights, made once and kept as long as the weight lives.

A weight whose values all fit bfloat16 (every stored format does) is packed as bfloat16 pairs, any other as float32.
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


class Packed(NamedTuple):
    """`data` uint32/float32 words in panels of 16 outputs (layout: kvist.h); `pointer` its address."""

    data: Tensor
    pointer: int
    kind: int


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
    made = _pack(w.detach(), groups, wide)
    owner = weakref.ref(w, lambda _: _entries.pop(key, None))
    _entries[key] = _Entry(owner, w.data_ptr(), version, made)
    return made


def _pack(w: Tensor, groups: int, wide: bool) -> Packed:
    native = native_or_none()
    assert native is not None, "callers run the reference where there is no library"
    outputs, inputs = w.shape
    each = outputs // groups
    panels = -(-each // LANES)
    source = f32(w)
    for kind in (F32,) if wide else (BF16, F32):
        depth = inputs if kind == F32 else -(-inputs // 2)
        data = torch.empty(groups, panels, depth, LANES, dtype=torch.int32)
        step = panels * depth * LANES * 4
        if all(
            native.kvist_pack(source[g * each].data_ptr() if each else 0, each, inputs, kind, data.data_ptr() + g * step)
            for g in range(groups)
        ):
            return Packed(data, data.data_ptr(), kind)
    raise AssertionError("every float32 weight can be packed as float32")
