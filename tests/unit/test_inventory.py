"""The inventory of the release against the published totals, and of the presets against the formats' own rules."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kvist.config import replace
from kvist.inventory import bytes_by_kind, count_parameters, parameters, tensor_specs
from kvist.presets import PRESETS, preset


@pytest.fixture(scope="module")
def release():
    return list(tensor_specs(preset("v41-flash")))


def test_release_has_the_published_number_of_tensors_and_bytes(release):
    assert len(release) == 96_085
    assert len({spec.name for spec in release}) == 96_085
    assert sum(spec.nbytes for spec in release) == 510_286_023_000


def test_release_parameters_by_part(release):
    counts = count_parameters(preset("v41-flash"))
    assert counts.backbone == 551_566_180_464
    assert counts.engram == 196_928_504_320
    assert counts.vision == 485_268_480
    assert counts.drafts == 14_225_362_530
    assert counts.total == 763_205_315_794 == sum(spec.parameters for spec in release)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("embed.weight", (129280, 5120), "BF16"),
        ("layers.0.hc_attn_fn", (24, 20480), "F32"),
        ("layers.39.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.39.attn.wo_a.scale", (256, 128), "F8_E8M0"),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), "F8_E8M0"),
        ("layers.7.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.7.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.7.ffn.gate.bias_vl", (384,), "F32"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.1.engram.q_weight", (4, 5120), "BF16"),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
        ("image_newline", (5120,), "BF16"),
    ],
)
def test_release_tensor(release, name, shape, dtype):
    found = [spec for spec in release if spec.name == name]
    assert [(spec.shape, spec.dtype) for spec in found] == [(shape, dtype)]


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.norm.weight",
        "mtp.1.main_proj.weight",
        "layers.0.engram.wkv.weight",
    ],
)
def test_release_lacks(release, name):
    assert name not in {spec.name for spec in release}


def test_partial_blocks_round_up():
    config = replace(preset("tiny"), n_heads=2, index_n_heads=1, o_lora_rank=20)
    specs = {spec.name: spec for spec in tensor_specs(config)}
    assert specs["layers.0.attn.wo_a.weight"].shape == (40, 32)
    assert specs["layers.0.attn.wo_a.scale"].shape == (2, 1)
    assert specs["layers.0.attn.wo_b.scale"].shape == (2, 2)


def test_converted_formats_change_storage_but_not_parameters():
    base = preset("tiny")
    wide = replace(base, dtype="bf16", expert_dtype="bf16")
    assert count_parameters(base) == count_parameters(wide)
    assert {spec.dtype for spec in tensor_specs(wide) if "engram.embed" not in spec.name} == {"BF16", "F32"}
    tables = [spec.dtype for spec in tensor_specs(wide) if "engram.embed.weight" in spec.name]
    assert tables == ["F8_E4M3", "F8_E4M3"]
    half = {spec.name: spec for spec in tensor_specs(replace(base, expert_dtype="fp8"))}
    assert half["layers.0.ffn.experts.0.w1.scale"].shape == (1, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_every_preset_is_counted_once(name):
    config = preset(name)
    specs = list(tensor_specs(config))
    assert len({spec.name for spec in specs}) == len(specs)
    assert sum(bytes_by_kind(specs).values()) == sum(p.nbytes for p in parameters(config))


def test_slim_has_the_release_widths_and_a_third_of_the_experts():
    slim, full = preset("v41-flash-slim"), preset("v41-flash")
    kinds = [bytes_by_kind(tensor_specs(config)) for config in (slim, full)]
    assert kinds[0]["experts"] * 3 == kinds[1]["experts"]
    assert all(kinds[0][kind] == kinds[1][kind] for kind in kinds[0] if kind not in ("experts", "router"))


def test_nano_fits_its_file():
    config = preset("nano")
    assert 22e6 <= count_parameters(config).total <= 26e6
    assert sum(spec.nbytes for spec in tensor_specs(config)) <= 23_400_000


def test_the_inventory_is_fast_and_needs_no_torch():
    code = (
        "import sys, kvist.inventory as i, kvist.presets as p\n"
        "assert sum(1 for _ in i.tensor_specs(p.preset('v41-flash'))) == 96085\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert time.perf_counter() - start < 20
