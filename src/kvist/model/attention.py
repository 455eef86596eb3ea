"""CSA2 attention: low-rank queries, one shared latent a key, window and compressed rows in one softmax.

A Full layer compresses its input and scores; a Reindex layer scores shared keys; a Reuse layer takes all from before.
Must not know experts, streams or where keys are stored. Report 2.3; facts sections 3 to 6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvist.config import LayerSpec, ModelConfig
from kvist.kernels.group_pool import Groups, group_pool
from kvist.kernels.linear import linear
from kvist.kernels.rotary import rotate
from kvist.model.layers import Linear, QuantLinear, RMSNorm, inverse_frequencies, rotary_table
from kvist.model.memory import Shared, SharedMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows


class Compressor(nn.Module):
    """R tokens into one latent: a per-channel softmax over the group's gates, or a plain projection for ratio 1."""

    wgate: Linear | None

    def __init__(self, config: ModelConfig, ratio: int, numerics: Numerics) -> None:
        super().__init__()
        grouped = ratio > 1
        self.ratio, self.dtype = ratio, numerics.dtype
        self.wkv = Linear(config.dim, config.head_dim, numerics, wide=grouped)
        self.wgate = Linear(config.dim, config.head_dim, numerics, wide=True) if grouped else None
        self.norm = RMSNorm(config.head_dim, config.norm_eps, numerics.row_impl)

    def project(self, h_ND: Tensor) -> tuple[Tensor, Tensor | None]:
        """Per-token channels and gates (float32 when tokens are grouped)."""
        return self.wkv(h_ND), None if self.wgate is None else self.wgate(h_ND)

    def pool(self, groups: Groups) -> Tensor:
        """Complete groups [G,R,C] -> normed latents [G,C] before rotation."""
        if groups.gate_GRC is None:
            latent_GC = groups.kv_GRC.squeeze(1)
        else:
            latent_GC = group_pool(groups.kv_GRC, groups.gate_GRC, impl=self.norm.impl)
        return self.norm(latent_GC.to(self.dtype))


class Indexer(nn.Module):
    """Cheap scores that choose rows. Only Full layers own a key projection; the others read shared keys."""

    wk: Linear | None
    k_norm: RMSNorm | None

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = QuantLinear(config.q_lora_rank, self.heads * self.width, numerics)
        self.weights_proj = Linear(config.dim, self.heads, numerics)
        self.wk = Linear(config.head_dim, self.width, numerics) if spec.owns_rows else None
        self.k_norm = RMSNorm(self.width, config.norm_eps, numerics.row_impl) if spec.owns_rows else None
        self.numerics, self.scale = numerics, self.width**-0.5 * self.heads**-0.5

    def keys(self, latent_GC: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated index keys [G,I] from latents before their own rotation; quantised where they are stored."""
        assert self.wk is not None and self.k_norm is not None
        return rotate(self.k_norm(self.wk(latent_GC)), table, impl=self.numerics.row_impl)

    def queries(self, h_ND: Tensor, rank_NQ: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Quantised index queries [N,J,I] and head weights [N,J]."""
        q_NJI = self.wq_b(rank_NQ).unflatten(1, (self.heads, self.width))
        weight_NJ = self.weights_proj(h_ND) * self.scale
        return self.numerics.index(rotate(q_NJI, table, impl=self.numerics.row_impl)), weight_NJ


class Attention(nn.Module):
    """One layer's attention in any of the four roles."""

    compressor: Compressor | None
    indexer: Indexer | None

    def __init__(self, config: ModelConfig, spec: LayerSpec, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.spec, self.numerics = config, spec, numerics
        c, heads = config, config.n_heads
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wq_a = QuantLinear(c.dim, c.q_lora_rank, numerics)
        self.q_norm = RMSNorm(c.q_lora_rank, c.norm_eps, numerics.row_impl)
        self.wq_b = QuantLinear(c.q_lora_rank, heads * c.head_dim, numerics)
        self.wkv = QuantLinear(c.dim, c.head_dim, numerics)
        self.kv_norm = RMSNorm(c.head_dim, c.norm_eps, numerics.row_impl)
        self.wo_a = QuantLinear(heads * c.head_dim // c.o_groups, c.o_groups * c.o_lora_rank, numerics)
        self.wo_b = QuantLinear(c.o_groups * c.o_lora_rank, c.dim, numerics)
        self.compressor = Compressor(c, spec.ratio, numerics) if spec.owns_rows else None
        self.indexer = Indexer(c, spec, numerics) if spec.selects else None
        self.freq_P = inverse_frequencies(config, spec)

    def forward(
        self, h_ND: Tensor, rows: Rows, memory: SharedMemory, shared: Shared, *, publish: bool = True
    ) -> tuple[Tensor, Shared]:
        """Normed input [N,D] -> output [N,D] and what later layers may read. `publish=False`: the rows are already kept."""
        table = rows.rotary(self._freq(h_ND))
        quantised_ND = self.numerics.activation(h_ND)
        rank_NQ = self.q_norm(self.wq_a.product(quantised_ND))
        q_NHC = rotate(self.wq_b(rank_NQ).unflatten(1, (-1, self.config.head_dim)), table, impl=self.numerics.row_impl)
        window_NC = self.window_entries(h_ND, rows, quantised_ND)
        if publish:
            self.publish(h_ND, rows, memory)
        shared = self._select(h_ND, rank_NQ, rows, memory, shared)
        source = None if self.spec.ratio == 0 else shared.kv_source
        topk_NK = None if self.spec.ratio == 0 else shared.topk_NK
        out_NHC = memory.attend(self.spec.index, source, rows, q_NHC, window_NC, topk_NK, self.attn_sink)
        return self._project_out(rotate(out_NHC, table, back=True, impl=self.numerics.row_impl)), shared

    def window_entries(self, h_ND: Tensor, rows: Rows, quantised_ND: Tensor | None = None) -> Tensor:
        """Rotated, FP8-quantised window entries [N,C] of normed inputs."""
        quantised_ND = self.numerics.activation(h_ND) if quantised_ND is None else quantised_ND
        table = rows.rotary(self._freq(h_ND))
        kv_NC = rotate(self.kv_norm(self.wkv.product(quantised_ND)), table, impl=self.numerics.row_impl)
        return self.numerics.activation(kv_NC)

    def publish(self, h_ND: Tensor, rows: Rows, memory: SharedMemory) -> None:
        """A Full layer's part of prefill that nothing may skip: latents, main rows and index keys into the memory."""
        if self.compressor is None or self.indexer is None:
            return
        kv_NC, gate_NC = self.compressor.project(h_ND)
        groups = memory.group(self.spec.index, rows, self.spec.ratio, kv_NC, gate_NC)
        latent_GC = self.compressor.pool(groups)
        table = rotary_table(groups.positions_G, self._freq(h_ND))
        main_GC = rotate(latent_GC, table, impl=self.numerics.row_impl)
        memory.append(self.spec.index, rows, groups, main_GC, self.indexer.keys(latent_GC, table))

    def _select(self, h_ND: Tensor, rank_NQ: Tensor, rows: Rows, memory: SharedMemory, shared: Shared) -> Shared:
        if self.indexer is None:
            return shared
        source = self.spec.kv_source
        assert source is not None
        q_NJI, weight_NJ = self.indexer.queries(h_ND, rank_NQ, rows.rotary(self._freq(h_ND)))
        pool_NB = None if self.spec.candidate_source is None else shared.candidates_NB
        picked = memory.select(source, rows, q_NJI, weight_NJ, pool_NB, self.spec.publishes_candidates)
        kept_NB = picked.candidates_NB if self.spec.publishes_candidates else shared.candidates_NB
        return Shared(kv_source=source, topk_NK=picked.topk_NK, candidates_NB=kept_NB)

    def _project_out(self, out_NHC: Tensor) -> Tensor:
        weight = self.numerics.fp8_weight(self.wo_a.weight).to(out_NHC.dtype)
        impl, groups = self.numerics.product_impl, self.config.o_groups
        return self.wo_b(linear(out_NHC.flatten(1), weight, groups=groups, impl=impl))

    def _freq(self, like: Tensor) -> Tensor:
        if self.freq_P.device != like.device:
            self.freq_P = self.freq_P.to(like.device)
        return self.freq_P
