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


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with the message unless the condition holds."""
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
        require(getattr(c, name) >= 1, f"{name} must be at least 1, got {getattr(c, name)}")
        require(getattr(c, name) <= 1 << 40, f"{name} is absurdly large: {getattr(c, name)}")
    require(c.n_layers <= 4096, f"n_layers is {c.n_layers}; at most 4096")
    for name in ("head_dim", "index_head_dim", "dim", "q_lora_rank", "moe_inter_dim"):
        require(getattr(c, name) % 32 == 0, f"{name} is {getattr(c, name)}; quantiser groups need a multiple of 32")
    require(c.rope_head_dim % 2 == 0, f"rope_head_dim is {c.rope_head_dim}; rotary pairs need an even number")
    for name in ("head_dim", "index_head_dim"):
        require(c.rope_head_dim <= getattr(c, name), f"rope_head_dim {c.rope_head_dim} exceeds {name} {getattr(c, name)}")
    require(c.n_heads % c.o_groups == 0, f"n_heads {c.n_heads} is not a multiple of o_groups {c.o_groups}")
    require(c.n_shared_experts == 1, f"n_shared_experts is {c.n_shared_experts}; the architecture has exactly one")
    require(
        c.n_activated_experts <= c.n_routed_experts,
        f"{c.n_activated_experts} of {c.n_routed_experts} experts activated",
    )
    require(c.score_func == "sqrtsoftplus", f"score_func {c.score_func!r} is unknown; known: 'sqrtsoftplus'")
    require(c.dtype in ("fp8", "bf16"), f"dtype {c.dtype!r} is unknown; known: 'fp8', 'bf16'")
    require(c.expert_dtype in ("fp4", "fp8", "bf16"), f"expert_dtype {c.expert_dtype!r} is unknown; known: 'fp4', 'fp8', 'bf16'")
    require(
        len(c.compress_ratios) in (c.n_layers, c.n_layers + c.n_mtp_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries for {c.n_layers} layers and {c.n_mtp_layers} draft blocks",
    )
    require(all(0 <= r <= 1024 for r in c.compress_ratios), f"compress_ratios out of 0..1024: {c.compress_ratios}")
    for name in ("kv_source_layers", "index_source_layers", "candidate_source_layers", "engram_layer_ids"):
        _check_layer_ids(name, getattr(c, name), c.n_layers)
    if c.engram_layer_ids:
        require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size is {c.engram_max_ngram_size}; at least 2")
        require(
            c.engram_compressed_vocab_size >= 1,
            "engram_compressed_vocab_size must be given when there are Engram layers",
        )
        require(c.engram_head_dim % 32 == 0, f"engram_head_dim is {c.engram_head_dim}; scales need a multiple of 32")
        require(
            len(c.engram_num_embeddings) == len(c.engram_layer_ids),
            f"engram_num_embeddings has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} Engram layers",
        )
    if c.n_mtp_layers:
        _check_layer_ids("dspark_target_layer_ids", c.dspark_target_layer_ids, c.n_layers)
        require(len(c.dspark_target_layer_ids) >= 1, "dspark_target_layer_ids must name at least one layer")
        require(c.dspark_block_size >= 1, f"dspark_block_size is {c.dspark_block_size}; at least 1")
        require(
            1 <= c.dspark_n_activated_experts <= c.dspark_n_routed_experts,
            "dspark experts: need 1 <= activated <= routed",
        )
        require(0 <= c.dspark_noise_token_id < c.vocab_size, f"dspark_noise_token_id {c.dspark_noise_token_id} out of range")


def _check_layer_ids(name: str, ids: tuple[int, ...], n_layers: int) -> None:
    require(list(ids) == sorted(set(ids)), f"{name} must be ascending without repeats, got {ids}")
    require(all(0 <= i < n_layers for i in ids), f"{name} names a layer outside 0..{n_layers - 1}: {ids}")


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A copy with some fields changed, validated again."""
    return dataclasses.replace(config, **changes)
