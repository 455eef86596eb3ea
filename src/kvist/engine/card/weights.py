"""Weights of one model as the GPU operators take them: FP8 and FP4 panels, tensors that stay as they are, tables of Engram.

`pack` makes them from a `Transformer`; `random_weights.py` draws them. Must not know requests, steps or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig
from kvist.kernels.device import PanelWeight, pack_fp4_panels, pack_fp8_panels, stack_panels
from kvist.kernels.device.stored import bf16, fp4_codes, fp8_codes
from kvist.kernels.engram.gpu import HashTables, StoredRows
from kvist.kernels.experts.gpu import GpuBank
from kvist.model.attention import Attention, Compressor, Indexer
from kvist.model.block import Block
from kvist.model.dspark import DraftBlock, DraftBlocks
from kvist.model.engram import Engram, hash_plan
from kvist.model.moe import Expert, MoE
from kvist.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class MixWeights:
    """Hyper-connections and norm of one sublayer, float32: `fn` [F, S*D], `base` [F], `scale` [3], `norm` [D]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class CompressorWeights:
    """`project` bfloat16 [C, D] (ratio 1) or [2C, D]: channels, then gates; norms float32; `key` bfloat16 [I, C]."""

    project: Tensor
    norm: Tensor
    key: Tensor
    key_norm: Tensor


@dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """`query` panels of [J*I, Q]; `heads` bfloat16 [J, D] times I^-0.5 J^-0.5 (a power of two in the release)."""

    query: PanelWeight
    heads: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """`enter` panels of wq_a over wkv [Q + C, D]; the other projections as panels; norms and sinks float32."""

    enter: PanelWeight
    query: PanelWeight
    out_a: PanelWeight
    out_b: PanelWeight
    query_norm: Tensor
    entry_norm: Tensor
    sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """`gate` bfloat16 [E, D], both biases float32 [E], the routed experts, of which a row takes `active`, and the shared one."""

    active: int
    gate: Tensor
    bias: Tensor
    bias_image: Tensor
    routed: GpuBank
    shared: GpuBank


@dataclass(frozen=True, kw_only=True)
class EngramWeights:
    """`project` panels [(S+1)*D, X*W]; `gates` float32 [S, D]: the product of both norm weights; hash and table."""

    project: PanelWeight
    gates: Tensor
    hashes: HashTables
    stored: StoredRows


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer."""

    spec: LayerSpec
    attention: AttentionWeights
    moe: MoeWeights
    attention_mix: MixWeights
    moe_mix: MixWeights
    engram: EngramWeights | None


@dataclass(frozen=True, kw_only=True)
class DraftWeights:
    """The draft blocks: `main` panels [D, targets*D]; `blocks` and, of each, `entries`: the panels of its wkv [C, D] alone.

    float32 norms [D]; `markov_embed` and `markov_head` bfloat16 [V, M]; `confidence` float32 [D + M].
    """

    main: PanelWeight
    main_norm: Tensor
    blocks: tuple[LayerWeights, ...]
    entries: tuple[PanelWeight, ...]
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True, kw_only=True)
class CardWeights:
    """The model: `embed` and `head` bfloat16 [V, D], `norm` float32 [D], `class_V` int64 (None without Engram), `drafts` or
    None."""

    config: ModelConfig
    embed: Tensor
    norm: Tensor
    head: Tensor
    layers: tuple[LayerWeights, ...]
    class_V: Tensor | None
    drafts: DraftWeights | None = None


def _on(weight: PanelWeight, device: torch.device) -> PanelWeight:
    return weight._replace(codes=weight.codes.to(device), scales=weight.scales.to(device))


def _fp8(weight: Tensor, name: str, device: torch.device) -> PanelWeight:
    return _on(pack_fp8_panels(*fp8_codes(weight, name)), device)


def _float(weight: Tensor, device: torch.device) -> Tensor:
    return weight.detach().float().to(device).contiguous()


def pack(model: Transformer, tables: dict[int, StoredRows], device: torch.device) -> CardWeights:
    """Every weight of backbone and draft blocks on the device; `tables` by Engram layer. Vision stays outside.

    Raises `NotReleasedFormat` for weights that are not what a released file can hold, ValueError for a missing table.
    """
    config = model.config
    missing = [layer for layer in config.engram_layer_ids if layer not in tables]
    if missing:
        raise ValueError(f"Engram layers {missing} have no table; give stored rows for {list(config.engram_layer_ids)}")
    pad = 0
    if config.engram_layer_ids:
        if model.token_classes_V is None:
            raise ValueError("Engram layers need token classes; call attach_engram first")
        pad = int(model.token_classes_V[config.engram_pad_id])
    layers = []
    for block in model.layers:
        assert isinstance(block, Block)
        name = f"layers.{block.spec.index}"
        engram = None
        if block.engram is not None:
            assert block.spec.engram is not None
            hashes = hash_tables(config, block.spec.engram, pad, device)
            engram = _engram(block.engram, hashes, tables[block.spec.index], name, device)
        layers.append(_layer(block, name, engram, device))
    return CardWeights(
        config=config, embed=bf16(model.embed.weight, "embed").to(device), norm=_float(model.norm.weight, device),
        head=bf16(model.head.weight, "head").to(device), layers=tuple(layers),
        class_V=None if model.token_classes_V is None else model.token_classes_V.to(device),
        drafts=None if model.mtp is None else _drafts(model.mtp, device),
    )  # fmt: skip


def _layer(block: Block, name: str, engram: EngramWeights | None, device: torch.device) -> LayerWeights:
    return LayerWeights(
        spec=block.spec, attention=_attention(block.attn, name, device), moe=_moe(block.ffn, name, device),
        attention_mix=_mix(block, "attn", device), moe_mix=_mix(block, "ffn", device), engram=engram,
    )  # fmt: skip


def _drafts(blocks: DraftBlocks, device: torch.device) -> DraftWeights:
    parts = [block for block in blocks if isinstance(block, DraftBlock)]
    first, last = parts[0], parts[-1]
    return DraftWeights(
        main=_fp8(first.main_proj.weight, "mtp.0.main_proj", device), main_norm=_float(first.main_norm.weight, device),
        blocks=tuple(_layer(block, f"mtp.{i}", None, device) for i, block in enumerate(parts)),
        entries=tuple(_fp8(block.attn.wkv.weight, f"mtp.{i}.wkv", device) for i, block in enumerate(parts)),
        norm=_float(last.norm.weight, device),
        markov_embed=bf16(last.markov_head.embed.weight, "markov_head.embed").to(device),
        markov_head=bf16(last.markov_head.head.weight, "markov_head.head").to(device),
        confidence=_float(last.confidence_head.proj.weight, device).flatten(),
    )  # fmt: skip


def hash_tables(config: ModelConfig, number: int, pad: int, device: torch.device) -> HashTables:
    """The hash of the Engram layer with this number among them."""
    plan = hash_plan(config)

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(-1).to(device)

    return HashTables(there(plan.multipliers[number]), there(plan.primes[number]), there(plan.offsets[number]), pad)


def _mix(block: Block, half: str, device: torch.device) -> MixWeights:
    norm = block.attn_norm if half == "attn" else block.ffn_norm
    fn, base, scale = (_float(getattr(block, f"hc_{half}_{part}"), device) for part in ("fn", "base", "scale"))
    return MixWeights(fn=fn, base=base, scale=scale, norm=_float(norm.weight, device))


def _attention(attn: Attention, name: str, device: torch.device) -> AttentionWeights:
    rank, entry = fp8_codes(attn.wq_a.weight, f"{name}.wq_a"), fp8_codes(attn.wkv.weight, f"{name}.wkv")
    if len(attn.wq_a.weight) % 32:
        raise ValueError(f"{name}: a query rank of {len(attn.wq_a.weight)} cannot share panels with wkv; a multiple of 32 can")
    # uint8 views, because float8 tensors cannot be joined everywhere
    both = [torch.cat([a.view(torch.uint8), b.view(torch.uint8)]) for a, b in zip(rank, entry, strict=True)]
    return AttentionWeights(
        enter=_on(pack_fp8_panels(both[0], both[1]), device),
        query=_fp8(attn.wq_b.weight, f"{name}.wq_b", device),
        out_a=_fp8(attn.wo_a.weight, f"{name}.wo_a", device),
        out_b=_fp8(attn.wo_b.weight, f"{name}.wo_b", device),
        query_norm=_float(attn.q_norm.weight, device),
        entry_norm=_float(attn.kv_norm.weight, device),
        sink=_float(attn.attn_sink, device),
        compressor=_compressor(attn.compressor, attn.indexer, name, device),
        indexer=_indexer(attn.indexer, name, device),
    )


def _compressor(part: Compressor | None, indexer: Indexer | None, name: str, device: torch.device) -> CompressorWeights | None:
    if part is None:
        return None
    assert indexer is not None and indexer.wk is not None and indexer.k_norm is not None, "a source scores its own keys"
    weights: list[Tensor] = [part.wkv.weight] if part.wgate is None else [part.wkv.weight, part.wgate.weight]
    return CompressorWeights(
        project=bf16(torch.cat(weights), f"{name}.compressor").to(device),
        norm=_float(part.norm.weight, device),
        key=bf16(indexer.wk.weight, f"{name}.indexer.wk").to(device),
        key_norm=_float(indexer.k_norm.weight, device),
    )


def _indexer(part: Indexer | None, name: str, device: torch.device) -> IndexerWeights | None:
    if part is None:
        return None
    heads = part.weights_proj.weight.detach().bfloat16() * (part.width**-0.5 * part.heads**-0.5)
    return IndexerWeights(query=_fp8(part.wq_b.weight, f"{name}.indexer.wq_b", device), heads=heads.to(device))


def _swiglu(expert: Expert, form: str, name: str, device: torch.device) -> tuple[PanelWeight, PanelWeight]:
    codes_of, packed = (fp4_codes, pack_fp4_panels) if form == "fp4" else (fp8_codes, pack_fp8_panels)
    gate, down, up = (codes_of(getattr(expert, part).weight, f"{name}.{part}") for part in ("w1", "w2", "w3"))
    return _on(packed(*gate, up), device), _on(packed(*down), device)


def _moe(moe: MoE, name: str, device: torch.device) -> MoeWeights:
    if not len(moe.experts):
        raise ValueError(f"{name}: its experts lie in a bank; load the model with resident experts to pack them")
    pairs = [_swiglu(expert, "fp4", f"{name}.experts.{i}", device) for i, expert in enumerate(moe.experts)]  # type: ignore[arg-type]
    shared = GpuBank(*_swiglu(moe.shared_experts, "fp8", f"{name}.shared", device))
    routed = GpuBank(stack_panels([up for up, _ in pairs]), stack_panels([down for _, down in pairs]))
    return MoeWeights(
        active=moe.gate.n_active, gate=bf16(moe.gate.weight, f"{name}.gate").to(device), bias=_float(moe.gate.bias, device),
        bias_image=_float(moe.gate.bias_vl, device), routed=routed, shared=shared,
    )  # fmt: skip


def _engram(part: Engram, hashes: HashTables, stored: StoredRows, name: str, device: torch.device) -> EngramWeights:
    gates = part.q_weight.detach().float() * part.k_weight.detach().float()
    return EngramWeights(
        project=_fp8(part.wkv.weight, f"{name}.engram.wkv", device), gates=gates.to(device).contiguous(), hashes=hashes,
        stored=stored,
    )  # fmt: skip
