"""Routing by the native library: projection, scores, choice and weights in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.native import empty, f32, native_or_none, packed, refuse_gradients, threads
from kvist.kernels.routing.ref import route_ref


def route_cpu(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_text_E: Tensor,
    bias_image_E: Tensor,
    text_N: Tensor,
    *,
    k: int,
    temperature: float,
    normalise: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """See `route`. A non-finite row gets id -1 where no finite score is left."""
    native = native_or_none()
    if native is None:
        return route_ref(
            x_ND,
            gate_ED,
            bias_text_E,
            bias_image_E,
            text_N,
            k=k,
            temperature=temperature,
            normalise=normalise,
            scale=scale,
            impl=impl,
        )
    refuse_gradients(x_ND, gate_ED)
    x, gate, text = f32(x_ND), packed(gate_ED), text_N.contiguous()
    bias_text, bias_image = f32(bias_text_E), f32(bias_image_E)
    n, (experts, inputs) = len(x), gate_ED.shape
    ids_NK, weights_NK = torch.empty(n, k, dtype=torch.int64), empty(n, k)
    native.kvist_route(
        x.data_ptr(),
        n,
        gate.pointer,
        gate.kind,
        experts,
        inputs,
        bias_text.data_ptr(),
        bias_image.data_ptr(),
        text.data_ptr(),
        k,
        temperature,
        normalise,
        scale,
        ids_NK.data_ptr(),
        weights_NK.data_ptr(),
        threads(),
    )
    return ids_NK, weights_NK
