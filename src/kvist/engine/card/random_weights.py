"""Weights of any configuration drawn on the device in the released formats, layer by layer: no file, no copy of a float weight.

For measuring: widths, bytes and formats are the model's, values are noise of a size that keeps activations finite. Engram's
tables lie in pinned host memory, as many rows as they are given. Must not know steps or requests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig, replace
from kvist.engine.card.weights import (
    AttentionWeights,
    CardWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
    hash_tables,
)
from kvist.kernels.device import PanelWeight
from kvist.kernels.device.panels import Form
from kvist.kernels.engram.gpu import StoredRows
from kvist.kernels.experts.gpu import GpuBank

# Root mean squares of the codes drawn: any FP4 code; FP8 codes with an exponent of 4 to 7 (1/8 to 1.875).
CODE_SIZE = {"fp4": 2.93, "fp8": 0.87}


class Draw:
    """A source of tensors on one device, from one seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.source = torch.Generator(device).manual_seed(seed)

    def bytes(self, *shape: int) -> Tensor:
        """Uniform uint8."""
        return torch.empty(shape, dtype=torch.uint8, device=self.device).random_(0, 256, generator=self.source)

    def normal(self, *shape: int, size: float) -> Tensor:
        """float32, normal with the given deviation."""
        return torch.randn(*shape, device=self.device, generator=self.source) * size

    def panels(self, form: Form, outputs: int, inputs: int, *, experts: int = 1, paired: bool = False) -> PanelWeight:
        """A weight of random codes whose outputs are about as large as its inputs; a padded chunk's inputs are zero anyway."""
        chunk = 128 if form == "fp4" else 64
        grid = (experts, -(-outputs // 64), -(-inputs // chunk))
        codes = self.bytes(*grid, 64, 64)
        if form == "fp8":
            codes &= 0x9F
            codes |= 0x20
        middle = 127 - round(math.log2(CODE_SIZE[form] * math.sqrt(inputs)))
        scales = torch.empty((*grid, 64 if form == "fp4" else 1, 4), dtype=torch.uint8, device=self.device)
        scales.random_(middle - 1, middle + 1, generator=self.source)
        return PanelWeight(codes.view(torch.int16), scales.view(torch.int32).squeeze(-1), outputs, inputs, form, paired)

    def bank(self, form: Form, width: int, hidden: int, experts: int) -> GpuBank:
        """SwiGLU experts."""
        gate_up = self.panels(form, 2 * hidden, width, experts=experts, paired=True)
        return GpuBank(gate_up, self.panels(form, width, hidden, experts=experts))

    def plain(self, outputs: int, inputs: int) -> Tensor:
        """A bfloat16 matrix."""
        return self.normal(outputs, inputs, size=inputs**-0.5).bfloat16()

    def ones(self, *shape: int) -> Tensor:
        """Norm weights near one."""
        return 1.0 + self.normal(*shape, size=0.05)


def random_table(rows: int, width: int, draw: Draw, *, pinned: bool) -> StoredRows:
    """A table of `rows` rows in the stored format, drawn on the device and copied part by part; `pinned` on the host."""
    codes = torch.empty(rows, width, dtype=torch.uint8, pin_memory=pinned)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, pin_memory=pinned)
    part = 1 << 20
    for first in range(0, rows, part):
        count = min(part, rows - first)
        # No NaN: the exponent's highest bit is off.
        codes[first : first + count].copy_(draw.bytes(count, width) & 0xBF)
        scales[first : first + count].copy_((draw.bytes(count, width // 32) & 3) + 123)
    return StoredRows(codes, scales)


def random_weights(config: ModelConfig, *, table_rows: int, device: torch.device, seed: int = 0) -> CardWeights:
    """A whole model but vision. `table_rows`: rows of each Engram table (at most what the configuration names).

    Raises torch.cuda.OutOfMemoryError where the card is too small; `cost.weight_bytes` says beforehand what is needed.
    """
    draw = Draw(seed, device)
    layers = tuple(_layer(config, spec, draw, table_rows) for spec in config.plan.layers)
    classes = None
    if config.engram_layer_ids:
        classes = torch.randint(
            0, config.engram_compressed_vocab_size, (config.vocab_size,), device=device, generator=draw.source
        )
    return CardWeights(
        config=config, embed=draw.normal(config.vocab_size, config.dim, size=1.0).bfloat16(), norm=draw.ones(config.dim),
        head=draw.plain(config.vocab_size, config.dim), layers=layers, class_V=classes,
        drafts=_drafts(config, draw) if config.n_mtp_layers else None,
    )  # fmt: skip


def _drafts(config: ModelConfig, draw: Draw) -> DraftWeights:
    """Draft blocks, with as many experts as drafts have; wkv is read from the panels that it shares with wq_a."""
    c = replace(config, n_routed_experts=config.dspark_n_routed_experts, n_activated_experts=config.dspark_n_activated_experts)
    blocks = tuple(_layer(c, spec, draw, 0) for spec in config.plan.drafts)
    rank, width = c.dspark_markov_rank, c.dim
    if c.q_lora_rank % 64:
        raise ValueError(f"a query rank of {c.q_lora_rank} is no whole panels of 64; draft blocks are drawn for such ranks only")
    entries = []
    for block in blocks:
        both, at = block.attention.enter, c.q_lora_rank // 64
        entries.append(both._replace(codes=both.codes[:, at:], scales=both.scales[:, at:], outputs=c.head_dim))
    return DraftWeights(
        main=draw.panels("fp8", width, len(c.dspark_target_layer_ids) * width), main_norm=draw.ones(width), blocks=blocks,
        entries=tuple(entries), norm=draw.ones(width), markov_embed=draw.normal(c.vocab_size, rank, size=1.0).bfloat16(),
        markov_head=draw.plain(c.vocab_size, rank), confidence=draw.normal(width + rank, size=(width + rank) ** -0.5),
    )  # fmt: skip


def _layer(config: ModelConfig, spec: LayerSpec, draw: Draw, table_rows: int) -> LayerWeights:
    c = config
    moe = MoeWeights(
        active=c.n_activated_experts, gate=draw.plain(c.n_routed_experts, c.dim), bias=draw.normal(c.n_routed_experts, size=0.02),
        bias_image=draw.normal(c.n_routed_experts, size=0.02),
        routed=draw.bank("fp4", c.dim, c.moe_inter_dim, c.n_routed_experts), shared=draw.bank("fp8", c.dim, c.moe_inter_dim, 1),
    )  # fmt: skip
    return LayerWeights(
        spec=spec, attention=_attention(c, spec, draw), moe=moe, attention_mix=_mix(c, draw), moe_mix=_mix(c, draw),
        engram=None if spec.engram is None else _engram(c, spec, draw, table_rows),
    )  # fmt: skip


def _mix(c: ModelConfig, draw: Draw) -> MixWeights:
    logits = 2 * c.hc_mult + c.hc_mult**2
    width = c.hc_mult * c.dim
    return MixWeights(
        fn=draw.normal(logits, width, size=width**-0.5), base=draw.normal(logits, size=0.5),
        scale=draw.ones(3) * 0.5, norm=draw.ones(c.dim),
    )  # fmt: skip


def _attention(c: ModelConfig, spec: LayerSpec, draw: Draw) -> AttentionWeights:
    compressor = indexer = None
    if spec.owns_rows:
        compressor = CompressorWeights(
            project=draw.plain((1 if spec.ratio == 1 else 2) * c.head_dim, c.dim), norm=draw.ones(c.head_dim),
            key=draw.plain(c.index_head_dim, c.head_dim), key_norm=draw.ones(c.index_head_dim),
        )  # fmt: skip
    if spec.selects:
        indexer = IndexerWeights(
            query=draw.panels("fp8", c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            heads=draw.plain(c.index_n_heads, c.dim) * (c.index_head_dim * c.index_n_heads) ** -0.5,
        )
    return AttentionWeights(
        enter=draw.panels("fp8", c.q_lora_rank + c.head_dim, c.dim),
        query=draw.panels("fp8", c.n_heads * c.head_dim, c.q_lora_rank),
        out_a=draw.panels("fp8", c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups),
        out_b=draw.panels("fp8", c.dim, c.o_groups * c.o_lora_rank),
        query_norm=draw.ones(c.q_lora_rank), entry_norm=draw.ones(c.head_dim), sink=draw.normal(c.n_heads, size=1.0),
        compressor=compressor, indexer=indexer,
    )  # fmt: skip


def _engram(c: ModelConfig, spec: LayerSpec, draw: Draw, table_rows: int) -> EngramWeights:
    assert spec.engram is not None
    rows = min(table_rows, c.engram_num_embeddings[spec.engram])
    return EngramWeights(
        project=draw.panels("fp8", (c.hc_mult + 1) * c.dim, c.engram_columns * c.engram_head_dim),
        gates=draw.ones(c.hc_mult, c.dim), hashes=hash_tables(c, spec.engram, 0, draw.device),
        stored=random_table(rows, c.engram_head_dim, draw, pinned=draw.device.type == "cuda"),
    )  # fmt: skip
