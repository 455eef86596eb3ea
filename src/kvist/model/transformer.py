"""The whole backbone: embedding, the layer stack in ranges (the causal encoder-decoder split), the final collapse and head.

Owns the parameters under their released names. Must not know requests, files or sampling. Report 2.2; facts sections 0, 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvist.config import ModelConfig
from kvist.kernels.engram.cpu import ngram_rows
from kvist.kernels.experts import ExpertBank
from kvist.kernels.hyper_connections.ref import collapse
from kvist.model.block import Block
from kvist.model.dspark import DraftBlocks
from kvist.model.engram import EngramReader, hash_plan, hash_rows
from kvist.model.layers import Linear, RMSNorm, embedding
from kvist.model.memory import Shared, SharedMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows
from kvist.model.vision import Aligner, VisionTower, embed_span
from kvist.model.whole_layer import Stretch


class Flow(NamedTuple):
    """What travels between layers: streams [N,S,D], collapse weights [N,S], the shared note, and the draft's inputs."""

    x_NSD: Tensor
    pre_NS: Tensor
    shared: Shared
    targets: tuple[Tensor, ...] = ()


class Transformer(nn.Module):
    """DeepSeek-V4.1-Flash for any `ModelConfig`. Attach Engram readers and token classes before running.

    Without `own_experts` it has no parameters for routed experts; attach banks that read them from elsewhere.
    """

    mtp: DraftBlocks | None
    vision: VisionTower | None
    aligner: Aligner | None
    image_start: nn.Parameter
    image_newline: nn.Parameter
    image_end: nn.Parameter

    def __init__(self, config: ModelConfig, numerics: Numerics, *, own_experts: bool = True) -> None:
        super().__init__()
        self.config, self.numerics, self.plan = config, numerics, config.plan
        self.embed = embedding(config.vocab_size, config.dim, numerics.dtype)
        self.layers = nn.ModuleList(
            Block(config, spec, numerics, config.n_routed_experts, config.n_activated_experts, own_experts=own_experts)
            for spec in self.plan.layers
        )
        self.norm = RMSNorm(config.dim, config.norm_eps, numerics.row_impl)
        self.head = Linear(config.dim, config.vocab_size, numerics, wide=True)
        self.mtp = DraftBlocks(config, numerics, own_experts=own_experts) if config.n_mtp_layers else None
        self.vision = self.aligner = None
        if config.vision is not None:
            self.vision = VisionTower(config.vision, numerics.dtype)
            self.aligner = Aligner(config.vision, config.dim, numerics.dtype)
            for name in ("image_start", "image_newline", "image_end"):
                self.register_parameter(name, nn.Parameter(torch.zeros(config.dim, dtype=numerics.dtype)))
        self.token_classes_V: Tensor | None = None
        self.pad_class = 0
        self.targets = frozenset(config.dspark_target_layer_ids) if config.n_mtp_layers else frozenset()

    def attach_engram(self, token_classes_V: Tensor, readers: Mapping[int, EngramReader]) -> None:
        """Give the token -> class map (int64 [ids]) and a table reader for each Engram layer index."""
        missing = [layer for layer in self.config.engram_layer_ids if layer not in readers]
        if missing:
            raise ValueError(f"Engram layers {missing} have no table reader")
        self.token_classes_V = token_classes_V.long().contiguous()
        self.pad_class = int(self.token_classes_V[self.config.engram_pad_id])
        for layer in self.config.engram_layer_ids:
            block = self.layers[layer]
            assert isinstance(block, Block) and block.engram is not None
            block.engram.reader = readers[layer]

    def attach_experts(self, banks: Mapping[int, ExpertBank]) -> None:
        """Read the routed experts of every block through a bank by layer index; draft blocks count after the backbone."""
        blocks = [*self.layers, *(self.mtp or ())]
        missing = [layer for layer in range(len(blocks)) if layer not in banks]
        if missing:
            raise ValueError(f"layers {missing} have no expert bank")
        for layer, block in enumerate(blocks):
            assert isinstance(block, Block)
            block.ffn.attach(banks[layer])

    def prefetch_engram(self, engram_LNX: Tensor | None) -> None:
        """Tell the tables which rows (of `engram_ids`) will be wanted, so that readers that fetch can begin now."""
        if engram_LNX is None:
            return
        for layer, ids_NX in zip(self.config.engram_layer_ids, engram_LNX, strict=True):
            block = self.layers[layer]
            assert isinstance(block, Block) and block.engram is not None
            if block.engram.reader is not None:
                block.engram.reader.prefetch(ids_NX)

    def engram_ids(self, ids_T: Tensor, text_T: Tensor, start: int = 0) -> Tensor | None:
        """Engram row ids [layers, T - start, columns] of one sequence given from position 0, or None without Engram."""
        if not self.config.engram_layer_ids:
            return None
        if self.token_classes_V is None:
            raise ValueError("Engram layers need token classes; call attach_engram first")
        if self.numerics.product_impl == "cpu":
            plan, limit = hash_plan(self.config), min(self.config.vocab_size, len(self.token_classes_V))
            sizes = limit, self.config.engram_compressed_vocab_size, self.pad_class
            keys = plan.multipliers, plan.primes, plan.offsets
            found_LTX = ngram_rows(ids_T, text_T, start, self.token_classes_V, *sizes, *keys)
            if found_LTX is not None:
                return found_LTX
        classes_T = self.token_classes_V[self.check_ids(ids_T)]
        return hash_rows(self.config, classes_T, text_T, self.pad_class, start)

    def check_ids(self, ids: Tensor) -> Tensor:
        """The ids, if all lie in the vocabulary (and have a class); else ValueError naming the first bad one."""
        limit = self.config.vocab_size
        if self.token_classes_V is not None:
            limit = min(limit, len(self.token_classes_V))
        if not ids.numel():
            return ids
        if ids.numel() == 1:
            least = most = int(ids.item())
        else:
            least, most = (int(end) for end in torch.aminmax(ids))
        if least < 0 or most >= limit:
            bad = (ids < 0) | (ids >= limit)
            raise ValueError(f"token id {int(ids[bad][0])} is outside the vocabulary 0..{limit - 1}")
        return ids

    def begin(self, rows: Rows) -> Flow:
        """Embed the rows (image spans overwritten), copy to all streams, collapse weights one-hot on stream 0."""
        x_ND = self.embed(self.check_ids(rows.token_ids_N)).to(self.numerics.dtype)
        if rows.features_FD is not None and rows.feature_rows_F is not None:
            x_ND = x_ND.index_copy(0, rows.feature_rows_F, rows.features_FD.to(x_ND.dtype))
        x_NSD = x_ND.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre_NS = torch.zeros(len(x_ND), self.config.hc_mult, device=x_ND.device)
        pre_NS[:, 0] = 1.0
        return Flow(x_NSD, pre_NS, Shared())

    def run(self, flow: Flow, rows: Rows, memory: SharedMemory, first: int, stop: int, *, publish: bool = True) -> Flow:
        """Layers first..stop-1. `publish=False`: layer `first` has already published these rows (CED tail).

        Layers that native code can run wait in a stretch, which is one call; it runs before whatever must see the streams
        in between: an Engram, a target of the draft blocks, a layer that is called operator by operator.
        """
        x_NSD, pre_NS, shared, targets = flow
        stretch: Stretch | None = None
        for layer in range(first, stop):
            block = self.layers[layer]
            assert isinstance(block, Block)
            native = block.whole(rows, memory)
            joins = native is not None and native[0].experts is not None
            if stretch is not None and (block.engram is not None or layer in self.targets or not joins):
                (x_NSD, pre_NS), stretch = stretch.run(x_NSD, pre_NS), None
            x_NSD = block.remember(x_NSD, rows)
            if layer in self.targets:
                targets = (*targets, x_NSD.mean(1))
            if native is not None and joins:
                stretch = stretch or Stretch(rows, native[1])
                shared = stretch.add(native[0], shared, publish=publish or layer != first)
            else:
                x_NSD, pre_NS, shared = block(x_NSD, pre_NS, rows, memory, shared, publish=publish or layer != first)
        if stretch is not None:
            x_NSD, pre_NS = stretch.run(x_NSD, pre_NS)
        return Flow(x_NSD, pre_NS, shared, targets)

    def publish(self, flow: Flow, rows: Rows, memory: SharedMemory) -> None:
        """The decoder source's compressor and index keys for all rows: all that prefill needs above the encoder."""
        if self.plan.decoder_start == len(self.layers):
            return
        block = self.layers[self.plan.decoder_start]
        assert isinstance(block, Block)
        h_ND, _ = block.enter("attn", block.remember(flow.x_NSD, rows), flow.pre_NS)
        block.attn.publish(h_ND, rows, memory)

    def hidden(self, flow: Flow) -> Tensor:
        """The final collapse [N,D]."""
        return collapse(flow.x_NSD, flow.pre_NS)

    def logits(self, flow: Flow) -> Tensor:
        """float32 [N,V]: final norm and the float32 head."""
        return self.head(self.norm(self.hidden(flow)))

    def forward(self, rows: Rows, memory: SharedMemory) -> Flow:
        """All layers on all rows."""
        return self.run(self.begin(rows), rows, memory, 0, len(self.layers))

    def encode_image(self, patches_PC: Tensor, patch_rows: int, patch_cols: int) -> Tensor:
        """Patches [P, 3*patch^2] of one image -> the embeddings of its whole span [span tokens, D]."""
        if self.vision is None or self.aligner is None:
            raise ValueError("this model has no vision tower")
        seen = self.vision(patches_PC, patch_rows, patch_cols)
        rows, cols = (-(-side // self.aligner.ratio) for side in (patch_rows, patch_cols))
        features = self.aligner(seen, patch_rows, patch_cols)
        return embed_span(features, rows, cols, self.image_start, self.image_newline, self.image_end)
