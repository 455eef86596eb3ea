"""Devices an engine cannot run on: each is refused by name, with what is needed and what runs instead, before any request."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from kvist.cli import app
from kvist.config import VisionConfig, replace
from kvist.engine import executor as choice
from kvist.engine.budget import EngineConfig, plan_memory
from kvist.engine.engine import Engine
from kvist.engine.errors import BudgetTooSmall
from kvist.engine.launch import LaunchOptions, launch
from kvist.engine.session import Session
from kvist.kernels.device import GpuUnavailable, interpreted, require, require_device
from kvist.kernels.device.cuda_source import CudaError
from kvist.model import numerics as model_numerics
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset

CONFIG = EngineConfig(pages=8, page_tokens=8, context=32, max_running=2)
runs_kernels = pytest.mark.skipif(interpreted(), reason="the interpreter runs kernels on any device")


@runs_kernels
@pytest.mark.parametrize("use", ["engine", "session"])
def test_a_model_for_the_card_without_one(use: str) -> None:
    model = random_model(preset("tiny"), Numerics(dtype=torch.bfloat16, impl="gpu"))
    with pytest.raises(GpuUnavailable, match="impl 'ref'"):
        Engine(model, CONFIG) if use == "engine" else Session(model)


@pytest.mark.parametrize(
    ("name", "error"), [("cuda:77", "sees .* CUDA devices; device cpu"), ("tpu", "give cpu, cuda"), ("meta", "none")]
)
def test_devices_that_are_not_here(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        require_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_is_missed_before_a_model_is_looked_for() -> None:
    with pytest.raises(GpuUnavailable, match="torch sees 0 CUDA devices"):
        launch("no-such-model", LaunchOptions(device="cuda"))


@pytest.mark.parametrize("capability", [(8, 0), (7, 5)])
def test_an_older_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(require, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    with pytest.raises(
        GpuUnavailable, match=rf"9\.0 \(Hopper\) or newer; Some Card has {capability[0]}\.{capability[1]}; impl 'ref'"
    ):
        require.require_gpu.__wrapped__()


@pytest.mark.parametrize("missing", ["Triton", "CUDA device"])
def test_what_the_card_needs(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing == "Triton" else object())
    monkeypatch.setattr(require, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuUnavailable, match=f"needs (a )?{missing}.*impl 'ref'"):
        require.require_gpu.__wrapped__()


@pytest.mark.parametrize(
    ("numerics", "error"),
    [
        (Numerics(impl="gpu"), "bfloat16, not torch.float32; use dtype bfloat16 or impl 'ref'"),
        (Numerics(impl="gpu", dtype=torch.bfloat16, quantise=False), "quantised models"),
        (Numerics(impl="gpu", dtype=torch.bfloat16, deterministic=True), "deterministic is kept on the CPU only"),
        (Numerics(deterministic=True), "deterministic is kept on the CPU only"),
    ],
    ids=["float32", "unquantised", "deterministic", "deterministic by torch"],
)
def test_numerics_that_a_card_does_not_keep(monkeypatch: pytest.MonkeyPatch, numerics: Numerics, error: str) -> None:
    monkeypatch.setattr(model_numerics, "require_gpu", lambda: None)
    with pytest.raises(ValueError, match=error):
        numerics.check_device(torch.device("cuda"))


@pytest.mark.parametrize(("impl", "short"), [("ref", 1), ("ref", 0), ("gpu", 1), ("gpu", 0)])
def test_less_memory_than_planned(monkeypatch: pytest.MonkeyPatch, impl: str, short: int) -> None:
    """Counted before anything is allocated; packed weights count, memory that torch holds and does not use is free."""
    model = random_model(preset("tiny"), Numerics(dtype=torch.bfloat16, impl=impl))
    plan = plan_memory(model.config, CONFIG, dtype_bytes=2)
    packed = sum(weight.nbytes for weight in model.parameters()) // 2 if impl == "gpu" else 0
    enough = plan.total_bytes + packed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (enough - short - 1000, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4000)
    if not short:
        choice.require_room(model, plan, torch.device("cuda"))
        return
    with pytest.raises(BudgetTooSmall, match=f"{enough - 1:,} bytes free .* needs {plan.total_bytes:,}.*lower memory_bytes"):
        choice.require_room(model, plan, torch.device("cuda"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        OSError("libcuda.so.1: no such file"),
        CudaError("a kernel's code: device kernel image is invalid"),
        ValueError("544 channels"),
    ],
)
def test_a_kernel_that_does_not_build(error: Exception) -> None:
    def warm() -> None:
        raise error

    with pytest.raises(GpuUnavailable, match=f"cuda:0: {error}; impl 'ref' runs it") as refusal:
        choice.warmed(SimpleNamespace(device=torch.device("cuda:0"), warm=warm))
    assert refusal.value.__cause__ is error


def test_a_named_refusal_stays_what_it_is() -> None:
    named = GpuUnavailable("no compiler; impl 'ref' runs without it")

    def warm() -> None:
        raise named

    with pytest.raises(GpuUnavailable) as refusal:
        choice.warmed(SimpleNamespace(device=torch.device("cuda:0"), warm=warm))
    assert refusal.value is named


def test_models_that_the_cards_runner_does_not_take() -> None:
    tiny = preset("tiny")
    assert choice.lacks(random_model(tiny, Numerics())) is None
    vision = VisionConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    seeing = random_model(replace(tiny, vision=vision, image_token_id=3), Numerics())
    assert "pictures" in str(choice.lacks(seeing))
    nothing = dict.fromkeys(("kv_source_layers", "index_source_layers", "candidate_source_layers"), ())
    window_only = replace(tiny, compress_ratios=(0,) * len(tiny.compress_ratios), **nothing)
    assert "no decoder half" in str(choice.lacks(random_model(window_only, Numerics())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "nano", "--prompt", "x", "--impl", "gpu", "--dtype", "bfloat16"],
        ["serve", "nano", "--", "--impl", "gpu", "--dtype", "bfloat16", "--port", "0"],
        ["conformance", "--device", "cuda"],
    ],
    ids=lambda command: command[0],
)
def test_commands_say_it_in_one_line(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert "is not here: torch sees 0 CUDA devices" in str(result.exception)
