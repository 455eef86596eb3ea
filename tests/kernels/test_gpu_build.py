"""Builds the GPU operators for Hopper at the released shapes: no local memory, matrix instructions, words loaded wide.

Needs Triton but no GPU (the compiler and ptxas run anywhere); skips without Triton or under its interpreter and says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvist.kernels.device import PanelWeight, require
from kvist.kernels.device.panels import Form
from kvist.kernels.hyper_connections import Mix

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler (no GPU), not its interpreter",
)
D, F, EXPERTS = 5120, 2304, 2
MODULES = ("experts", "linear", "hyper_connections", "routing", "quantise", "engram")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators take CPU tensors (nothing is launched) and choose what a GPU would run."""
    sys.path.insert(0, str(Path(__file__).parent))
    monkeypatch.setattr(require, "interpreted", lambda: True)
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"kvist.kernels.{name}.gpu"), "PLAIN", False)
    yield
    require.require_gpu.cache_clear()
    sys.path.remove(str(Path(__file__).parent))


def panels(form: Form, outputs: int, inputs: int, *, experts: int = 1, paired: bool = False) -> PanelWeight:
    """Room for a weight; nothing reads it."""
    chunks = -(-inputs // (128 if form == "fp4" else 64))
    codes = torch.empty(experts, outputs // 64, chunks, 64, 32, dtype=torch.int16)
    scales = torch.empty(experts, outputs // 64, chunks, 64 if form == "fp4" else 1, dtype=torch.int32)
    return PanelWeight(codes, scales, outputs, inputs, form, paired)


def rows(n: int, width: int) -> torch.Tensor:
    return torch.empty(n, width, dtype=torch.bfloat16)


@pytest.mark.parametrize("form", ["fp4", "fp8"])
@pytest.mark.parametrize("n", [1, 4096])
def test_experts(n: int, form: Form) -> None:
    from hopper import building

    from kvist.kernels.experts.gpu import GpuBank, run_bank

    bank = GpuBank(
        panels(form, 2 * F, D, experts=EXPERTS, paired=True), panels(form, D, F, experts=EXPERTS)
    )  # fmt: skip
    with building() as built:
        run_bank(rows(n, D), torch.zeros(n, 6, dtype=torch.int64), torch.zeros(n, 6), bank, 10.0, "fp8")
    kernels = {kernel.name: kernel for kernel in built}
    assert {"_gate_up", "_down"} <= set(kernels)
    for name in ("_gate_up", "_down"):
        assert kernels[name].local_bytes == 0
        sass = kernels[name].sass()
        assert "HMUL2.BF16" in sass
        assert ("HGMMA" in sass) if n > 1 else ("HMMA" in sass or "HGMMA" in sass)


@pytest.mark.parametrize("n", [1, 16, 4096])
def test_linear(n: int) -> None:
    from hopper import building

    from kvist.kernels.linear.gpu import cut_for, product_gpu

    for outputs, inputs, groups in ((1792, 5120, 1), (8192, 4096, 8)):
        weight = panels("fp8", outputs, inputs)
        with building() as built:
            product_gpu(rows(n, groups * inputs), weight, groups, cut_for(n, weight, groups))
        assert [kernel.local_bytes for kernel in built] == [0]


@pytest.mark.parametrize("n", [1, 64, 4096])
def test_streams_and_routing(n: int) -> None:
    from hopper import building

    from kvist.kernels.hyper_connections.gpu import leave_gpu, pass_gpu
    from kvist.kernels.routing.gpu import route_gpu

    mix = Mix(torch.empty(n, 4), torch.empty(n, 4), torch.empty(n, 4, 4))
    weights = torch.empty(24, 4 * D), torch.empty(24), torch.empty(3), torch.empty(D)
    y, x = rows(n, D), torch.empty(n, 4, D, dtype=torch.bfloat16)
    bias, text = torch.empty(384), torch.empty(n, dtype=torch.bool)
    with building() as built:
        pass_gpu(y, x, mix, *weights, iterations=20, hc_eps=1e-6, norm_eps=1e-20, quantised=True)
        leave_gpu(y, x, mix)
        route_gpu(rows(n, D), rows(384, D), bias, bias, text, k=6, temperature=1.0, normalise=True, scale=1.5)
    assert [kernel.local_bytes for kernel in built] == [0] * 5


def test_rows() -> None:
    from hopper import building

    from kvist.kernels.quantise.gpu import rows_gpu, write_rows

    place = torch.zeros(4, dtype=torch.int32)
    table = torch.empty(4, 32), torch.empty(4, 32)
    with building() as built:
        rows_gpu(rows(4, D), form="fp8", norm=(torch.empty(D), 1e-20))
        for form, width, code, scale in (("fp8", 512, 512, 16), ("main_fp4", 512, 256, 32), ("mxfp4", 128, 64, 4)):
            codes, scales = (torch.empty(2, 8, size, dtype=torch.uint8) for size in (code, scale))
            write_rows(rows(4, width), codes, scales, place, place, form=form, norm=(torch.empty(width), 1e-20), table=table)
    assert [kernel.local_bytes for kernel in built] == [0] * 4


@pytest.mark.parametrize("n", [1, 16])
def test_engram(n: int) -> None:
    from hopper import building

    from kvist.kernels.engram.gpu import HashTables, StoredRows, add_memory, gather_rows

    ids, tables = torch.zeros(n, dtype=torch.int64), torch.ones(24, dtype=torch.int64)
    text = torch.ones(n, dtype=torch.bool)
    hashes = HashTables(torch.ones(4, dtype=torch.int64), tables, tables, 7)
    stored = StoredRows(torch.empty(64, 256, dtype=torch.uint8), torch.empty(64, 8, dtype=torch.uint8))
    with building() as built:
        gather_rows(ids, ids, ids, text, ids, torch.zeros(2, 4, dtype=torch.int64), ids, hashes, stored, 8)
        add_memory(torch.empty(n, 4, D, dtype=torch.bfloat16), rows(n, 5 * D), torch.empty(4, D), text, 1e-20)
    assert [kernel.local_bytes for kernel in built] == [0, 0]


@pytest.mark.parametrize("n", [1, 64])
def test_ends_of_a_step(n: int) -> None:
    """Places, embedded streams and their means, groups, classes, best ids."""
    from hopper import building

    from kvist.kernels.best_token.gpu import best_token_gpu
    from kvist.kernels.engram.gpu import keep_classes
    from kvist.kernels.group_pool.gpu import pool_rows_gpu
    from kvist.kernels.row_places.gpu import row_places_gpu
    from kvist.kernels.streams.gpu import embed_streams_gpu, mean_streams_gpu

    at, logits = torch.zeros(n, dtype=torch.int64), torch.empty(n, 129280)
    sizes = {"ratios": (1, 2), "window": 128, "cells": 134, "page_tokens": 128, "heads": 32}
    with building() as built:
        row_places_gpu(at, at, torch.zeros(2, 64, dtype=torch.int32), torch.empty(2, 32), **sizes)  # type: ignore[arg-type]
        x_NSD = embed_streams_gpu(at, rows(64, D), 4)
        mean_streams_gpu(x_NSD, torch.empty(n, 3 * D, dtype=torch.bfloat16), D)
        pool_rows_gpu(torch.empty(n, 1024), torch.empty(2, 9, 2, 512), at, at, at, 2, (torch.empty(512), 1e-20))
        keep_classes(at, at, torch.ones(n, dtype=torch.bool), at, torch.zeros(2, 9, dtype=torch.int64), at)
        best_token_gpu(logits, None)
        best_token_gpu(logits, (rows(n, 256), rows(129280, 256)))
    # Large angles are reduced exactly, which keeps a few words of the quotient in local memory.
    assert built[0].local_bytes <= 32
    assert [kernel.local_bytes for kernel in built[1:]] == [0] * 6


@pytest.mark.parametrize("n", [1, 16])
def test_thin_products(n: int) -> None:
    from hopper import building

    from kvist.kernels.linear.thin_triton import thin_gpu

    with building() as built:
        for inputs, outputs, wide in ((D, 32, False), (D, 1024, True), (D, 512, False), (512, 128, False)):
            thin_gpu(rows(n, inputs), rows(outputs, inputs), wide=wide)
    assert [kernel.local_bytes for kernel in built] == [0] * len(built)
