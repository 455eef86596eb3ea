"""Reading and writing `config.json` in both released forms: nested (the checkpoint's) and flat (`inference/config.json`).

Owns the key tables and the checks of a file that is not to be trusted. Knows nothing of what a value means beyond
`kvist.config`. No torch. Source: facts section 1.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvist.config import ConfigError, ModelConfig, VisionConfig, require, shown

MAX_CONFIG_BYTES = 4 << 20


# The nested released form: text_config key -> field. Lists become tuples; rope_scaling and vision_config are handled apart.
_NESTED = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "compress_ratios": "compress_ratios",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "max_position_embeddings": "max_seq_len",
    "moe_intermediate_size": "moe_inter_dim",
    "n_routed_experts": "n_routed_experts",
    "num_experts_per_tok": "n_activated_experts",
    "n_shared_experts": "n_shared_experts",
    "scoring_func": "score_func",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "engram_layer_ids": "engram_layer_ids",
    "engram_num_embeddings": "engram_num_embeddings",
    "engram_max_ngram_size": "engram_max_ngram_size",
    "engram_n_heads": "engram_n_heads",
    "engram_head_dim": "engram_head_dim",
    "engram_vocab_size": "engram_vocab_size",
    "engram_pad_token_id": "engram_pad_id",
    "engram_compressed_vocab_size": "engram_compressed_vocab_size",
    "dspark_block_size": "dspark_block_size",
    "dspark_noise_token_id": "dspark_noise_token_id",
    "dspark_markov_rank": "dspark_markov_rank",
    "dspark_target_layer_ids": "dspark_target_layer_ids",
    "dspark_n_routed_experts": "dspark_n_routed_experts",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_SCALING = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_TOP = {"image_token_id": "image_token_id", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id"}
_FLAT_VISION = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_rope_theta": "rope_theta",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_max_wh_ratio": "max_wh_ratio",
}
# Keys of the nested form that have one value in this architecture: another one is a model that this package does not hold.
_FIXED = {"num_key_value_heads": 1, "hidden_act": "silu", "topk_method": "noaux_tc", "tie_word_embeddings": False}
_FIXED_QUANTISATION = {"activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
_MODEL_TYPE = "deepseek_v41"
# How messages about a field name it where the file is nested.
_KEYS = (
    {field: key for key, field in _NESTED.items() if key != field}
    | {field: f"rope_scaling.{key}" for key, field in _SCALING.items()}
    | {"dtype": "quantization_config.quant_method", "expert_dtype": "quantization_config.expert_dtype"}
)
_FIELD = re.compile(rf"\b({'|'.join(_KEYS)})\b")
_DRAFT_FIELDS = tuple(f for f in _NESTED.values() if f.startswith("dspark_"))


def from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """A configuration from the parsed JSON of either released form. Raises `ConfigError` for anything it cannot describe."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"a configuration is a JSON object, got {type(data).__name__}")
    try:
        return _from_nested(data) if "text_config" in data else _from_flat(data)
    except ConfigError as error:
        message = _FIELD.sub(lambda found: _KEYS[found[0]], str(error)) if "text_config" in data else str(error)
        kind = data.get("model_type")
        other = "" if kind in (None, _MODEL_TYPE) else f"; its model_type is {shown(kind)}, known: {_MODEL_TYPE!r}"
        raise ConfigError(f"{message}{other}") from error


def _from_nested(data: Mapping[str, Any]) -> ModelConfig:
    text = _object(data, "text_config")
    _check_fixed(text, _FIXED, "")
    _check_fixed(data, {"tie_word_embeddings": False}, "")
    fields = {field: text[key] for key, field in _NESTED.items() if key in text}
    scaling = _object(text, "rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    require(kind == "yarn", f"rope_scaling.rope_type {shown(kind)} is unknown; known: 'yarn'")
    fields |= {field: scaling[key] for key, field in _SCALING.items() if key in scaling}
    if not scaling:
        fields["original_seq_len"] = 0
    fields |= {field: data[key] for key, field in _TOP.items() if data.get(key) is not None}
    single = text.get("candidate_source_layer_id")
    fields["candidate_source_layers"] = text.get("candidate_source_layer_ids", [] if single is None else [single])
    quantisation = _object(data, "quantization_config")
    _check_fixed(quantisation, _FIXED_QUANTISATION, "quantization_config.")
    fields["dtype"] = quantisation.get("quant_method", "fp8")
    fields["expert_dtype"] = quantisation.get("expert_dtype", "fp4")
    if data.get("vision_config") is not None:
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        fields["vision"] = _vision({key: value for key, value in _object(data, "vision_config").items() if key in names})
    return _build(fields)


def _object(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; absent and null are an empty one."""
    value = data.get(key)
    require(value is None or isinstance(value, Mapping), f"{key} must be an object, got {shown(value)}")
    return {} if value is None else value


def _check_fixed(data: Mapping[str, Any], fixed: Mapping[str, object], prefix: str) -> None:
    for key, value in fixed.items():
        found = data.get(key, value)
        require(found == value, f"{prefix}{key} {shown(found)} is unsupported; supported: {value!r}")


def _from_flat(data: Mapping[str, Any]) -> ModelConfig:
    names = {f.name for f in dataclasses.fields(ModelConfig)} - {"vision", "candidate_source_layers"}
    fields = {key: value for key, value in data.items() if key in names}
    single = data.get("candidate_source_layer")
    fields["candidate_source_layers"] = data.get("candidate_source_layers", [] if single is None else [single])
    vision = {field: data[key] for key, field in _FLAT_VISION.items() if key in data}
    if vision.get("num_hidden_layers", 0) != 0:
        fields["vision"] = _vision(vision)
    return _build(fields)


def _vision(fields: dict[str, Any]) -> VisionConfig:
    try:
        return VisionConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"vision configuration: {error}") from error


def _build(fields: dict[str, Any]) -> ModelConfig:
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    required = {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    missing = sorted(required - fields.keys())
    if missing:
        raise ConfigError(f"the configuration lacks {', '.join(missing)}")
    return ModelConfig(**fields)


def to_nested(config: ModelConfig) -> dict[str, Any]:
    """The released nested `config.json` of a configuration."""
    fields = dataclasses.asdict(config)
    text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
    for key, field in _NESTED.items():
        if field not in _DRAFT_FIELDS or config.n_mtp_layers:
            text[key] = _plain(fields[field])
    text |= {"num_key_value_heads": 1, "hidden_act": "silu", "topk_method": "noaux_tc", "tie_word_embeddings": False}
    if config.original_seq_len:
        text["rope_scaling"] = {"rope_type": "yarn"} | {key: fields[field] for key, field in _SCALING.items()}
    sources = config.candidate_source_layers
    if len(sources) == 1:
        text["candidate_source_layer_id"] = sources[0]
    elif sources:
        text["candidate_source_layer_ids"] = list(sources)
    data: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": _MODEL_TYPE}
    data |= {key: fields[field] for key, field in _TOP.items() if fields[field] is not None}
    data |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "text_config": text}
    data["quantization_config"] = {
        "quant_method": config.dtype,
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": config.expert_dtype,
    }
    if config.vision is not None:
        data["vision_config"] = {"model_type": "deepseek_v41_vision"} | dataclasses.asdict(config.vision)
    return data


def to_flat(config: ModelConfig) -> dict[str, Any]:
    """The flat form of the released `inference/config.json`."""
    fields = dataclasses.asdict(config)
    vision = fields.pop("vision")
    sources = fields.pop("candidate_source_layers")
    data = {key: _plain(value) for key, value in fields.items() if value is not None}
    data |= {"candidate_source_layer": sources[0]} if len(sources) == 1 else {"candidate_source_layers": list(sources)}
    if vision is not None:
        data |= {key: vision[field] for key, field in _FLAT_VISION.items()}
    return data


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def load_config(path: str | Path) -> ModelConfig:
    """Read `config.json` (a file, or the folder that holds it) in either released form. Raises `ConfigError`."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"no configuration at {file}")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} has {file.stat().st_size} bytes; a configuration has at most {MAX_CONFIG_BYTES}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise ConfigError(f"{file} is not JSON: {error}") from error
    try:
        return from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        times = Counter(key for key, _ in pairs)
        raise ConfigError(f"key {shown(max(times, key=times.__getitem__))} appears twice")
    return result


def save_config(config: ModelConfig, path: str | Path) -> None:
    """Write the released nested form to a file."""
    Path(path).write_text(json.dumps(to_nested(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
