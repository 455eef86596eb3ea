"""What a model is: its sizes, its layer schedule, and how both are read from and written to `config.json`.

Owns `ModelConfig`, `VisionConfig` and `LayerPlan`, which derives every layer's role once; named presets stand in `presets.py`.
Knows nothing of tensors, files other than JSON, or how a layer is computed. No torch.

Field names follow the flat form of the release (`inference/config.json`); `_NESTED` maps them to the
nested form (`config.json` of the released checkpoint). Source: facts sections 1 and 6.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 4 << 20


class ConfigError(ValueError):
    """A configuration that cannot describe a model; the message names the field, its value and the rule."""


class LayerMode(Enum):
    """How a layer finds its global keys (report 2.3): none, own keys and scores, shared keys with own scores, all shared."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its preprocessing (facts section 10). Pixel counts in pixels, `patch_size` in pixels."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int = 14
    downsample_ratio: int = 3
    rope_theta: float = 10000.0
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's role. `kv_source` and `index_source` are the layers whose rows and top-k it reads (None: window only)."""

    index: int
    mode: LayerMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None
    publishes_candidates: bool
    rope_theta: float
    yarn: bool
    engram: int | None

    @property
    def owns_rows(self) -> bool:
        """True for a Full layer: it compresses its input into main rows and index keys."""
        return self.mode is LayerMode.FULL

    @property
    def selects(self) -> bool:
        """True if the layer runs its own indexer."""
        return self.mode in (LayerMode.FULL, LayerMode.REINDEX)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number that defines a model, validated on construction (facts section 1)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window_size: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layers: tuple[int, ...]
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_inter_dim: int
    n_routed_experts: int
    n_activated_experts: int
    n_shared_experts: int = 1
    norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    original_seq_len: int = 65536
    rope_factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    max_seq_len: int = 1048576
    score_func: str = "sqrtsoftplus"
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_pad_id: int = 2
    engram_compressed_vocab_size: int = 0
    n_mtp_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_markov_rank: int = 256
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0
    dtype: str = "fp8"
    expert_dtype: str = "fp4"
    image_token_id: int | None = None
    bos_token_id: int = 0
    eos_token_id: int = 1
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        LayerPlan.of(self)

    @property
    def plan(self) -> LayerPlan:
        """The layer schedule derived from this configuration."""
        return LayerPlan.of(self)

    @property
    def main_row_bytes(self) -> int:
        """Bytes of one compressed row: E2M1 codes and an E4M3 scale per 16 channels (288 in the release)."""
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def key_row_bytes(self) -> int:
        """Bytes of one index key: E2M1 codes and an E8M0 scale per 32 channels (68 in the release)."""
        return self.index_head_dim // 2 + self.index_head_dim // 32

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one window entry: E4M3 codes and an E8M0 scale per 32 channels (528 in the release)."""
        return self.head_dim + self.head_dim // 32

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: n-gram orders 2.. times heads (24 in the release)."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The schedule: one `LayerSpec` a backbone layer and one a draft block, derived once (facts section 6)."""

    layers: tuple[LayerSpec, ...]
    drafts: tuple[LayerSpec, ...]
    window: int

    @staticmethod
    def of(config: ModelConfig) -> LayerPlan:
        """Derive and validate the schedule. Raises `ConfigError` that names the layer and the rule it breaks."""
        return _derive_plan(config)

    @property
    def kv_sources(self) -> tuple[LayerSpec, ...]:
        """Layers that own main rows and index keys, in order."""
        return tuple(spec for spec in self.layers if spec.owns_rows)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last kv source. Nothing from it upward reaches global KV (CED, report 2.2)."""
        sources = self.kv_sources
        return sources[-1].index if sources else len(self.layers)

    @property
    def exact_decoder_replay(self) -> int:
        """Positions the decoder must run again for exact window KV: (window - 1) a layer (2,540 in the release)."""
        return (self.window - 1) * (len(self.layers) - self.decoder_start)

    @property
    def exact_encoder_replay(self) -> int:
        """Positions the encoder must run again for exact window KV after a prefix hit: (window - 1) a layer."""
        return (self.window - 1) * self.decoder_start

    @property
    def alignment(self) -> int:
        """Least common multiple of the ratios: prefix hits are cut to a multiple of it."""
        return math.lcm(*(spec.ratio for spec in self.kv_sources)) if self.kv_sources else 1

    @property
    def page_tokens(self) -> int:
        """Default page: the smallest multiple of `alignment` that holds at least 128 tokens."""
        return -(-128 // self.alignment) * self.alignment


def _derive_plan(config: ModelConfig) -> LayerPlan:
    ratios, n_layers = config.compress_ratios, config.n_layers
    kv_source: LayerSpec | None = None
    index_source = candidates = None
    layers: list[LayerSpec] = []
    for layer in range(n_layers):
        ratio = ratios[layer]
        owns, selects = layer in config.kv_source_layers, layer in config.index_source_layers
        pools = layer in config.candidate_source_layers
        if owns and ratio < 1:
            raise ConfigError(f"layer {layer} is a kv source but compress_ratios[{layer}] is {ratio}; a source needs >= 1")
        if owns and not selects:
            raise ConfigError(f"layer {layer} is in kv_source_layers but not in index_source_layers; a Full layer is in both")
        if pools and not selects:
            raise ConfigError(f"candidate_source_layers names layer {layer}, which is not in index_source_layers")
        if ratio == 0:
            if selects:
                raise ConfigError(f"layer {layer} is an index source but compress_ratios[{layer}] is 0 (window only)")
            mode = LayerMode.WINDOW
        elif owns:
            mode = LayerMode.FULL
            candidates = None
        else:
            if kv_source is None:
                raise ConfigError(f"layer {layer} has ratio {ratio} but no kv source stands before it")
            if kv_source.ratio != ratio:
                raise ConfigError(
                    f"layer {layer} has ratio {ratio} but reads rows of layer {kv_source.index} with ratio {kv_source.ratio}"
                )
            mode = LayerMode.REINDEX if selects else LayerMode.REUSE
        if selects:
            index_source = layer
        spec = LayerSpec(
            index=layer,
            mode=mode,
            ratio=ratio,
            kv_source=None if ratio == 0 else layer if owns or kv_source is None else kv_source.index,
            index_source=None if ratio == 0 else index_source,
            candidate_source=candidates if mode is LayerMode.REINDEX and not pools else None,
            publishes_candidates=pools,
            rope_theta=config.compress_rope_theta if ratio else config.rope_theta,
            yarn=ratio > 0 and config.original_seq_len > 0,
            engram=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None,
        )
        if pools:
            candidates = layer
        if owns:
            kv_source = spec
        layers.append(spec)
    drafts = tuple(_draft_spec(config, n_layers + i) for i in range(config.n_mtp_layers))
    return LayerPlan(layers=tuple(layers), drafts=drafts, window=config.window_size)


def _draft_spec(config: ModelConfig, index: int) -> LayerSpec:
    if index < len(config.compress_ratios) and config.compress_ratios[index] != 0:
        raise ConfigError(f"draft block {index} has ratio {config.compress_ratios[index]}; drafts are window only (0)")
    return LayerSpec(
        index=index,
        mode=LayerMode.WINDOW,
        ratio=0,
        kv_source=None,
        index_source=None,
        candidate_source=None,
        publishes_candidates=False,
        rope_theta=config.rope_theta,
        yarn=False,
        engram=None,
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_sizes(c: ModelConfig) -> None:
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{field.name} must be an integer, got {value!r}")
        if field.type == "float" and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
            raise ConfigError(f"{field.name} must be a finite number, got {value!r}")
        if field.type == "tuple[int, ...]" and not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"{field.name} must hold integers, got {value!r}")
    positive = (
        "vocab_size dim n_layers n_heads head_dim rope_head_dim q_lora_rank o_lora_rank o_groups window_size moe_inter_dim "
        "n_routed_experts n_activated_experts index_topk index_n_heads index_head_dim candidate_topk_blocks candidate_block_size "
        "hc_mult hc_sinkhorn_iters max_seq_len"
    )
    for name in positive.split():
        _require(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
        _require(getattr(c, name) <= 1 << 40, f"{name} is absurdly large: {getattr(c, name)}")
    _require(c.n_layers <= 4096, f"n_layers is {c.n_layers}; at most 4096")
    for name in ("head_dim", "index_head_dim", "dim", "q_lora_rank", "moe_inter_dim"):
        _require(getattr(c, name) % 32 == 0, f"{name} is {getattr(c, name)}; quantiser groups need a multiple of 32")
    _require(c.rope_head_dim % 2 == 0, f"rope_head_dim is {c.rope_head_dim}; rotary pairs need an even number")
    for name in ("head_dim", "index_head_dim"):
        _require(c.rope_head_dim <= getattr(c, name), f"rope_head_dim {c.rope_head_dim} exceeds {name} {getattr(c, name)}")
    _require(c.n_heads % c.o_groups == 0, f"n_heads {c.n_heads} is not a multiple of o_groups {c.o_groups}")
    _require(c.n_shared_experts == 1, f"n_shared_experts is {c.n_shared_experts}; the architecture has exactly one")
    _require(
        c.n_activated_experts <= c.n_routed_experts,
        f"{c.n_activated_experts} of {c.n_routed_experts} experts activated",
    )
    _require(c.score_func == "sqrtsoftplus", f"score_func {c.score_func!r} is unknown; known: 'sqrtsoftplus'")
    _require(c.dtype in ("fp8", "bf16"), f"dtype {c.dtype!r} is unknown; known: 'fp8', 'bf16'")
    _require(c.expert_dtype in ("fp4", "fp8", "bf16"), f"expert_dtype {c.expert_dtype!r} is unknown; known: 'fp4', 'fp8', 'bf16'")
    _require(
        len(c.compress_ratios) in (c.n_layers, c.n_layers + c.n_mtp_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries for {c.n_layers} layers and {c.n_mtp_layers} draft blocks",
    )
    _require(all(0 <= r <= 1024 for r in c.compress_ratios), f"compress_ratios out of 0..1024: {c.compress_ratios}")
    for name in ("kv_source_layers", "index_source_layers", "candidate_source_layers", "engram_layer_ids"):
        _check_layer_ids(name, getattr(c, name), c.n_layers)
    if c.engram_layer_ids:
        _require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size is {c.engram_max_ngram_size}; at least 2")
        _require(
            c.engram_compressed_vocab_size >= 1,
            "engram_compressed_vocab_size must be given when there are Engram layers",
        )
        _require(c.engram_head_dim % 32 == 0, f"engram_head_dim is {c.engram_head_dim}; scales need a multiple of 32")
        _require(
            len(c.engram_num_embeddings) == len(c.engram_layer_ids),
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} Engram layers",
        )
    if c.n_mtp_layers:
        _check_layer_ids("dspark_target_layer_ids", c.dspark_target_layer_ids, c.n_layers)
        _require(len(c.dspark_target_layer_ids) >= 1, "dspark_target_layer_ids must name at least one layer")
        _require(c.dspark_block_size >= 1, f"dspark_block_size is {c.dspark_block_size}; at least 1")
        _require(
            1 <= c.dspark_n_activated_experts <= c.dspark_n_routed_experts,
            "dspark experts: need 1 <= activated <= routed",
        )
        _require(0 <= c.dspark_noise_token_id < c.vocab_size, f"dspark_noise_token_id {c.dspark_noise_token_id} out of range")


def _check_layer_ids(name: str, ids: tuple[int, ...], n_layers: int) -> None:
    _require(list(ids) == sorted(set(ids)), f"{name} must be ascending without repeats, got {ids}")
    _require(all(0 <= i < n_layers for i in ids), f"{name} names a layer outside 0..{n_layers - 1}: {ids}")


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
_DRAFT_FIELDS = tuple(f for f in _NESTED.values() if f.startswith("dspark_"))


def from_dict(data: Mapping[str, Any]) -> ModelConfig:
    """A configuration from the parsed JSON of either released form. Raises `ConfigError` for anything it cannot describe."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"a configuration is a JSON object, got {type(data).__name__}")
    return _from_nested(data) if "text_config" in data else _from_flat(data)


def _from_nested(data: Mapping[str, Any]) -> ModelConfig:
    text = data["text_config"]
    _require(isinstance(text, Mapping), "text_config must be an object")
    fields = {field: text[key] for key, field in _NESTED.items() if key in text}
    scaling = text.get("rope_scaling") or {}
    _require(isinstance(scaling, Mapping), "rope_scaling must be an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    _require(kind == "yarn", f"rope_scaling.rope_type {kind!r} is unknown; known: 'yarn'")
    fields |= {field: scaling[key] for key, field in _SCALING.items() if key in scaling}
    if not scaling:
        fields["original_seq_len"] = 0
    fields |= {field: data[key] for key, field in _TOP.items() if data.get(key) is not None}
    single = text.get("candidate_source_layer_id")
    fields["candidate_source_layers"] = text.get("candidate_source_layer_ids", [] if single is None else [single])
    quantisation = data.get("quantization_config") or {}
    block = quantisation.get("weight_block_size", [32, 32])
    _require(list(block) == [32, 32], f"quantization_config.weight_block_size {block} is unsupported; supported: [32, 32]")
    fields["dtype"] = quantisation.get("quant_method", "fp8")
    fields["expert_dtype"] = quantisation.get("expert_dtype", "fp4")
    vision = data.get("vision_config")
    if vision is not None:
        _require(isinstance(vision, Mapping), "vision_config must be an object")
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        fields["vision"] = _vision({key: value for key, value in vision.items() if key in names})
    return _build(fields)


def _from_flat(data: Mapping[str, Any]) -> ModelConfig:
    names = {f.name for f in dataclasses.fields(ModelConfig)} - {"vision", "candidate_source_layers"}
    fields = {key: value for key, value in data.items() if key in names}
    single = data.get("candidate_source_layer")
    fields["candidate_source_layers"] = data.get("candidate_source_layers", [] if single is None else [single])
    vision = {field: data[key] for key, field in _FLAT_VISION.items() if key in data}
    if vision.get("num_hidden_layers"):
        fields["vision"] = _vision(vision)
    return _build(fields)


def _vision(fields: dict[str, Any]) -> VisionConfig:
    try:
        vision = VisionConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"vision configuration: {error}") from error
    for field in dataclasses.fields(vision):
        value = getattr(vision, field.name)
        if field.name != "max_wh_ratio" and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ConfigError(f"vision {field.name} must be a non-negative number, got {value!r}")
    return vision


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
    data: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
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
        data = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    try:
        return from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def save_config(config: ModelConfig, path: str | Path) -> None:
    """Write the released nested form to a file."""
    Path(path).write_text(json.dumps(to_nested(config), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy with some fields changed, validated again."""
    return dataclasses.replace(config, **changes)
