"""Golden checkpoints: inventory equals their headers, and every value survives loading, saving and converting."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvist.checkpoint import build_model, compare, convert, is_base, load_model, open_checkpoint, save_checkpoint, verify
from kvist.checkpoint.tensors import TensorFiles
from kvist.config_json import load_config
from kvist.inventory import tensor_specs
from kvist.model.numerics import Numerics

MODEL_CASES = (
    "text-fp32",
    "text-bf16",
    "short-prompts",
    "dspark",
    "vision-two-images",
    "released-quirk",
)


@pytest.mark.golden_cases(*MODEL_CASES)
def test_inventory_equals_the_headers(golden_case):
    found = {}
    for file in golden_case.glob("model*.safetensors"):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                view = handle.get_slice(name)
                found[name] = (view.get_dtype(), tuple(view.get_shape()))
    expected = {spec.name: (spec.dtype, spec.shape) for spec in tensor_specs(load_config(golden_case))}
    assert found == expected
    assert compare(open_checkpoint(golden_case), load_config(golden_case)) == []


@pytest.mark.golden_cases("dspark", "vision-two-images")
def test_both_load_modes_read_the_bytes_that_safetensors_reads(golden_case):
    checkpoint = open_checkpoint(golden_case)
    mapped, read = TensorFiles(checkpoint, "mmap"), TensorFiles(checkpoint, "read")
    for file in checkpoint.files:
        for name, value in load_file(file).items():
            expected = value.contiguous().view(torch.uint8)
            for files in (mapped, read):
                raw = files.raw(name)
                assert raw.dtype == value.dtype
                assert torch.equal(raw.view(torch.uint8), expected), name


@pytest.mark.golden_cases("dspark", "vision-two-images")
def test_save_and_convert_keep_every_value(golden_case, tmp_path):
    """And that a model is a base model, which decides how it is served."""
    config, state = load_model(golden_case)
    values = dict(state.tensors) | {f"layers.{at}.engram.embed.weight": table for at, table in state.tables.items()}
    files = save_checkpoint(config, values, golden_case / "tokenizer.json", tmp_path / "saved", shard_bytes=1 << 20, base=True)
    assert len(files) > 2
    targets = {"saved": config}
    for weights, experts in (("bf16", "bf16"), ("keep", "fp8"), ("keep", "keep")):
        name = f"{weights}-{experts}"
        targets[name], _ = convert(golden_case, tmp_path / name, weights=weights, experts=experts)
    targets["back"], _ = convert(tmp_path / "bf16-bf16", tmp_path / "back", weights="fp8", experts="fp4")
    assert targets["back"] == config
    convert(tmp_path / "saved", tmp_path / "base", weights="bf16")
    assert {name for name in (*targets, "base") if is_base(tmp_path / name)} == {"saved", "base"}
    for name, target in targets.items():
        again, loaded = load_model(tmp_path / name)
        assert again == target
        assert verify(tmp_path / name).good
        for key, value in state.tensors.items():
            assert torch.equal(value.view(torch.int32), loaded.tensors[key].view(torch.int32)), (name, key)
        for at, table in state.tables.items():
            assert torch.equal(table.codes, loaded.tables[at].codes)
            assert torch.equal(table.scales, loaded.tables[at].scales)


@pytest.mark.golden_cases("dspark")
def test_a_kept_conversion_copies_bytes(golden_case, tmp_path):
    convert(golden_case, tmp_path / "copy")
    before, after = (TensorFiles(open_checkpoint(folder)) for folder in (golden_case, tmp_path / "copy"))
    assert before.checkpoint.entries.keys() == after.checkpoint.entries.keys()
    assert all(torch.equal(before.mapped(name), after.mapped(name)) for name in before.checkpoint.entries)


@pytest.mark.golden_cases("dspark", "vision-two-images")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_build_model_assigns_every_parameter(golden_case, dtype):
    model = build_model(golden_case, numerics=Numerics(dtype=dtype))
    recorded = load_file(golden_case / "expected.safetensors")["token_map"]
    assert torch.equal(model.token_classes_V, recorded.long())
    _, state = load_model(golden_case, dtype)
    held = model.state_dict()
    assert held.keys() == state.tensors.keys()
    for name, value in state.tensors.items():
        assert not held[name].is_meta
        assert torch.equal(held[name].double(), value.double()), name
    left = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    assert left == []


@pytest.mark.golden_cases("dspark")
def test_weights_are_exact_in_bfloat16(golden_case):
    _, wide = load_model(golden_case, torch.float32)
    _, narrow = load_model(golden_case, torch.bfloat16)
    for name, value in wide.tensors.items():
        assert torch.equal(value, narrow.tensors[name].float()), name
