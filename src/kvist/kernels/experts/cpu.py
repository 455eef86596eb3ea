"""Experts by the native library: one call for the experts of a portion that a batch chose, and the shared one.

Must not know layers. Shapes as in `ref.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.kernels.experts.bank import ExpertBank, Triple
from kvist.kernels.experts.ref import experts_ref
from kvist.kernels.native import Packed, f32, i64, native_or_none, packed, reference_runs, refuse_gradients, threads
from kvist.kernels.quantise.cpu import check_groups

SHARED_ID = -1
PackedTriple = tuple[Packed, Packed, Packed]


def experts_cpu(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    bank: ExpertBank,
    *,
    limit: float,
    form: str | None,
    shared: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """See `experts`. bfloat16 rows run the reference, which rounds gate, up and hidden values where the release does."""
    native = native_or_none()
    if native is None or x_ND.dtype is not torch.float32:
        if native is not None:
            reference_runs("experts", str(x_ND.dtype))
        return experts_ref(x_ND, ids_NK, weights_NK, bank, limit=limit, form=form, shared=shared, impl="cpu")
    if form not in (None, "fp8"):
        raise ValueError(f"impl 'cpu' quantises hidden activations to fp8 or not at all, got {form!r}; use impl 'ref'")
    refuse_gradients(x_ND, weights_NK)
    x, ids, weights = f32(x_ND), i64(ids_NK), f32(weights_NK)
    if not len(x):
        return torch.zeros_like(x)
    out_ND = torch.empty_like(x)
    last = [] if shared is None else [(SHARED_ID, packed_expert(shared))]
    portions = bank.portions([index for index in sorted(set(ids.flatten().tolist())) if index >= 0])
    for number, portion in enumerate(portions):
        with portion as held:
            chosen = [(index, packed_expert(triple)) for index, triple in held]
            if number == len(portions) - 1:
                chosen += last
            _add_experts(native, x, ids, weights, chosen, out_ND, limit, form, begun=number > 0)
    if not portions:
        _add_experts(native, x, ids, weights, last, out_ND, limit, form, begun=False)
    return out_ND


def _add_experts(
    native: ctypes.CDLL,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    chosen: Sequence[tuple[int, PackedTriple]],
    out_ND: Tensor,
    limit: float,
    form: str | None,
    *,
    begun: bool,
) -> None:
    """Add the chosen experts' outputs to `out_ND`, which is set to zero first unless `begun`."""
    count = len(chosen)
    hidden = chosen[0][1][0].outputs if chosen else 0
    check_groups(form, hidden)
    tables = (ctypes.c_void_p * (3 * count))(*[part.pointer for _, triple in chosen for part in triple])
    numbers = (ctypes.c_int64 * count)(*[index for index, _ in chosen])
    kinds = (ctypes.c_int32 * count)(*[kind_of(triple) for _, triple in chosen])
    native.kvist_experts(
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        ctypes.addressof(tables),
        ctypes.addressof(numbers),
        ctypes.addressof(kinds),
        out_ND.data_ptr(),
        len(x),
        ids.shape[1],
        count,
        x.shape[1],
        hidden,
        limit,
        form is not None,
        begun,
        threads(),
    )


def kind_of(expert: PackedTriple) -> int:
    """The one kind by which all three may be read: of FP4 weights the one that promises less."""
    return min(part.kind for part in expert)


def packed_expert(weights: Triple) -> PackedTriple:
    """One storage kind for all three, because the native call takes one an expert."""
    w1, w2, w3 = weights
    if isinstance(w1, Packed):
        assert isinstance(w2, Packed) and isinstance(w3, Packed)
        return w1, w2, w3
    assert isinstance(w2, Tensor) and isinstance(w3, Tensor)
    first, second, third = packed(w1), packed(w2), packed(w3)
    if first.kind == second.kind == third.kind:
        return first, second, third
    return packed(w1, wide=True), packed(w2, wide=True), packed(w3, wide=True)
