"""Configurations: presets survive both released forms, the goldens' files are read, hostile files are refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvist.config import ConfigError, LayerMode, ModelConfig, VisionConfig, replace
from kvist.config_json import MAX_CONFIG_BYTES, from_dict, load_config, save_config, to_flat, to_nested
from kvist.inventory import count_parameters, tensor_specs
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


HOSTILE: list[object] = [
    None,
    True,
    "x",
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    10**30,
    [],
    {},
    [None],
    [10**30],
    "y" * 5000,
    [1] * 5000,
]


def _paths(data: dict[str, object], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in data.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += _paths(value, (*path, key))
    return found


def _read(data: dict[str, Any]) -> tuple[ModelConfig | None, str]:
    try:
        return from_dict(data), ""
    except ConfigError as error:
        return None, str(error)


@pytest.mark.parametrize("form", [to_nested, to_flat])
def test_every_key_with_every_hostile_value(form: Callable[[ModelConfig], dict[str, object]]) -> None:
    """A value is either refused by name in a short message or gives a configuration whose tensors can be listed."""
    vision = VisionConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=64)
    base = form(replace(preset("tiny"), vision=vision, image_token_id=5))
    refused = 0
    for path in _paths(base):
        for value in HOSTILE:
            data = json.loads(json.dumps(base))
            inner = data
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            config, message = _read(data)
            assert len(message) < 400, (path, value)
            refused += bool(message)
            if config is not None:
                assert sum(1 for _ in islice(tensor_specs(config), 1 << 20)) < 1 << 20, (path, value)
                counts = dataclasses.astuple(count_parameters(config))
                assert all(number < 1 << 140 for number in counts), (path, value)
    assert refused > 500


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act 'gelu' is unsupported; supported: 'silu'"),
        ("tie_word_embeddings", True, "tie_word_embeddings True is unsupported"),
        ("num_key_value_heads", 8, "num_key_value_heads 8 is unsupported"),
        ("norm_topk_prob", 0, "norm_topk_prob must be of type bool, got 0"),
        ("rope_theta", 1, "rope_theta must be above 1"),
        ("swiglu_limit", -10.0, "swiglu_limit must be above 0"),
        ("hc_sinkhorn_iters", 10**6, r"hc_sinkhorn_iters is 1000000; it must lie in 0\.\.1000"),
        ("n_routed_experts", 1 << 31, r"experts in all; at most 262144"),
        ("engram_pad_token_id", -1, "engram_pad_token_id -1 is outside 0..255"),
        ("rms_norm_eps", 10**400, "rms_norm_eps is absurdly large: an integer of 1329 bits"),
        ("hidden_size", -32, "^hidden_size must be at least 1, got -32$"),
        ("index_topk", 10**9, r"index_topk is 1000000000; it must lie in 0\.\.65536"),
        ("candidate_block_size", 10**9, r"candidate_block_size is 1000000000; it must lie in 0\.\.4096"),
    ],
)
def test_values_that_no_model_of_this_kind_has(key: str, value: object, message: str) -> None:
    data = to_nested(preset("tiny"))
    data["text_config"][key] = value
    with pytest.raises(ConfigError, match=message):
        from_dict(data)


def test_a_pool_beyond_every_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="candidate_topk_blocks x candidate_block_size is 268435456 rows; at most 16777216"):
        replace(preset("tiny"), candidate_topk_blocks=1 << 16, candidate_block_size=1 << 12)


@pytest.mark.parametrize("form", [to_nested, to_flat])
def test_another_architecture_is_named(form: Callable[[ModelConfig], dict[str, object]]) -> None:
    data = form(preset("tiny")) | {"model_type": "llama"}
    inner = data.get("text_config", data)
    assert isinstance(inner, dict)
    for key in ("hidden_size", "dim"):
        inner.pop(key, None)
    missing = "hidden_size" if "text_config" in data else "dim"
    with pytest.raises(ConfigError, match=f"lacks {missing}; its model_type is 'llama', known: 'deepseek_v41'"):
        from_dict(data)


def test_tied_embeddings_are_refused_wherever_they_stand() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings True is unsupported"):
        from_dict(to_nested(preset("tiny")) | {"tie_word_embeddings": True})


def test_quantisation_that_is_no_object() -> None:
    values: tuple[object, ...] = ([], "fp8", 8)
    for value in values:
        with pytest.raises(ConfigError, match="quantization_config must be an object"):
            from_dict(to_nested(preset("tiny")) | {"quantization_config": value})


def test_special_tokens_lie_in_the_vocabulary() -> None:
    for name in ("bos_token_id", "eos_token_id", "image_token_id"):
        with pytest.raises(ConfigError, match=rf"{name} 256 is outside the vocabulary 0\.\.255"):
            replace(preset("tiny"), **{name: 256})


def test_a_page_of_absurd_alignment_is_refused() -> None:
    primes = [n for n in range(2, 40) if all(n % d for d in range(2, n))]
    with pytest.raises(ConfigError, match="least common multiple 7420738134810"):
        replace(
            preset("tiny"),
            n_layers=len(primes),
            n_mtp_layers=0,
            compress_ratios=tuple(primes),
            kv_source_layers=tuple(range(len(primes))),
            index_source_layers=tuple(range(len(primes))),
            candidate_source_layers=(),
            engram_layer_ids=(),
            engram_num_embeddings=(),
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"dim": 1, "dim": 2}', "key 'dim' appears twice"),
        ('{"dim": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"dim": 1e999}', "lacks"),
    ],
)
def test_repeated_keys_and_endless_numbers(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
