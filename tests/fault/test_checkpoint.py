"""Broken checkpoints: each is refused by name, in both load modes alike, before anything is allocated (CKP, QNT cases)."""

from __future__ import annotations

import json
import resource
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvist.checkpoint import (
    CheckpointMismatch,
    build_model,
    inspect,
    load_model,
    open_checkpoint,
    save_checkpoint,
    verify,
)
from kvist.checkpoint.formats import INDEX_NAME
from kvist.checkpoint.tensors import TensorFiles
from kvist.config import ConfigError, ModelConfig, replace
from kvist.inventory import Parameter, Storage, parameters
from kvist.presets import preset

CONFIG = replace(
    preset("tiny"),
    n_layers=3,
    compress_ratios=(0, 2, 1, 0),
    kv_source_layers=(1, 2),
    index_source_layers=(1, 2),
    candidate_source_layers=(),
    n_routed_experts=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(660,),
    n_mtp_layers=1,
    dspark_target_layer_ids=(2,),
    dspark_n_routed_experts=2,
)


def random_values(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.shape, generator=generator) for p in parameters(config)}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A checkpoint in three shards."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    payload = sum(parameter.nbytes for parameter in parameters(CONFIG))
    files = save_checkpoint(CONFIG, random_values(CONFIG), None, folder, shard_bytes=payload * 2 // 5)
    assert len(files) == 3, files
    return folder


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "model"))


def refused(folder: Path) -> str:
    """The message with which every way of loading refuses, after showing that they agree and none allocates much."""
    messages = set()
    tracemalloc.start()
    for access in ("mmap", "read"):
        for engram in ("mmap", "memory"):
            with pytest.raises(CheckpointMismatch) as error:
                load_model(folder, access=access, engram=engram)
            messages.add(str(error.value))
    with pytest.raises(CheckpointMismatch) as error:
        build_model(folder, classes=torch.zeros(256, dtype=torch.int64))
    messages.add(str(error.value))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20
    assert len(messages) == 1, messages
    assert not verify(folder).good
    return messages.pop()


def edit_header(file: Path, change) -> None:
    """Rewrite a shard's header in place (the data stays), as a hostile writer would."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    encoded = (json.dumps(header) if text is None else text).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])


def tensors_of(file: Path) -> dict[str, Tensor]:
    return dict(load_file(file))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def test_the_pristine_one_loads(folder):
    report = verify(folder)
    assert report.good
    assert report.files
    assert {row.file.name for row in report.files} == {file.name for file in folder.iterdir()}
    assert inspect(folder, "layers.0.*").findings == ()
    config, state = load_model(folder)
    assert config == CONFIG
    assert set(state.tables) == {1}


# CKP-02


def test_a_missing_shard_is_named(folder):
    shard(folder, 2).unlink()
    message = refused(folder)
    assert f"missing shard {shard(folder, 2)}" in message
    assert "the index says holds" in message


def test_without_an_index_shards_are_scanned(folder):
    expected = load_model(folder)[1].tensors
    (folder / INDEX_NAME).unlink()
    found = load_model(folder)[1].tensors
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_without_an_index_a_missing_shard_is_still_noticed(folder):
    (folder / INDEX_NAME).unlink()
    shard(folder, 3).unlink()
    assert f"missing shard {shard(folder, 3)}" in refused(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["norm.weight"] = shard(folder, 1).name
    index["weight_map"]["layers.9.attn.wkv.weight"] = shard(folder, 2).name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    message = refused(folder)
    assert f"names tensor 'norm.weight' in {shard(folder, 1)}, but it is in" in message
    assert "names tensor 'layers.9.attn.wkv.weight'" in message
    assert "no shard holds it" in message


def test_a_tensor_that_the_index_forgot(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    del index["weight_map"]["norm.weight"]
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert "tensor 'norm.weight'" in refused(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "config.json", 7, ""])
def test_an_index_may_only_name_shards_of_its_folder(folder, place):
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["norm.weight"] = place
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert "expected the plain name of a shard" in refused(folder)


def test_a_folder_without_weights(folder):
    for file in folder.glob("model*"):
        file.unlink()
    assert "holds neither" in refused(folder)


def test_shards_of_two_checkpoints(folder):
    (folder / INDEX_NAME).unlink()
    shutil.copy(shard(folder, 1), folder / "model-00001-of-00002.safetensors")
    assert "several checkpoints" in refused(folder)


# CKP-04


def test_trailing_bytes(folder):
    with shard(folder, 2).open("ab") as handle:
        handle.write(b"\0" * 8)
    message = refused(folder)
    assert str(shard(folder, 2)) in message
    assert "8 bytes follow" in message


def test_truncated_shard_names_the_tensor(folder):
    file = shard(folder, 3)
    last = list(open_checkpoint(folder).entries.values())[-1]
    assert last.file == file
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    message = refused(folder)
    assert f"truncated: tensor {last.name!r} {last.dtype} {list(last.shape)}" in message
    assert str(file) in message


@pytest.mark.parametrize("size", [0, 7, 8, 30])
def test_a_file_cut_within_its_header(folder, size):
    with shard(folder, 1).open("r+b") as handle:
        handle.truncate(size)
    assert "truncated or no safetensors file" in refused(folder)


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1])
def test_absurd_header_length(folder, length):
    with shard(folder, 1).open("r+b") as handle:
        handle.write(length.to_bytes(8, "little"))
    assert f"said to have {length} bytes" in refused(folder)


def test_overlapping_tensors(folder):
    def overlap(header):
        names = [name for name in header if name != "__metadata__"]
        for name in names:
            for other in names:
                a, b = header[name], header[other]
                if name < other and a["dtype"] == b["dtype"] and a["shape"] == b["shape"]:
                    b["data_offsets"] = list(a["data_offsets"])
                    return
        raise AssertionError("no two tensors of equal shape")

    edit_header(shard(folder, 1), overlap)
    assert "overlaps" in refused(folder)


def test_a_gap_between_tensors(folder):
    def drop(header):
        del header[next(name for name in header if name != "__metadata__")]

    edit_header(shard(folder, 1), drop)
    assert "leaves a gap after the header" in refused(folder)


def test_the_same_name_twice_in_a_header(folder):
    def repeat(header):
        name = next(name for name in header if name != "__metadata__")
        return json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}'

    edit_header(shard(folder, 1), repeat)
    assert "appears twice" in refused(folder)


def test_the_same_tensor_in_two_shards(folder):
    more = tensors_of(shard(folder, 2)) | {"embed.weight": tensors_of(shard(folder, 1))["embed.weight"]}
    save_file(more, shard(folder, 2))
    message = refused(folder)
    assert "tensor 'embed.weight' is in" in message
    assert "and again in" in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "F4"}, "unknown dtype 'F4'"),
        ({"dtype": ["BF16"]}, "unknown dtype"),
        ({"shape": [256, -64]}, "has shape"),
        ({"shape": [256, 64.0]}, "has shape"),
        ({"shape": [True, 64]}, "has shape"),
        ({"shape": [1 << 62, 1 << 62]}, "its offsets"),
        ({"shape": [1 << 63, 0]}, "has shape"),
        ({"shape": [1] * 100_000}, "at most 16 axes"),
        ({"shape": "x" * 100_000}, "has shape"),
        ({"dtype": "x" * 100_000}, "unknown dtype"),
        ({"data_offsets": [10, 2]}, "its offsets"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"extra": 1}, "needs exactly dtype, shape and data_offsets"),
    ],
)
def test_malformed_header_entries(folder, change, reason):
    edit_header(shard(folder, 1), lambda header: header["embed.weight"].update(change))
    message = refused(folder)
    assert "'embed.weight'" in message
    assert reason in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", ["n" * 1_000_000, "\x1b[31m" * 1000])
def test_a_name_without_end_is_not_printed(folder, name):
    edit_header(shard(folder, 1), lambda header: header.update({name: header.pop("embed.weight")}))
    message = refused(folder)
    assert f"a name of {len(name)} characters; at most 512" in message
    assert len(message) < 1000
    assert "\x1b" not in message


def test_a_header_larger_than_any_is_refused_unread(folder):
    """Within the file's size, but parsing a hundred megabytes of keys would take half a minute and gigabytes."""
    with shard(folder, 1).open("r+b") as handle:
        handle.write((90_000_000).to_bytes(8, "little"))
        handle.truncate(100_000_000)
    assert "said to have 90000000 bytes" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "{", "\ud800", "[" * 20000, '{"a": 1}', "nul", '{"a": ' + "9" * 5000 + "}"])
def test_headers_that_are_no_objects(folder, text):
    raw = text.encode("utf-8", "surrogatepass")
    shard(folder, 1).write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert str(shard(folder, 1)) in refused(folder)


# Contents against the configuration


def rewrite(folder: Path, name: str, value: Tensor | None, new_name: str | None = None) -> Path:
    """Replace a tensor, keeping container and index consistent."""
    index = json.loads((folder / INDEX_NAME).read_text())
    file = folder / index["weight_map"].pop(name)
    tensors = tensors_of(file)
    old = tensors.pop(name)
    if value is not None or new_name is not None:
        tensors[new_name or name] = old if value is None else value
        index["weight_map"][new_name or name] = file.name
    save_file(tensors, file)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return file


def test_a_missing_tensor(folder):
    rewrite(folder, "layers.0.attn.wkv.scale", None)
    message = refused(folder)
    assert f"missing tensor 'layers.0.attn.wkv.scale': expected F8_E8M0 [1, 2] in {folder}" in message


def test_an_extra_tensor(folder):
    index = json.loads((folder / INDEX_NAME).read_text())
    file = shard(folder, 1)
    save_file(tensors_of(file) | {"layers.9.surprise": torch.ones(2)}, file)
    index["weight_map"]["layers.9.surprise"] = file.name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert f"extra tensor 'layers.9.surprise': F32 [2] in {file}" in refused(folder)


def test_a_flipped_shape(folder):
    name = "layers.0.attn.wq_b.weight"
    file = rewrite(folder, name, torch.zeros(32, 128).to(torch.float8_e4m3fn))
    message = refused(folder)
    assert f"misshapen tensor {name!r}: expected F8_E4M3 [128, 32], found F8_E4M3 [32, 128] in {file}" in message


def test_a_renamed_tensor_is_both_missing_and_extra(folder):
    rewrite(folder, "norm.weight", None, "model.norm.weight")
    message = refused(folder)
    assert "missing tensor 'norm.weight'" in message
    assert "extra tensor 'model.norm.weight'" in message


def test_qnt_06_a_scale_stored_as_numbers_is_refused(folder):
    name = "layers.0.attn.wkv.scale"
    expected = load_model(folder)[1].tensors["layers.0.attn.wkv.weight"]
    assert expected.abs().max() < 100
    file = rewrite(folder, name, torch.full((1, 2), 119, dtype=torch.uint8))
    assert f"wrong dtype tensor {name!r}: expected F8_E8M0 [1, 2], found U8 [1, 2] in {file}" in refused(folder)
    rewrite(folder, name, torch.full((1, 2), 119, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    loaded = load_model(folder)[1].tensors["layers.0.attn.wkv.weight"]
    codes = TensorFiles(open_checkpoint(folder)).raw("layers.0.attn.wkv.weight").float()
    assert torch.equal(loaded, codes * 2.0**-8)


def test_qnt_08_partial_blocks_through_a_file(tmp_path):
    parameter = Parameter("w.weight", (100, 70), Storage.FP8, "attention")
    exponents = torch.arange(12, dtype=torch.uint8).view(4, 3) + 121
    values = torch.ones(100, 70).to(torch.float8_e4m3fn)
    save_file({"w.weight": values, "w.scale": exponents.view(torch.float8_e8m0fnu)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [(spec.name, spec.shape) for spec in parameter.specs()] == [("w.weight", (100, 70)), ("w.scale", (4, 3))]
    for access in ("mmap", "read"):
        loaded = TensorFiles(checkpoint, access).dequantised(parameter, torch.float32)
        for row, column in ((31, 31), (32, 32), (95, 63), (96, 64), (99, 69), (25, 0)):
            assert loaded[row, column] == 2.0 ** (int(exponents[row // 32, column // 32]) - 127), (row, column)


def test_nan_values_are_found_by_verify(folder):
    name = "layers.0.attn.wkv.weight"
    value = TensorFiles(open_checkpoint(folder)).raw(name)
    value.view(torch.uint8)[3, 5] = 0xFF
    rewrite(folder, name, value)
    rewrite(folder, "norm.weight", torch.full((64,), float("inf"), dtype=torch.bfloat16))
    report = verify(folder)
    assert sorted(report.not_finite) == [name, "norm.weight"]
    assert not report.good


@pytest.mark.parametrize("name", ["layers.1.ffn.gate.bias", "layers.1.attn.indexer.wq_b.scale", "mtp.0.ffn.gate.bias"])
def test_nan_that_only_chooses_is_refused_at_loading(folder, name):
    """Such a model would answer with finite logits, and the operator sets differently."""
    value = TensorFiles(open_checkpoint(folder)).raw(name)
    value.view(torch.uint8).fill_(0xFF)  # NaN in float32 and in E8M0
    rewrite(folder, name, value)
    with pytest.raises(CheckpointMismatch, match=name.replace("scale", "weight").replace(".", r"\.") + ".*NaN.*verify"):
        load_model(folder)
    assert verify(folder).not_finite == (name,)


@pytest.mark.parametrize(("text", "problem"), [("{", "is not a tokenizer"), (None, "token classes")])
def test_verify_reads_the_tokenizer(folder, text, problem):
    shipped = Path(__file__).parents[2] / "models" / "nano" / "tokenizer.json"
    (folder / "tokenizer.json").write_text(shipped.read_text() if text is None else text)
    report = verify(folder)
    assert problem in report.tokenizer
    assert not report.good


def test_a_hostile_config(folder):
    for text in ("{", "[]", '{"text_config": 3}', "\0" * 10):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model(folder)


def test_a_flipped_byte_changes_the_sums(folder):
    before = {row.file.name: row.sha256 for row in verify(folder).files}
    file = shard(folder, 2)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))
    after = {row.file.name: row.sha256 for row in verify(folder).files}
    assert [name for name in before if before[name] != after[name]] == [file.name]


# Saving


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.engram.embed.weight"])
def test_saving_checks_the_state_first(tmp_path, name):
    values = random_values(CONFIG)
    wrong = dict(values) | {name: values[name][:-1], "extra": torch.ones(1)}
    del wrong["head.weight"]
    with pytest.raises(CheckpointMismatch) as error:
        save_checkpoint(CONFIG, wrong, None, tmp_path / "out")
    assert f"misshapen tensor {name!r}" in str(error.value)
    assert "missing tensor 'head.weight'" in str(error.value)
    assert "extra tensor 'extra'" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.ffn.experts.1.w2.weight", "layers.1.engram.embed.weight"])
def test_a_failed_save_leaves_nothing_behind(tmp_path, name):
    values = random_values(CONFIG)
    values[name].view(-1)[-1] = float("nan")
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
        save_checkpoint(CONFIG, values, None, tmp_path / "out", shard_bytes=90_000)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    with pytest.raises(CheckpointMismatch):
        save_checkpoint(CONFIG, values, None, tmp_path / "mine", shard_bytes=90_000)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_full_disk_is_named_by_its_folder(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=str(tmp_path / "out")):
            save_checkpoint(CONFIG, random_values(CONFIG), None, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()


def test_saving_never_replaces_a_model(folder):
    with pytest.raises(ValueError, match="already holds a model"):
        save_checkpoint(CONFIG, random_values(CONFIG), None, folder)
    assert verify(folder).good


def test_what_was_loaded_saves_bit_for_bit(tmp_path):
    """Values survive exactly; bytes are stable once scales are as small as they can be (rounding may have spared a bit)."""
    save_checkpoint(CONFIG, random_values(CONFIG), None, tmp_path / "a")
    for before, after in (("a", "b"), ("b", "c")):
        _, state = load_model(tmp_path / before)
        rows = state.tables[1].rows(torch.arange(660))
        values = dict(state.tensors) | {"layers.1.engram.embed.weight": rows}
        save_checkpoint(CONFIG, values, None, tmp_path / after)
        _, again = load_model(tmp_path / after)
        for name, value in state.tensors.items():
            assert torch.equal(value.view(torch.int32), again.tensors[name].view(torch.int32)), name
        assert torch.equal(rows, again.tables[1].rows(torch.arange(660)))
    assert (tmp_path / "b/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()
    assert not (tmp_path / "a" / INDEX_NAME).exists()


# Tables


def test_a_table_reads_rows_and_refuses_others(folder):
    _, mapped = load_model(folder)
    _, held = load_model(folder, engram="memory")
    ids = torch.tensor([[0, 659], [7, 7]])
    assert torch.equal(mapped.tables[1].rows(ids), held.tables[1].rows(ids))
    assert mapped.tables[1].rows(ids).shape == (2, 2, 32)
    assert mapped.tables[1].rows(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 32)
    for wrong in (-1, 660):
        with pytest.raises(ValueError, match=r"0\.\.659"):
            mapped.tables[1].rows(torch.tensor([3, wrong]))
    with pytest.raises(ValueError, match="int64"):
        mapped.tables[1].rows(torch.tensor([3], dtype=torch.int32))
