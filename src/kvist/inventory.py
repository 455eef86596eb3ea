"""Every tensor of a configuration in the released format: name, shape, dtype, class and logical parameters.

Computed from the numbers of a `ModelConfig` alone; nothing is allocated, no file is read. Knows nothing of torch, of
quantisers' values or of how a tensor is used. Source: facts section 13.

Two views: `parameters(config)` yields what a program sees (one entry a weight), `tensor_specs(config)` what a file holds
(a quantised weight is two tensors, codes and scales).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from kvist.config import LayerSpec, ModelConfig, VisionConfig

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
BLOCK = 32
"""Side of a scale block: FP8 weights share a scale among 32x32 values, FP4 weights and Engram rows among 32 of a row."""


class Storage(Enum):
    """How a parameter's values lie in a file."""

    BF16 = "bf16"
    F32 = "f32"
    FP8 = "fp8"
    FP4 = "fp4"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the file. `dtype` is safetensors' name; `kind` the tensor class that `kvist plan` groups by."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Logical parameters: two a byte for packed FP4, none for scales."""
        if self.dtype == "F8_E8M0":
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "I8" else 1)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical parameter: its name, its unpacked shape, how it is stored, its class, and its layer (-1: none).

    `layer` counts draft blocks after the backbone, as `LayerSpec.index` does.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    kind: str
    layer: int = -1

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def scale_name(self) -> str:
        """Name of the scale tensor beside a quantised weight: `.weight` gives way to `.scale`."""
        return self.name.removesuffix("weight") + "scale"

    def specs(self) -> tuple[TensorSpec, ...]:
        """The one or two file tensors that hold this parameter, codes first."""
        if self.storage is Storage.BF16:
            return (TensorSpec(self.name, self.shape, "BF16", self.kind),)
        if self.storage is Storage.F32:
            return (TensorSpec(self.name, self.shape, "F32", self.kind),)
        rows, columns = self.shape
        shape, dtype, scale_rows = (rows, columns), "F8_E4M3", rows
        if self.storage is Storage.FP4:
            shape, dtype = (rows, columns // 2), "I8"
        elif self.storage is Storage.FP8:
            scale_rows = -(-rows // BLOCK)
        scale = TensorSpec(self.scale_name, (scale_rows, -(-columns // BLOCK)), "F8_E8M0", self.kind)
        return (TensorSpec(self.name, shape, dtype, self.kind), scale)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all its file tensors."""
        return sum(spec.nbytes for spec in self.specs())


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors of the released format, layer by layer (96,085 for `v41-flash`)."""
    for parameter in parameters(config):
        yield from parameter.specs()


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All logical parameters, in the order of the forward pass."""
    c = config
    yield Parameter("embed.weight", (c.vocab_size, c.dim), Storage.BF16, "embedding")
    if c.vision is not None:
        yield from _vision(c, c.vision)
    for spec in c.plan.layers:
        prefix = f"layers.{spec.index}"
        if spec.engram is not None:
            yield from _engram(c, spec, f"{prefix}.engram")
        yield from _block(c, spec, prefix, "", c.n_routed_experts)
    yield Parameter("norm.weight", (c.dim,), Storage.BF16, "norms")
    yield Parameter("head.weight", (c.vocab_size, c.dim), Storage.BF16, "head")
    for spec in c.plan.drafts:
        position = spec.index - c.n_layers
        yield from _block(c, spec, f"mtp.{position}", "draft ", c.dspark_n_routed_experts)
        yield from _draft_ends(c, spec, position)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Logical parameters of the four parts that the release reports (facts section 13)."""

    backbone: int
    engram: int
    vision: int
    drafts: int

    @property
    def total(self) -> int:
        """Sum of the four parts."""
        return self.backbone + self.engram + self.vision + self.drafts


def part_of(kind: str) -> str:
    """The part ('backbone', 'engram', 'vision', 'drafts') that a tensor class belongs to."""
    first = kind.split(" ", 1)[0]
    return {"engram": "engram", "vision": "vision", "draft": "drafts"}.get(first, "backbone")


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Logical parameters by part; scales count nothing and a packed FP4 byte counts two."""
    totals = {"backbone": 0, "engram": 0, "vision": 0, "drafts": 0}
    for parameter in parameters(config):
        totals[part_of(parameter.kind)] += parameter.count
    return ParameterCounts(**totals)


def bytes_by_kind(specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Payload bytes by tensor class, in order of first appearance."""
    totals: dict[str, int] = {}
    for spec in specs:
        totals[spec.kind] = totals.get(spec.kind, 0) + spec.nbytes
    return totals


def _weight_storage(config: ModelConfig) -> Storage:
    return {"fp8": Storage.FP8, "bf16": Storage.BF16}[config.dtype]


def _expert_storage(config: ModelConfig) -> Storage:
    return {"fp4": Storage.FP4, "fp8": Storage.FP8, "bf16": Storage.BF16}[config.expert_dtype]


def _block(c: ModelConfig, spec: LayerSpec, prefix: str, group: str, experts: int) -> Iterator[Parameter]:
    """A transformer block: norms, hyper-connections, attention and experts; `group` prefixes the tensor classes."""
    at = spec.index
    streams, mixes = c.hc_mult, c.hc_mult * (c.hc_mult + 2)
    for half in ("attn", "ffn"):
        yield Parameter(f"{prefix}.{half}_norm.weight", (c.dim,), Storage.BF16, f"{group}norms", at)
        for name, shape in (("fn", (mixes, streams * c.dim)), ("base", (mixes,)), ("scale", (3,))):
            yield Parameter(f"{prefix}.hc_{half}_{name}", shape, Storage.F32, f"{group}hyper-connections", at)
    yield from _attention(c, spec, f"{prefix}.attn", group)
    if spec.owns_rows:
        yield from _compressor(c, spec, f"{prefix}.attn.compressor")
    if spec.selects:
        yield from _indexer(c, spec, f"{prefix}.attn.indexer")
    yield from _experts(c, at, f"{prefix}.ffn", group, experts)


def _attention(c: ModelConfig, spec: LayerSpec, prefix: str, group: str) -> Iterator[Parameter]:
    kind, at, fp8 = f"{group}attention", spec.index, _weight_storage(c)
    heads = c.n_heads * c.head_dim
    yield Parameter(f"{prefix}.attn_sink", (c.n_heads,), Storage.F32, kind, at)
    yield Parameter(f"{prefix}.wq_a.weight", (c.q_lora_rank, c.dim), fp8, kind, at)
    yield Parameter(f"{prefix}.q_norm.weight", (c.q_lora_rank,), Storage.BF16, f"{group}norms", at)
    yield Parameter(f"{prefix}.wq_b.weight", (heads, c.q_lora_rank), fp8, kind, at)
    yield Parameter(f"{prefix}.wkv.weight", (c.head_dim, c.dim), fp8, kind, at)
    yield Parameter(f"{prefix}.kv_norm.weight", (c.head_dim,), Storage.BF16, f"{group}norms", at)
    yield Parameter(f"{prefix}.wo_a.weight", (c.o_groups * c.o_lora_rank, heads // c.o_groups), fp8, kind, at)
    yield Parameter(f"{prefix}.wo_b.weight", (c.dim, c.o_groups * c.o_lora_rank), fp8, kind, at)


def _compressor(c: ModelConfig, spec: LayerSpec, prefix: str) -> Iterator[Parameter]:
    """Ratio 1 has no gate: a group of one token needs no weights among its members."""
    for name in ("wkv", "wgate") if spec.ratio > 1 else ("wkv",):
        yield Parameter(f"{prefix}.{name}.weight", (c.head_dim, c.dim), Storage.BF16, "compressor", spec.index)
    yield Parameter(f"{prefix}.norm.weight", (c.head_dim,), Storage.BF16, "compressor", spec.index)


def _indexer(c: ModelConfig, spec: LayerSpec, prefix: str) -> Iterator[Parameter]:
    at = spec.index
    if spec.owns_rows:
        yield Parameter(f"{prefix}.wk.weight", (c.index_head_dim, c.head_dim), Storage.BF16, "indexer", at)
        yield Parameter(f"{prefix}.k_norm.weight", (c.index_head_dim,), Storage.BF16, "indexer", at)
    queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield Parameter(f"{prefix}.wq_b.weight", queries, _weight_storage(c), "indexer", at)
    yield Parameter(f"{prefix}.weights_proj.weight", (c.index_n_heads, c.dim), Storage.BF16, "indexer", at)


def _experts(c: ModelConfig, at: int, prefix: str, group: str, count: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.gate.weight", (count, c.dim), Storage.BF16, f"{group}router", at)
    for name in ("bias", "bias_vl"):
        yield Parameter(f"{prefix}.gate.{name}", (count,), Storage.F32, f"{group}router", at)
    up, down = (c.moe_inter_dim, c.dim), (c.dim, c.moe_inter_dim)
    shapes = {"w1": up, "w2": down, "w3": up}
    storage = _expert_storage(c)
    for expert in range(count):
        for name, shape in shapes.items():
            yield Parameter(f"{prefix}.experts.{expert}.{name}.weight", shape, storage, f"{group}experts", at)
    for name, shape in shapes.items():
        kind = f"{group}shared experts"
        yield Parameter(f"{prefix}.shared_experts.{name}.weight", shape, _weight_storage(c), kind, at)


def _engram(c: ModelConfig, spec: LayerSpec, prefix: str) -> Iterator[Parameter]:
    """The table keeps its FP8 rows whatever the other weights are: it is looked up, never multiplied."""
    at = spec.index
    assert spec.engram is not None, "called for Engram layers only"
    rows = c.engram_num_embeddings[spec.engram]
    yield Parameter(f"{prefix}.embed.weight", (rows, c.engram_head_dim), Storage.TABLE, "engram tables", at)
    mixed = ((c.hc_mult + 1) * c.dim, c.engram_columns * c.engram_head_dim)
    yield Parameter(f"{prefix}.wkv.weight", mixed, _weight_storage(c), "engram projections", at)
    for name in ("q_weight", "k_weight"):
        yield Parameter(f"{prefix}.{name}", (c.hc_mult, c.dim), Storage.BF16, "engram projections", at)


def _draft_ends(c: ModelConfig, spec: LayerSpec, position: int) -> Iterator[Parameter]:
    """What only the first and the last draft block own: input projection; final norm, Markov and confidence heads."""
    at, prefix = spec.index, f"mtp.{position}"
    if position == 0:
        projected = (c.dim, len(c.dspark_target_layer_ids) * c.dim)
        yield Parameter(f"{prefix}.main_proj.weight", projected, _weight_storage(c), "draft heads", at)
        yield Parameter(f"{prefix}.main_norm.weight", (c.dim,), Storage.BF16, "draft norms", at)
    if position == c.n_mtp_layers - 1:
        yield Parameter(f"{prefix}.norm.weight", (c.dim,), Storage.BF16, "draft norms", at)
        for name in ("embed", "head"):
            shape = (c.vocab_size, c.dspark_markov_rank)
            yield Parameter(f"{prefix}.markov_head.{name}.weight", shape, Storage.BF16, "draft heads", at)
        confidence = (1, c.dim + c.dspark_markov_rank)
        yield Parameter(f"{prefix}.confidence_head.proj.weight", confidence, Storage.BF16, "draft heads", at)


def _vision(c: ModelConfig, v: VisionConfig) -> Iterator[Parameter]:
    """Vision tower, aligner and the three learned embeddings of an image span, all BF16."""
    wide = v.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (wide, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (wide,),
    }
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (wide,),
            f"{prefix}.attn.wqkv.weight": (3 * wide, wide),
            f"{prefix}.attn.wqkv.bias": (3 * wide,),
            f"{prefix}.attn.wo.weight": (wide, wide),
            f"{prefix}.attn.wo.bias": (wide,),
            f"{prefix}.norm2.weight": (wide,),
            f"{prefix}.mlp.w1.weight": (2 * v.intermediate_size, wide),
            f"{prefix}.mlp.w2.weight": (wide, v.intermediate_size),
        }
    unfolded = wide * v.downsample_ratio**2
    shapes |= {"vision.norm.weight": (wide,), "aligner.w1.weight": (c.dim, unfolded), "aligner.w1.bias": (c.dim,)}
    shapes |= {"aligner.w2.weight": (c.dim, c.dim), "aligner.w2.bias": (c.dim,)}
    shapes |= {f"image_{part}": (c.dim,) for part in ("start", "end", "newline")}
    for name, shape in shapes.items():
        yield Parameter(name, shape, Storage.BF16, "vision")
