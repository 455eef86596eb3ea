"""Fake quantisation of activations and cache rows: the formats of `kvist.quant` by name.

Implementations: `ref` (torch), `cpu` (native) and `gpu` (Triton), the same bits.
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.quantise.cpu import quantise_cpu
from kvist.quant import fake_fp8, fake_main_fp4, fake_mxfp4, straight_through

_REFERENCES = {"fp8": fake_fp8, "mxfp4": fake_mxfp4, "main_fp4": fake_main_fp4}


def quantise(x: Tensor, form: str, *, impl: str = "ref") -> Tensor:
    """Round [..., d] to `fp8`, `mxfp4` or `main_fp4`; same shape and dtype. `ref` passes gradients straight through.

    Raises ValueError for an unknown format or `impl`, or if d is not a multiple of the format's group.
    """
    reference = _REFERENCES.get(form)
    if reference is None:
        raise ValueError(f"unknown format {form!r}; known: {', '.join(_REFERENCES)}")
    if impl == "cpu":
        return quantise_cpu(x, form, reference)
    if impl == "gpu":
        require_gpu()
        from kvist.kernels.quantise.gpu import rows_gpu

        return rows_gpu(x, form=form)
    if impl == "ref":
        return straight_through(reference, x)
    raise ValueError(f"quantise has no impl {impl!r}; known: ref, cpu, gpu")
