"""How numbers are computed: dtype, which implementation of each operator, and where quantisers stand.

Owns `Numerics`, which every module of the model holds. Must not know layers or caches. Design section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.kernels.device import GpuUnavailable, interpreted, require_gpu
from kvist.kernels.native import native_or_none
from kvist.kernels.quantise import quantise
from kvist.quant import (
    dequantise_fp4_weight,
    dequantise_fp8_weight,
    quantise_fp4_weight,
    quantise_fp8_weight,
    straight_through,
)

IMPLS = ("ref", "wide", "cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """One choice for a whole model.

    `dtype`: float32 or bfloat16 of activations and stored weights. `deterministic`: a row's bits never depend on what
    shares its batch or chunk. `quantise`: activations and caches pass the released quantisers (straight-through when
    gradients flow). `quantise_weights`: weights too, for training towards the released format. `impl`: `ref`, `wide` (sums
    in float64, for judging) or the name of a faster set of operators, inference only (`cpu`: native code; `gpu`: Triton and CUDA
    on a Hopper card, bfloat16). Native float32
    operators sum a row in one order whatever shares the call, so `deterministic` costs them nothing; elsewhere it runs the
    reference on tiles of one size. `whole_peaks`: see `sparse_attention`; for references that judge `gpu`.
    """

    dtype: torch.dtype = torch.float32
    deterministic: bool = False
    quantise: bool = True
    quantise_weights: bool = False
    impl: str = "ref"
    whole_peaks: bool = False

    def __post_init__(self) -> None:
        if self.impl not in IMPLS:
            raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {self.impl!r}")

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError where this cannot run: `deterministic` on a GPU (torch's sums there depend on the shape of the call),
        `gpu` elsewhere (GpuUnavailable, which says what is missing), or in float32.
        """
        if self.impl == "gpu":
            require_gpu()
            if device.type != "cuda" and not interpreted():
                raise GpuUnavailable(
                    f"impl 'gpu' runs on a CUDA device, the model is on {device}; load it there, or use impl 'ref'"
                )
            if self.dtype is not torch.bfloat16 or not self.quantise:
                raise ValueError(
                    f"impl 'gpu' runs quantised models in bfloat16, not {self.dtype}; use dtype bfloat16 or impl 'ref'"
                )
        if self.deterministic and device.type != "cpu":
            raise ValueError(f"deterministic is kept on the CPU only, the model is on {device}; load it on the CPU or without it")

    @property
    def product_impl(self) -> str:
        """Implementation of row products (linear layers, experts, hyper-connection projections)."""
        return "rows16" if self.in_tiles else self.impl

    @property
    def wide_impl(self) -> str:
        """Implementation of products of float32 rows: the card's own take bfloat16 only, so there they are torch's."""
        return "ref" if self.impl == "gpu" else self.product_impl

    @property
    def query_impl(self) -> str:
        """Implementation of query-wise operators (attention, index selection)."""
        return "rows" if self.in_tiles else self.impl

    @property
    def in_tiles(self) -> bool:
        """Whether `deterministic` needs the reference on tiles: not where native float32 code runs every operator."""
        native = self.impl == "cpu" and self.dtype is torch.float32 and native_or_none() is not None
        return self.deterministic and not native

    @property
    def row_impl(self) -> str:
        """Implementation of operators in which rows never meet (norms, rotation, quantisers)."""
        return "cpu" if self.product_impl == "cpu" else "ref"

    @property
    def format_impl(self) -> str:
        """Implementation of quantisers and norms, which all three kinds of operators have."""
        return "gpu" if self.product_impl == "gpu" else self.row_impl

    @property
    def activation_form(self) -> str | None:
        """The quantiser of a linear layer's input by name, None without quantisers."""
        return "fp8" if self.quantise else None

    def activation(self, x: Tensor) -> Tensor:
        """FP8 fake quantisation of a linear layer's input and of window entries (groups of 32)."""
        return quantise(x, "fp8", impl=self.format_impl) if self.quantise else x

    def index(self, x: Tensor) -> Tensor:
        """MXFP4 fake quantisation of index queries and keys (groups of 32)."""
        return quantise(x, "mxfp4", impl=self.format_impl) if self.quantise else x

    def main(self, x: Tensor) -> Tensor:
        """FP4 fake quantisation of main rows (groups of 16, E4M3 scale)."""
        return quantise(x, "main_fp4", impl=self.format_impl) if self.quantise else x

    def fp8_weight(self, w: Tensor) -> Tensor:
        """A weight as the FP8 32x32 format holds it, when training towards it."""
        return straight_through(_through_fp8, w) if self.quantise_weights else w

    def fp4_weight(self, w: Tensor) -> Tensor:
        """A weight as the FP4 1x32 format holds it, when training towards it."""
        return straight_through(_through_fp4, w) if self.quantise_weights else w


def _through_fp8(w: Tensor) -> Tensor:
    codes, scales = quantise_fp8_weight(w)
    return dequantise_fp8_weight(codes, scales, w.dtype)


def _through_fp4(w: Tensor) -> Tensor:
    packed, scales = quantise_fp4_weight(w)
    return dequantise_fp4_weight(packed, scales, w.dtype)
