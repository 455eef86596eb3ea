"""Libraries that are measured beside our GPU operators in the same run. None is a dependency; each is absent with a reason.

Knows how to call them, not what is measured. `humming-kernels` is a wheel compiled on demand (needs CUDA_HOME).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_weights import released_fp4
from kvist.kernels.device import PanelWeight


def humming_absent() -> str | None:
    """Why Humming cannot be measured here, or None."""
    return None if importlib.util.find_spec("humming") is not None else "humming-kernels is not installed"


def humming_experts(weight: PanelWeight) -> Callable[[Tensor, Tensor], Tensor]:
    """(rows grouped by expert [M,K] bfloat16, first row of each expert int64 [E+1]) -> [M,R]: MXFP4 x bfloat16."""
    layer_type: Any = importlib.import_module("humming.layer").HummingLayer
    layer = layer_type(
        shape_n=weight.outputs,
        shape_k=weight.inputs,
        weight_config={"quant_method": "mxfp4"},
        num_experts=weight.experts,
        torch_dtype=torch.bfloat16,
    ).cuda()
    codes, scales = released_fp4(weight)
    layer.load_from_tensors({"weight": codes, "weight_scale": scales})
    del codes, scales
    layer.transform()
    config = {"gemm_type": "grouped_contiguous"}

    def run(x_MK: Tensor, offsets: Tensor) -> Tensor:
        return layer(x_MK, expert_layout=offsets, compute_config=config)

    return run
