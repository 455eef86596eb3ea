"""A block's packed weights and one pass's places as the C structures of `layer.c`, and the call that runs a whole layer.

The structures keep nothing alive: whoever fills them holds the tensors. Must not know how a layer's role follows from a
configuration, requests or scheduling. Mirrors layer.c field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kvist.kernels.native.calls import native_or_none
from kvist.kernels.native.packed import Packed

P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Matrix(ctypes.Structure):
    """A packed weight; zero where a layer has no such part."""

    _fields_ = (("data", P), ("outputs", N), ("inputs", N), ("groups", N), ("kind", N))

    @staticmethod
    def of(weight: Packed, inputs: int, groups: int = 1) -> Matrix:
        """`inputs` of each of `groups` parts."""
        return Matrix(weight.pointer, weight.outputs, inputs, groups, weight.kind)


class Entrance(ctypes.Structure):
    """Hyper-connection weights and the norm before one half of a layer."""

    _fields_ = (("fn", Matrix), ("base", P), ("scale", P), ("norm", P))


class AttentionHalf(ctypes.Structure):
    """Weights and sizes of attention in any of the four roles."""

    _fields_ = (
        ("enter", Entrance),
        *((name, Matrix) for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        *((name, P) for name in ("q_norm", "kv_norm", "sink")),
        *((name, Matrix) for name in ("rows_kv", "rows_gate", "row_key")),
        *((name, P) for name in ("rows_norm", "key_norm")),
        *((name, Matrix) for name in ("index_q", "index_weight")),
        *((name, N) for name in ("heads", "head_width", "index_heads", "index_width", "chosen", "block_size", "published")),
        ("index_scale", F),
    )


class ExpertsHalf(ctypes.Structure):
    """Router, experts and the shared expert, which stands last in `tables` and `kinds`. No tables: the half is not run."""

    _fields_ = (
        ("enter", Entrance),
        ("gate", Matrix),
        *((name, P) for name in ("bias_text", "bias_image", "tables", "kinds")),
        *((name, N) for name in ("experts", "hidden", "active", "normalise")),
        *((name, F) for name in ("temperature", "scale", "limit")),
    )
    tables: int | None


class Layer(ctypes.Structure):
    """One block."""

    _fields_ = (
        *((name, N) for name in ("streams", "width", "pairs", "iterations")),
        *((name, F) for name in ("hc_eps", "norm_eps")),
        ("attention", AttentionHalf),
        ("experts", ExpertsHalf),
    )
    experts: ExpertsHalf


class NewGroups(ctypes.Structure):
    """The groups of one source that a pass completes."""

    _fields_ = (
        *((name, P) for name in ("batch", "early", "early_cell", "slot", "position", "keep", "keep_cell")),
        *((name, N) for name in ("groups", "earlies", "kept", "ratio")),
        *((name, P) for name in ("tail_kv", "tail_gate", "cos", "sin")),
    )


class LayerPass(ctypes.Structure):
    """What one layer's call gets besides weights and streams."""

    _fields_ = (
        ("segments", P),
        *((name, N) for name in ("count", "rows", "block")),
        *((name, P) for name in ("text", "cos", "sin", "source", "ring", "groups", "pool")),
        *((name, N) for name in ("pool_blocks", "selected")),
        *((name, P) for name in ("topk", "blocks")),
        ("threads", N),
    )
    ring: int
    groups: int
    pool: int
    pool_blocks: int
    blocks: int
    source: int
    topk: int
    selected: int
    threads: int


class WindowBlocks(ctypes.Structure):
    """What the draft blocks' window entries are made with."""

    _fields_ = (
        *((name, P) for name in ("wkv", "norm", "ring")),
        *((name, N) for name in ("blocks", "head_width", "pairs")),
        ("eps", F),
    )


def keep_windows(blocks: WindowBlocks, given: LayerPass, context_ND: Tensor) -> None:
    """Write every block's window entries of contiguous float32 contexts into its ring."""
    native = native_or_none()
    assert native is not None, "callers run the operators one by one where there is no library"
    native.kvist_windows(ctypes.addressof(blocks), ctypes.addressof(given), context_ND.data_ptr(), context_ND.shape[1])


def run_layers(
    layers: Sequence[Layer], passes: Sequence[LayerPass], x_NSD: Tensor, pre_NS: Tensor, x_out_NSD: Tensor, pre_out_NS: Tensor
) -> int:
    """Run layers one after the other on contiguous float32 streams and collapse weights; only the last may lack experts.

    Returns 0, or 1 + the segment whose ring has lost entries that it needs; the outputs then hold anything.
    """
    native = native_or_none()
    assert native is not None, "callers run the operators one by one where there is no library"
    count = len(layers)
    where = (ctypes.c_void_p * count)(*map(ctypes.addressof, layers))
    given = (LayerPass * count)(*passes)
    pointers = (x_NSD.data_ptr(), pre_NS.data_ptr(), x_out_NSD.data_ptr(), pre_out_NS.data_ptr())
    return int(native.kvist_layers(ctypes.addressof(where), ctypes.addressof(given), count, *pointers))
