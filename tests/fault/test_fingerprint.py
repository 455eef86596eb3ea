"""The model fingerprint: KVP-01. What changes the cache's bytes changes it; how the files are cut does not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvist.checkpoint import CheckpointMismatch, open_checkpoint, save_checkpoint
from kvist.checkpoint.fingerprint import END_BYTES, fingerprint
from kvist.config import ConfigError, ModelConfig, replace
from kvist.inventory import parameters
from kvist.presets import preset

CONFIG = replace(
    preset("tiny"),
    vocab_size=2048,
    n_layers=3,
    compress_ratios=(0, 2, 1),
    kv_source_layers=(1, 2),
    index_source_layers=(1, 2),
    candidate_source_layers=(),
    n_routed_experts=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(660,),
    n_mtp_layers=0,
    dspark_target_layer_ids=(),
)


def save(folder: Path, config: ModelConfig = CONFIG, seed: int = 0, shard_bytes: int = 1 << 30) -> Path:
    generator = torch.Generator().manual_seed(seed)
    values = {p.name: torch.randn(p.shape, generator=generator) for p in parameters(config)}
    save_checkpoint(config, values, None, folder, shard_bytes=shard_bytes)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("fingerprint") / "model")


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def flip(folder: Path, name: str, at: int) -> None:
    """Change one byte of a tensor; a negative place counts from its end."""
    entry = open_checkpoint(folder).entries[name]
    with entry.file.open("r+b") as handle:
        offset = entry.offset + at % entry.nbytes
        byte = os.pread(handle.fileno(), 1, offset)[0]
        os.pwrite(handle.fileno(), bytes([byte ^ 1]), offset)


def edit(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    target = config.get("text_config", config)
    assert set(changes) <= set(target)
    target.update(changes)
    file.write_text(json.dumps(config))


def test_a_copy_is_the_same_model(pristine, folder) -> None:
    assert len(fingerprint(folder)) == 32
    assert fingerprint(folder) == fingerprint(pristine)


def test_shards_and_the_text_of_the_configuration_do_not_matter(pristine, tmp_path) -> None:
    other = save(tmp_path / "sharded", shard_bytes=1 << 18)
    assert len(open_checkpoint(other).files) > len(open_checkpoint(pristine).files)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config, indent=7, sort_keys=True))
    assert fingerprint(other) == fingerprint(pristine)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit(folder, rope_theta=10001.0),
        lambda folder: edit(folder, compress_rope_theta=160001.0),
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}'),
        lambda folder: (folder / "tokenizer.json").unlink(),
    ],
)
def test_kvp_01_configuration_and_tokenizer_enter(pristine, folder, change: Callable[[Path], object]) -> None:
    change(folder)
    assert fingerprint(folder) != fingerprint(pristine)


def test_kvp_01_other_weights_of_the_same_shape(pristine, tmp_path) -> None:
    assert fingerprint(save(tmp_path / "other", seed=1)) != fingerprint(pristine)


@pytest.mark.parametrize("at", [0, -1])
def test_kvp_01_either_end_of_every_tensor_enters(pristine, folder, at: int) -> None:
    seen = {fingerprint(pristine)}
    entries = open_checkpoint(folder).entries
    for name in sorted(entries)[::7]:
        flip(folder, name, at)
        seen.add(fingerprint(folder))
    assert len(seen) == 1 + len(sorted(entries)[::7])


def test_kvp_01_all_of_a_small_tensor_and_the_ends_of_a_large_one(folder) -> None:
    entries = open_checkpoint(folder).entries
    large = max(entries.values(), key=lambda entry: entry.nbytes)
    small = next(entry for entry in entries.values() if 1000 < entry.nbytes <= 2 * END_BYTES)
    assert large.nbytes > 2 * END_BYTES, "the model is too small for this test"
    before = fingerprint(folder)
    flip(folder, small.name, small.nbytes // 2)
    assert fingerprint(folder) != before
    before = fingerprint(folder)
    flip(folder, large.name, END_BYTES - 1)
    assert fingerprint(folder) != before
    before = fingerprint(folder)
    flip(folder, large.name, END_BYTES)
    assert fingerprint(folder) == before, "the middle is the verifier's"


def test_another_dtype_of_equal_bytes_enters(pristine, folder) -> None:
    file = open_checkpoint(folder).files[0]
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if tensors[name].dtype == torch.float32)
    tensors[name] = tensors[name].view(torch.int32)
    save_file(tensors, file)
    assert fingerprint(folder) != fingerprint(pristine)


def test_bad_folders_are_named(folder) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        fingerprint(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises((ConfigError, CheckpointMismatch)):
        fingerprint(folder)
