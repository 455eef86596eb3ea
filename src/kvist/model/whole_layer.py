"""A block as one native call: its weights packed once, its places from the memory, no Python between its operators.

The same operators in the same order as `block.py` runs them, hence its bits; it serves float32 inference on native operators
over a memory that gives `LayerPlaces`. Must not know schedules, pages or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvist.kernels.experts import ExpertBank, PackedBank, Triple
from kvist.kernels.experts.cpu import packed_expert
from kvist.kernels.hyper_connections.cpu import MOST_STREAMS
from kvist.kernels.native import f32, native_or_none, packed, threads
from kvist.kernels.native.layer import AttentionHalf, Entrance, ExpertsHalf, Layer, LayerPass, Matrix, run_layer
from kvist.kernels.sparse_attention.pages import lost_window
from kvist.model.memory import LayerPlaces, Shared
from kvist.model.moe import ModuleBank
from kvist.model.rows import Rows

if TYPE_CHECKING:
    from kvist.model.block import Block
    from kvist.model.layers import Linear, QuantLinear, RMSNorm

NONE = Matrix()
_version = attrgetter("_version")


class WholeLayer:
    """The structure of one block for native code, valid as long as no weight is written to, moved or exchanged."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._places: list[tuple[dict[str, Any], str]] = []
        self._held: list[Tensor] = []
        self._kept: list[object] = []
        attention = self._attention(block)
        self.bank, self.experts = block.ffn.bank, resident(block.ffn.bank)
        half = ExpertsHalf() if self.experts is None else self._experts(block)
        c = block.config
        pairs = c.rope_head_dim // 2
        self._layer = Layer(c.hc_mult, c.dim, pairs, c.hc_sinkhorn_iters, c.hc_eps, c.norm_eps, attention, half)
        self.address = ctypes.addressof(self._layer)
        self._counted = [w for w in self._held if not w.is_inference()]
        self._state = self._look()
        self._hooks = [module._forward_hooks for module in block.modules()]
        self._hooks += [module._forward_pre_hooks for module in block.modules()]

    def current(self) -> bool:
        """Whether every weight is the one that was packed, unchanged, and nobody listens to a module of the block."""
        if any(self._hooks) or self.block.ffn.bank is not self.bank:
            return False
        return all(map(is_, [found[name] for found, name in self._places], self._held)) and self._look() == self._state

    def _look(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self._counted)), list(map(Tensor.data_ptr, self._held))

    def run(
        self, x_NSD: Tensor, pre_NS: Tensor, rows: Rows, places: LayerPlaces, shared: Shared, *, publish: bool
    ) -> tuple[Tensor, Tensor, Shared]:
        """See `Block.forward`; where experts are not all in memory, the streams and collapse weights before their half."""
        block, spec, c = self.block, self.block.spec, self.block.config
        x, pre, text, count = f32(x_NSD), f32(pre_NS), rows.text_N.contiguous(), len(x_NSD)
        freq_P = block.attn.freq_P
        cos, sin = rows.rotary(freq_P)
        pool = shared.candidates_NB if spec.selects and spec.candidate_source is not None else None
        if spec.selects:
            topk = torch.empty(count, c.index_topk, dtype=torch.int64)
            kept = torch.empty(count, c.candidate_topk_blocks, dtype=torch.int64) if spec.publishes_candidates else None
            shared = Shared(kv_source=spec.kv_source, topk_NK=topk, candidates_NB=shared.candidates_NB if kept is None else kept)
        else:
            kept = None
        groups = None
        if publish and spec.owns_rows:
            table = rows.rotary_at(places.positions(spec.index), freq_P)
            groups = places.groups(spec.index, table)
        chosen = shared.topk_NK if spec.ratio else None
        source = shared.kv_source if spec.ratio else None
        given = LayerPass(
            places.segments_S5.data_ptr(),
            len(places.segments_S5),
            count,
            places.block,
            text.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            0 if source is None or chosen is None else places.source(source),
            places.ring(spec.index),
            0 if groups is None else ctypes.addressof(groups),
            0 if pool is None else pool.data_ptr(),
            0 if pool is None else pool.shape[1],
            0 if chosen is None else chosen.shape[1],
            0 if chosen is None else chosen.data_ptr(),
            0 if kept is None else kept.data_ptr(),
            threads(),
        )
        x_out, pre_out = torch.empty_like(x), torch.empty_like(pre)
        failed = run_layer(self.address, given, x, pre, x_out, pre_out)
        if failed:
            raise lost_window(places.segments_S5, failed)
        return x_out, pre_out, shared

    def _attention(self, block: Block) -> AttentionHalf:
        c, attn, spec = block.config, block.attn, block.spec
        groups = c.o_groups
        rows, index = attn.compressor, attn.indexer
        # The compressor's norm is `rows_norm`; a layer without rows leaves these parts out.
        owned: tuple[Any, ...] = (NONE, NONE, NONE, 0, 0)
        if rows is not None:
            assert index is not None and index.wk is not None and index.k_norm is not None
            gate = NONE if rows.wgate is None else self._linear(rows.wgate)
            owned = (self._linear(rows.wkv), gate, self._linear(index.wk), self._norm(rows.norm), self._norm(index.k_norm))
        choice: tuple[Any, ...] = (NONE, NONE)
        if index is not None:
            choice = self._linear(index.wq_b), self._linear(index.weights_proj)
        return AttentionHalf(
            self._entrance(block, "attn"),
            self._linear(attn.wq_a),
            self._linear(attn.wq_b),
            self._linear(attn.wkv),
            self._linear(attn.wo_a, groups),
            self._linear(attn.wo_b),
            self._norm(attn.q_norm),
            self._norm(attn.kv_norm),
            self._values(attn, "attn_sink"),
            *owned,
            *choice,
            c.n_heads,
            c.head_dim,
            0 if index is None else index.heads,
            c.index_head_dim,
            c.index_topk,
            c.candidate_block_size,
            c.candidate_topk_blocks if spec.publishes_candidates else 0,
            0.0 if index is None else index.scale,
        )

    def _experts(self, block: Block) -> ExpertsHalf:
        ffn, router = block.ffn, block.ffn.gate
        assert self.experts is not None
        shared = ffn.shared_experts
        for layer in (shared.w1, shared.w2, shared.w3):
            self._hold(layer, "weight")
        triples = [*self.experts, (shared.w1.weight, shared.w2.weight, shared.w3.weight)]
        for module in ffn.experts.modules():
            if "weight" in module._parameters:
                self._hold(module, "weight")
        packs = [packed_expert(triple) for triple in triples]
        tables = (ctypes.c_void_p * (3 * len(packs)))(*[part.pointer for triple in packs for part in triple])
        kinds = (ctypes.c_int32 * len(packs))(*[triple[0].kind for triple in packs])
        self._kept += [packs, tables, kinds]
        return ExpertsHalf(
            self._entrance(block, "ffn"),
            self._matrix(router, "weight"),
            self._values(router, "bias"),
            self._values(router, "bias_vl"),
            ctypes.addressof(tables),
            ctypes.addressof(kinds),
            len(packs) - 1,
            packs[-1][0].outputs,
            router.n_active,
            router.normalise,
            router.temperature,
            router.scale,
            ffn.limit,
        )

    def _entrance(self, block: Block, half: str) -> Entrance:
        norm = block.attn_norm if half == "attn" else block.ffn_norm
        fn = self._matrix(block, f"hc_{half}_fn", wide=True)
        return Entrance(fn, self._values(block, f"hc_{half}_base"), self._values(block, f"hc_{half}_scale"), self._norm(norm))

    def _linear(self, module: Linear | QuantLinear, groups: int = 1) -> Matrix:
        return self._matrix(module, "weight", groups)

    def _matrix(self, module: nn.Module, name: str, groups: int = 1, *, wide: bool = False) -> Matrix:
        weight = self._hold(module, name)
        copy = packed(weight, groups, wide=wide)
        self._kept.append(copy)
        return Matrix.of(copy, weight.shape[1], groups)

    def _norm(self, module: RMSNorm) -> int:
        return self._values(module, "weight")

    def _values(self, module: nn.Module, name: str) -> int:
        values = f32(self._hold(module, name).detach())
        self._kept.append(values)
        return values.data_ptr()

    def _hold(self, module: nn.Module, name: str) -> Tensor:
        weight = module._parameters[name]
        assert weight is not None
        self._places.append((module._parameters, name))
        self._held.append(weight)
        return weight


def resident(bank: ExpertBank) -> Sequence[Triple] | None:
    """All experts' weights, if they stay where they are: own parameters, or packed once. Else None."""
    if isinstance(bank, PackedBank):
        return bank.triples
    if not isinstance(bank, ModuleBank):
        return None
    triples = [(w1.weight, w2.weight, w3.weight) for w1, w2, w3 in bank.layers]
    return triples if all(w.dtype is torch.float32 for triple in triples for w in triple) else None


def servable(block: Block) -> bool:
    """Whether one native call may stand for the block: what it takes, and the row widths that the formats divide."""
    numerics, c = block.numerics, block.config
    if native_or_none() is None or numerics.product_impl != "cpu" or numerics.dtype is not torch.float32:
        return False
    if not numerics.quantise or numerics.quantise_weights or c.hc_mult > MOST_STREAMS:
        return False
    widths: Sequence[int] = (c.dim, c.q_lora_rank, c.head_dim, c.o_groups * c.o_lora_rank, c.moe_inter_dim, c.index_head_dim)
    return not any(width % 32 for width in widths)
