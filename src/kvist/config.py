"""What a model is: its sizes and its layer schedule.

Owns `ModelConfig`, `VisionConfig` and `LayerPlan`, which derives every layer's role once; named presets stand in
`presets.py`, files in `config_json.py`. Knows nothing of tensors, files, or how a layer is computed. No torch.

Field names follow the flat form of the release (`inference/config.json`). Source: facts sections 1 and 6.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Limits of a configuration that is not to be trusted; what a value means is checked below them.
LARGEST = 1 << 40
MOST_EXPERTS = 1 << 18
MOST_POOLED = 1 << 24
LARGEST_ALIGNMENT = 1 << 20
AT_MOST = {
    "n_layers": 4096,
    "n_mtp_layers": 64,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "engram_max_ngram_size": 64,
    "engram_n_heads": 1024,
    "dspark_block_size": 1024,
    "index_topk": 1 << 16,
    "candidate_topk_blocks": 1 << 16,
    "candidate_block_size": 1 << 12,
    "window_size": 1 << 20,
}
POSITIVE = (
    *("vocab_size", "dim", "n_layers", "n_heads", "head_dim", "rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups"),
    *("window_size", "moe_inter_dim", "n_routed_experts", "n_activated_experts", "index_topk", "index_n_heads"),
    *("index_head_dim", "candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "max_seq_len"),
)
VISION_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "downsample_ratio",
)


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
        alignment = LayerPlan.of(self).alignment
        require(
            alignment <= LARGEST_ALIGNMENT,
            f"compress_ratios have the least common multiple {shown(alignment)}; at most {LARGEST_ALIGNMENT} tokens make a page",
        )

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


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def shown(value: object) -> str:
    """`repr` for an error message: a value from a file that is not to be trusted is cut to 60 characters."""
    if isinstance(value, int) and value.bit_length() > 192:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _check_types(c: ModelConfig | VisionConfig) -> None:
    for field in dataclasses.fields(c):
        value, prefix = getattr(c, field.name), "" if isinstance(c, ModelConfig) else "vision "
        kind = str(field.type)
        if value is None and kind.endswith("| None"):
            continue
        if kind.startswith("int"):
            good, wanted = _is_integer(value), "an integer"
        elif kind.startswith("float"):
            good, wanted = _is_integer(value) or (isinstance(value, float) and math.isfinite(value)), "a finite number"
        elif kind.startswith("tuple"):
            good, wanted = isinstance(value, tuple) and all(map(_is_integer, value)), "a list of integers"
        else:
            types = {"str": str, "bool": bool, "VisionConfig | None": VisionConfig}
            good, wanted = isinstance(value, types[kind]), f"of type {kind}"
        require(good, f"{prefix}{field.name} must be {wanted}, got {shown(value)}")
        numbers = value if kind.startswith("tuple") else (value,) if kind.startswith(("int", "float")) else ()
        for number in numbers:
            # beyond it sums of bytes and operations leave float64, and nothing real is near it
            require(abs(number) <= LARGEST, f"{prefix}{field.name} is absurdly large: {shown(number)}; the limit is {LARGEST}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(c: ModelConfig) -> None:
    _check_types(c)
    for name in POSITIVE:
        require(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
    for name, most in AT_MOST.items():
        require(0 <= getattr(c, name) <= most, f"{name} is {getattr(c, name)}; it must lie in 0..{most}")
    pool = c.candidate_topk_blocks * c.candidate_block_size
    require(pool <= MOST_POOLED, f"candidate_topk_blocks x candidate_block_size is {pool} rows; at most {MOST_POOLED}")
    for name in ("norm_eps", "hc_eps", "original_seq_len"):
        require(getattr(c, name) >= 0, f"{name} must not be negative, got {getattr(c, name)}")
    for name in ("rope_factor", "beta_fast", "beta_slow", "gate_temp", "swiglu_limit"):
        require(getattr(c, name) > 0, f"{name} must be above 0, got {getattr(c, name)}")
    for name in ("rope_theta", "compress_rope_theta"):
        require(getattr(c, name) > 1, f"{name} must be above 1, got {getattr(c, name)}")
    for name in ("head_dim", "index_head_dim", "dim", "q_lora_rank", "moe_inter_dim"):
        require(getattr(c, name) % 32 == 0, f"{name} is {getattr(c, name)}; quantiser groups need a multiple of 32")
    require(c.rope_head_dim % 2 == 0, f"rope_head_dim is {c.rope_head_dim}; rotary pairs need an even number")
    for name in ("head_dim", "index_head_dim"):
        require(c.rope_head_dim <= getattr(c, name), f"rope_head_dim {c.rope_head_dim} exceeds {name} {getattr(c, name)}")
    require(c.n_heads % c.o_groups == 0, f"n_heads {c.n_heads} is not a multiple of o_groups {c.o_groups}")
    require(c.score_func == "sqrtsoftplus", f"score_func {shown(c.score_func)} is unknown; known: 'sqrtsoftplus'")
    require(c.dtype in ("fp8", "bf16"), f"dtype {shown(c.dtype)} is unknown; known: 'fp8', 'bf16'")
    known = ("fp4", "fp8", "bf16")
    require(c.expert_dtype in known, f"expert_dtype {shown(c.expert_dtype)} is unknown; known: {', '.join(map(repr, known))}")
    for name in ("bos_token_id", "eos_token_id", "image_token_id"):
        token = getattr(c, name)
        require(token is None or 0 <= token < c.vocab_size, f"{name} {token} is outside the vocabulary 0..{c.vocab_size - 1}")
    require(
        len(c.compress_ratios) in (c.n_layers, c.n_layers + c.n_mtp_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries for {c.n_layers} layers and {c.n_mtp_layers} draft blocks",
    )
    require(all(0 <= r <= 1024 for r in c.compress_ratios), f"compress_ratios out of 0..1024: {shown(c.compress_ratios)}")
    for name in ("kv_source_layers", "index_source_layers", "candidate_source_layers", "engram_layer_ids"):
        _check_layer_ids(name, getattr(c, name), c.n_layers)
    _check_experts(c)
    _check_engram(c)
    _check_draft(c)
    if c.vision is not None:
        _check_vision(c.vision)


def _check_experts(c: ModelConfig) -> None:
    require(c.n_shared_experts == 1, f"n_shared_experts is {c.n_shared_experts}; the architecture has exactly one")
    require(c.n_activated_experts <= c.n_routed_experts, f"{c.n_activated_experts} of {c.n_routed_experts} experts activated")
    experts = c.n_layers * c.n_routed_experts + c.n_mtp_layers * c.dspark_n_routed_experts
    # every expert is six tensors of the list that `inventory` makes; the release has 15,744
    require(experts <= MOST_EXPERTS, f"n_routed_experts and n_layers give {experts} experts in all; at most {MOST_EXPERTS}")


def _check_engram(c: ModelConfig) -> None:
    if not c.engram_layer_ids:
        return
    for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size"):
        require(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
    require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size is {c.engram_max_ngram_size}; at least 2")
    require(c.engram_compressed_vocab_size >= 1, "engram_compressed_vocab_size must be given when there are Engram layers")
    require(c.engram_head_dim % 32 == 0, f"engram_head_dim is {c.engram_head_dim}; scales need a multiple of 32")
    require(0 <= c.engram_pad_id < c.vocab_size, f"engram_pad_id {c.engram_pad_id} is outside 0..{c.vocab_size - 1}")
    require(
        len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} Engram layers",
    )
    require(all(n >= 1 for n in c.engram_num_embeddings), f"engram_num_embeddings below 1: {shown(c.engram_num_embeddings)}")


def _check_draft(c: ModelConfig) -> None:
    if not c.n_mtp_layers:
        return
    _check_layer_ids("dspark_target_layer_ids", c.dspark_target_layer_ids, c.n_layers)
    require(len(c.dspark_target_layer_ids) >= 1, "dspark_target_layer_ids must name at least one layer")
    for name in ("dspark_block_size", "dspark_markov_rank"):
        require(getattr(c, name) >= 1, f"{name} is {getattr(c, name)}; at least 1")
    active, routed = c.dspark_n_activated_experts, c.dspark_n_routed_experts
    require(1 <= active <= routed, f"dspark experts: need 1 <= activated <= routed, got {active} of {routed}")
    require(0 <= c.dspark_noise_token_id < c.vocab_size, f"dspark_noise_token_id {c.dspark_noise_token_id} out of range")


def _check_vision(v: VisionConfig) -> None:
    _check_types(v)
    for name in VISION_POSITIVE:
        require(getattr(v, name) >= 1, f"vision {name} must be at least 1, got {getattr(v, name)}")
    for name in ("max_image_tokens", "min_pixels"):
        require(getattr(v, name) >= 0, f"vision {name} must not be negative, got {getattr(v, name)}")
    require(v.rope_theta > 1, f"vision rope_theta must be above 1, got {v.rope_theta}")
    require(v.num_hidden_layers <= 4096, f"vision num_hidden_layers is {v.num_hidden_layers}; at most 4096")
    require(
        v.hidden_size % v.num_attention_heads == 0,
        f"vision hidden_size {v.hidden_size} is not a multiple of num_attention_heads {v.num_attention_heads}",
    )


def _check_layer_ids(name: str, ids: tuple[int, ...], n_layers: int) -> None:
    require(list(ids) == sorted(set(ids)), f"{name} must be ascending without repeats, got {shown(ids)}")
    require(all(0 <= i < n_layers for i in ids), f"{name} names a layer outside 0..{n_layers - 1}: {shown(ids)}")


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy with some fields changed, validated again."""
    return dataclasses.replace(config, **changes)
