"""A block as one native call: its weights packed once, its places from the memory, no Python between its operators.

The same operators in the same order as `block.py` runs them, hence its bits; it serves float32 inference on native operators
over a memory that gives `LayerPlaces`. Must not know schedules, pages or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvist.kernels.experts import ExpertBank, PackedBank, Triple
from kvist.kernels.experts.cpu import kind_of, packed_expert
from kvist.kernels.hyper_connections.cpu import MOST_STREAMS
from kvist.kernels.native import f32, native_or_none, packed, threads
from kvist.kernels.native.layer import (
    AttentionHalf,
    Entrance,
    ExpertsHalf,
    Layer,
    LayerPass,
    Matrix,
    WindowBlocks,
    keep_windows,
    run_layers,
)
from kvist.kernels.quantise.cpu import GROUP
from kvist.kernels.sparse_attention.pages import lost_window
from kvist.model.memory import LayerPlaces, Shared
from kvist.model.moe import ModuleBank
from kvist.model.rows import Rows

if TYPE_CHECKING:
    from kvist.model.block import Block
    from kvist.model.layers import Linear, QuantLinear

NONE = Matrix()
_version = attrgetter("_version")


def begin_pass(rows: Rows, places: LayerPlaces, freq_P: Tensor) -> LayerPass:
    """What all layers of a pass that rotate alike get, in a structure of the caller's own."""
    key = id(places), id(freq_P)
    if key not in rows.begun:
        text_N, (cos, sin), segments = rows.text_N.contiguous(), rows.rotary(freq_P), places.segments_S5
        given = LayerPass(
            segments.data_ptr(), len(segments), len(text_N), places.block, text_N.data_ptr(), cos.data_ptr(), sin.data_ptr()
        )
        given.threads = threads()
        rows.begun[key] = given, (places, text_N, freq_P, cos, sin)
    return LayerPass.from_buffer_copy(rows.begun[key][0])


class PackedWeights:
    """Weights that native code reads by address: packed copies or plain values, and whether they are still the module's."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._held: list[Tensor] = []
        self._counted: list[Tensor] = []
        self._kept: list[object] = []
        self._hooks: list[dict[int, Any]] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []

    @property
    def watched(self) -> bool:
        """Whether somebody listens to a module: then it has to be called."""
        return any(self._hooks)

    def current(self, *, moved: bool = True) -> bool:
        """Whether every weight is the one that was packed, unchanged. `moved` False: only whether one was written to.

        A weight exchanged for another or moved is looked for where a prompt runs, not for every token of a reply: with all
        of a model's weights out of the caches the question costs a tenth of a small model's step.
        """
        if list(map(_version, self._counted)) != self._versions:
            return False
        if not moved:
            return True
        same = all(map(is_, [found[name] for found, name in self._places], self._held))
        return same and list(map(Tensor.data_ptr, self._held)) == self._addresses

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """All weights are taken: remember their state, and the listeners of `modules`."""
        self._counted = [w for w in self._held if not w.is_inference()]
        self._versions, self._addresses = list(map(_version, self._counted)), list(map(Tensor.data_ptr, self._held))
        for module in modules:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]

    def linear(self, module: Linear | QuantLinear, groups: int = 1) -> Matrix:
        """A linear layer's weight."""
        return self.matrix(module, "weight", groups)

    def matrix(self, module: nn.Module, name: str, groups: int = 1, *, wide: bool = False) -> Matrix:
        """A packed parameter; see `packed`."""
        weight = self.hold(module, name)
        copy = packed(weight, groups, wide=wide)
        self.keep(copy)
        return Matrix.of(copy, weight.shape[1], groups)

    def values(self, module: nn.Module, name: str = "weight") -> int:
        """Address of a parameter as contiguous float32."""
        values = f32(self.hold(module, name).detach())
        self.keep(values)
        return values.data_ptr()

    def hold(self, module: nn.Module, name: str) -> Tensor:
        """A parameter whose changes count."""
        weight = module._parameters[name]
        assert weight is not None
        self._places.append((module._parameters, name))
        self._held.append(weight)
        return weight

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a model has its own: addresses are not copied."""
        return type(None), ()

    def keep(self, *owners: object) -> None:
        """Keep alive what addresses were taken of."""
        self._kept += owners


class WholeLayer(PackedWeights):
    """The structure of one block for native code, valid as long as no weight is written to, moved or exchanged."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        attention = self._attention(block)
        self.bank, self.experts = block.ffn.bank, resident(block.ffn.bank)
        half = ExpertsHalf() if self.experts is None else self._experts(block)
        c = block.config
        pairs = c.rope_head_dim // 2
        self.layer = Layer(c.hc_mult, c.dim, pairs, c.hc_sinkhorn_iters, c.hc_eps, c.norm_eps, attention, half)
        self.settle(block.modules())

    def current(self, *, moved: bool = True) -> bool:
        """See `PackedWeights.current`; another bank of experts also counts."""
        return self.block.ffn.bank is self.bank and super().current(moved=moved)

    def _attention(self, block: Block) -> AttentionHalf:
        c, attn, spec = block.config, block.attn, block.spec
        groups = c.o_groups
        rows, index = attn.compressor, attn.indexer
        # The compressor's norm is `rows_norm`; a layer without rows leaves these parts out.
        owned: tuple[Any, ...] = (NONE, NONE, NONE, 0, 0)
        if rows is not None:
            assert index is not None and index.wk is not None and index.k_norm is not None
            gate = NONE if rows.wgate is None else self.linear(rows.wgate)
            owned = (self.linear(rows.wkv), gate, self.linear(index.wk), self.values(rows.norm), self.values(index.k_norm))
        choice: tuple[Any, ...] = (NONE, NONE)
        if index is not None:
            choice = self.linear(index.wq_b), self.linear(index.weights_proj)
        return AttentionHalf(
            self._entrance(block, "attn"),
            self.linear(attn.wq_a),
            self.linear(attn.wq_b),
            self.linear(attn.wkv),
            self.linear(attn.wo_a, groups),
            self.linear(attn.wo_b),
            self.values(attn.q_norm),
            self.values(attn.kv_norm),
            self.values(attn, "attn_sink"),
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
            self.hold(layer, "weight")
        triples = [*self.experts, (shared.w1.weight, shared.w2.weight, shared.w3.weight)]
        for module in ffn.experts.modules():
            if "weight" in module._parameters:
                self.hold(module, "weight")
        packs = [packed_expert(triple) for triple in triples]
        tables = (ctypes.c_void_p * (3 * len(packs)))(*[part.pointer for triple in packs for part in triple])
        kinds = (ctypes.c_int32 * len(packs))(*[kind_of(triple) for triple in packs])
        self.keep(packs, tables, kinds)
        return ExpertsHalf(
            self._entrance(block, "ffn"),
            self.matrix(router, "weight"),
            self.values(router, "bias"),
            self.values(router, "bias_vl"),
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
        fn = self.matrix(block, f"hc_{half}_fn", wide=True)
        return Entrance(fn, self.values(block, f"hc_{half}_base"), self.values(block, f"hc_{half}_scale"), self.values(norm))


class Stretch:
    """Layers of one pass, one after the other, that run in one call: what Python does for them it does before, in one go.

    Between two layers their weights have pushed Python's own memory out of the caches.
    """

    def __init__(self, rows: Rows, places: LayerPlaces) -> None:
        self.rows, self.places = rows, places
        self._layers: list[Layer] = []
        self._passes: list[LayerPass] = []
        self._kept: list[object] = []

    def add(self, whole: WholeLayer, shared: Shared, *, publish: bool) -> Shared:
        """Another layer; the note as it leaves it. Tensors that the note names are filled when the layers run."""
        block, spec, c, rows, places = whole.block, whole.block.spec, whole.block.config, self.rows, self.places
        freq_P, count = block.attn.freq_P, len(rows.token_ids_N)
        given = begin_pass(rows, places, freq_P)
        given.ring = places.ring(spec.index)
        if spec.selects:
            topk = torch.empty(count, c.index_topk, dtype=torch.int64)
            pool, kept = shared.candidates_NB, shared.candidates_NB
            if pool is not None and spec.candidate_source is not None:
                given.pool, given.pool_blocks = pool.data_ptr(), pool.shape[1]
            if spec.publishes_candidates:
                kept = torch.empty(count, c.candidate_topk_blocks, dtype=torch.int64)
                given.blocks = kept.data_ptr()
            shared = Shared(kv_source=spec.kv_source, topk_NK=topk, candidates_NB=kept)
        if publish and spec.owns_rows:
            positions = places.positions(spec.index)
            # Groups of one whose every row is new stand where the rows do.
            alike = spec.ratio == 1 and len(positions) == count
            groups = places.groups(spec.index, rows.rotary(freq_P) if alike else rows.rotary_at(positions, freq_P))
            given.groups = ctypes.addressof(groups)
            self._kept.append(groups)
        if spec.ratio and shared.kv_source is not None and shared.topk_NK is not None:
            given.source = places.source(shared.kv_source)
            given.topk, given.selected = shared.topk_NK.data_ptr(), shared.topk_NK.shape[1]
        self._layers.append(whole.layer)
        self._passes.append(given)
        self._kept += [whole, shared]
        return shared

    def run(self, x_NSD: Tensor, pre_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [N,S,D] and collapse weights after all of them; if the last has no experts in memory, before its experts."""
        x, pre = f32(x_NSD), f32(pre_NS)
        x_out, pre_out = torch.empty_like(x), torch.empty_like(pre)
        failed = run_layers(self._layers, self._passes, x, pre, x_out, pre_out)
        if failed:
            raise lost_window(self.places.segments_S5, failed)
        return x_out, pre_out


class WindowEntries(PackedWeights):
    """The draft blocks' projections of an accepted token, all of them in one call."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        parts = [block.attn for block in blocks]
        self._layers = [block.spec.index for block in blocks]
        self._freq_P = parts[0].freq_P
        assert all(attn.freq_P is self._freq_P for attn in parts), "window-only layers rotate alike"
        self._matrices = (Matrix * len(parts))(*[self.linear(attn.wkv) for attn in parts])
        self._norms = (ctypes.c_void_p * len(parts))(*[self.values(attn.kv_norm) for attn in parts])
        self._sizes = len(parts), blocks[0].config.head_dim, blocks[0].config.rope_head_dim // 2, blocks[0].config.norm_eps
        self.settle(module for attn in parts for module in (attn, attn.wkv, attn.kv_norm))

    def write(self, context_ND: Tensor, rows: Rows, places: LayerPlaces) -> None:
        """Window entries of contexts into the rings of all blocks."""
        context = f32(context_ND)
        rings = (ctypes.c_void_p * len(self._layers))(*[places.ring(layer) for layer in self._layers])
        arrays = (self._matrices, self._norms, rings)
        blocks = WindowBlocks(*(ctypes.addressof(array) for array in arrays), *self._sizes)
        keep_windows(blocks, begin_pass(rows, places, self._freq_P), context)


def resident(bank: ExpertBank) -> Sequence[Triple] | None:
    """All experts' weights, if they stay where they are: own parameters, or packed once. Else None."""
    if isinstance(bank, PackedBank):
        return bank.triples
    if not isinstance(bank, ModuleBank):
        return None
    triples = [(w1.weight, w2.weight, w3.weight) for w1, w2, w3 in bank.layers]
    return triples if all(w.dtype is torch.float32 for triple in triples for w in triple) else None


def servable(block: Block) -> bool:
    """Whether one native call may stand for the block: its numerics, and sizes that a configuration leaves open."""
    numerics, c = block.numerics, block.config
    if numerics.product_impl != "cpu" or numerics.dtype is not torch.float32:
        return False
    if not numerics.quantise or numerics.quantise_weights or c.hc_mult > MOST_STREAMS:
        return False
    return c.o_groups * c.o_lora_rank % GROUP["fp8"] == 0 and native_or_none() is not None
