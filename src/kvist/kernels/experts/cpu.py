"""Experts by the native library: one call for all experts that a batch chose, and the shared one.

Must not know layers. Shapes as in `ref.py`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvist.kernels.experts.ref import ExpertBank, experts_ref
from kvist.kernels.native import Packed, f32, i64, native_or_none, packed, reference_runs, refuse_gradients, threads

SHARED_ID = -1


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
    chosen = [index for index in sorted(set(ids.flatten().tolist())) if index >= 0]
    triples = [_pack_expert(bank.expert(index)) for index in chosen]
    if shared is not None:
        chosen.append(SHARED_ID)
        triples.append(_pack_expert(shared))
    if not triples or not len(x):
        return torch.zeros_like(x)
    hidden = (shared or bank.expert(chosen[0]))[0].shape[0]
    count = len(triples)
    tables = (ctypes.c_void_p * (3 * count))(*[part.pointer for triple in triples for part in triple])
    numbers = (ctypes.c_int64 * count)(*chosen)
    kinds = (ctypes.c_int32 * count)(*[triple[0].kind for triple in triples])
    out_ND = torch.empty_like(x)
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
        threads(),
    )
    return out_ND


def _pack_expert(weights: tuple[Tensor, Tensor, Tensor]) -> tuple[Packed, Packed, Packed]:
    """One storage kind for all three, because the native call takes one an expert."""
    w1, w2, w3 = (packed(w) for w in weights)
    if w1.kind == w2.kind == w3.kind:
        return w1, w2, w3
    w1, w2, w3 = (packed(w, wide=True) for w in weights)
    return w1, w2, w3
