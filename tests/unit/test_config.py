"""Configurations: presets survive both released forms, the goldens' files are read, hostile files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvist.config import ConfigError, LayerMode
from kvist.config_json import MAX_CONFIG_BYTES, from_dict, load_config, save_config, to_flat, to_nested
from kvist.presets import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_both_forms(name: str, tmp_path: Path) -> None:
    config = preset(name)
    assert from_dict(json.loads(json.dumps(to_nested(config)))) == config
    assert from_dict(json.loads(json.dumps(to_flat(config)))) == config
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path) == config


def test_released_schedule() -> None:
    plan = preset("v41-flash").plan
    modes = [spec.mode for spec in plan.layers]
    assert [modes.count(m) for m in (LayerMode.WINDOW, LayerMode.FULL, LayerMode.REINDEX, LayerMode.REUSE)] == [2, 4, 4, 30]
    assert plan.decoder_start == 20
    assert plan.exact_decoder_replay == 2540
    assert plan.exact_encoder_replay == 2540
    assert plan.page_tokens == 128
    assert [spec.candidate_source for spec in plan.layers if spec.mode is LayerMode.REINDEX] == [20] * 4
    assert [spec.rope_theta for spec in plan.layers[:3]] == [10000, 10000, 160000]
    assert not plan.layers[1].yarn and plan.layers[2].yarn


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'v5'.*nano"):
        preset("v5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "JSON object"),
        ("{}", "lacks"),
        ("[" * 100_000, "is not JSON"),
        ('{"text_config": 3}', "must be an object"),
        ('{"text_config": {"rope_scaling": {"rope_type": "linear"}}}', "rope_type"),
        ('{"text_config": {}, "quantization_config": {"weight_block_size": [128, 128]}}', "weight_block_size"),
    ],
)
def test_hostile_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


def test_missing_huge_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration at"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(file)
    with file.open("wb") as handle:
        handle.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(ConfigError, match="at most"):
        load_config(file)


@pytest.mark.parametrize("value", ["7", True, 2.5, None, [1]])
def test_wrong_types_are_named(value: object) -> None:
    data = to_nested(preset("tiny"))
    data["text_config"]["num_hidden_layers"] = value
    with pytest.raises(ConfigError, match="n_layers"):
        from_dict(data)
