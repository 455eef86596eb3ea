"""The forward pass of training: every layer on a uniform batch, with what the indexers and the balance rule need beside it.

Owns the order of the layers and what they share. Computes exactly what `kvist.model.Transformer` computes (tested), in
the fused pieces of this package. Must not know optimisers, data or stages.

Shapes: B sequences, T tokens, N = B*T rows, S streams, D width, M compressed rows, n sampled queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvist.config import LayerSpec, ModelConfig
from kvist.kernels.rotary.ref import rotate_ref as rotate
from kvist.train import pieces
from kvist.train.attention import attend, row_mass
from kvist.train.quantisers import main_fp4, mxfp4
from kvist.train.selection import distillation, recall, scores, select
from kvist.train.shapes import Batch, Geometry, engram_rows
from kvist.train.sinkhorn import balance


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a forward pass runs: rows selected or all attended, quantisers on or off, sampled queries for the indexers."""

    select: bool
    quantise: bool
    sampled: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(kw_only=True)
class Source:
    """What one index source has gathered from its readers: sampled scores and masses, and its selection."""

    ids_BTK: Tensor | None
    kept_BTY: Tensor | None
    scores_BnM: Tensor | None
    mass_BnM: Tensor | None = None
    readers: int = 0


@dataclass(kw_only=True)
class Outcome:
    """Results of a pass. `losses_N` nats a token; `choices` expert choices [N,E] and `router` scores by layer prefix."""

    x_NSD: Tensor
    pre_NS: Tensor
    losses_N: Tensor | None = None
    choices: dict[str, Tensor] = field(default_factory=dict)
    router: dict[str, Tensor] = field(default_factory=dict)
    index_losses: dict[int, Tensor] = field(default_factory=dict)
    recalls: dict[int, Tensor] = field(default_factory=dict)
    targets: list[Tensor] = field(default_factory=list)


class Network:
    """One pass over given working weights. Made for every pass; holds the state that layers share."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], geometry: Geometry, mode: Mode, queries_n: Tensor | None = None
    ) -> None:
        self.config, self.w, self.geometry, self.mode = config, weights, geometry, mode
        self.queries_n = queries_n
        self.device_type = geometry.device.type
        self.rows: Tensor | None = None
        self.keys: Tensor | None = None
        self.sources: dict[int, Source] = {}
        self.wants_targets = False

    def run(self, batch: Batch, classes_V: Tensor | None, *, losses: bool = True) -> Outcome:
        """Embedding to losses. `classes_V` are Engram's token classes."""
        c, g = self.config, self.geometry
        x_ND = F.embedding(batch.tokens.flatten(), self.w["embed.weight"]).to(self.mode.dtype)
        x_NSD = x_ND.unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre_NS = F.one_hot(torch.zeros(len(x_ND), dtype=torch.int64, device=g.device), c.hc_mult).float()
        out = Outcome(x_NSD=x_NSD, pre_NS=pre_NS)
        memory = None
        if c.engram_layer_ids:
            if classes_V is None:
                raise ValueError("Engram layers need token classes")
            memory = engram_rows(c, classes_V[batch.tokens], batch.text, int(classes_V[c.engram_pad_id]))
        for spec in c.plan.layers:
            if spec.engram is not None:
                assert memory is not None
                out.x_NSD = self._remember(spec, out.x_NSD, memory[spec.engram], batch)
            if self.wants_targets and spec.index in c.dspark_target_layer_ids:
                out.targets.append(out.x_NSD.float().mean(1).to(self.mode.dtype))
            self._block(f"layers.{spec.index}", spec, out, batch)
        self._teach(out)
        if losses:
            out.losses_N = self._fused(pieces.token_losses)(
                out.x_NSD, out.pre_NS, self.w["norm.weight"], self.w["head.weight"], batch.targets.flatten(), c.norm_eps
            )
        return out

    def _fused(self, fn: Any) -> Any:
        return pieces.fused(fn, self.device_type)

    def _remember(self, spec: LayerSpec, x_NSD: Tensor, ids_BTX: Tensor, batch: Batch) -> Tensor:
        prefix = f"layers.{spec.index}.engram"
        found = F.embedding(ids_BTX.flatten(0, 1), self.w[f"{prefix}.embed.weight"]).to(x_NSD.dtype).flatten(1)
        text = None if batch.text is None else batch.text.flatten()
        weights = (self.w[f"{prefix}.{name}"] for name in ("wkv.weight", "q_weight", "k_weight"))
        added: Tensor = self._fused(pieces.engram)(x_NSD, found, *weights, text, self.config.norm_eps, self.mode.quantise)
        return added

    def _block(self, prefix: str, spec: LayerSpec, out: Outcome, batch: Batch) -> None:
        h, after, leave = self.enter(prefix, "attn", out.x_NSD, out.pre_NS)
        out.x_NSD, out.pre_NS = leave(self._attention(spec, h)), after
        h, after, leave = self.enter(prefix, "ffn", out.x_NSD, out.pre_NS)
        y, out.choices[prefix], out.router[prefix] = self.experts(prefix, h, batch.text, self.config.n_activated_experts)
        out.x_NSD, out.pre_NS = leave(y), after

    def enter(self, prefix: str, half: str, x_NSD: Tensor, pre_NS: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Normed input, the collapse weights for what follows, and the function that folds an output back."""
        c = self.config
        mixing = (self.w[f"{prefix}.hc_{half}_{name}"] for name in ("fn", "base", "scale"))
        weight = self.w[f"{prefix}.{half}_norm.weight"]
        h, pre, post, logits = self._fused(pieces.enter)(x_NSD, pre_NS, *mixing, weight, c.norm_eps, c.hc_eps)
        comb = balance(logits, c.hc_sinkhorn_iters, c.hc_eps)
        return h, pre, lambda y_ND: self._fused(pieces.leave)(y_ND, x_NSD, post, comb)

    def experts(self, prefix: str, h: Tensor, text_BT: Tensor | None, active: int) -> tuple[Tensor, Tensor, Tensor]:
        """Routed and shared experts of one block."""
        c, at = self.config, f"{prefix}.ffn"
        bias = self.w[f"{at}.gate.bias"]
        if text_BT is not None:
            bias = torch.where(text_BT.flatten().unsqueeze(1), bias, self.w[f"{at}.gate.bias_vl"])
        routed = tuple(self.w[f"{at}.experts.{name}"] for name in ("w1", "w2", "w3"))
        shared = tuple(self.w[f"{at}.shared_experts.{name}.weight"] for name in ("w1", "w2", "w3"))
        gate = self.w[f"{at}.gate.weight"]
        y, chosen, raw = self._fused(pieces.moe)(
            h, gate, bias, routed, shared, active, c.route_scale, c.swiglu_limit, self.mode.quantise
        )
        return y, chosen, raw

    def projections(self, prefix: str, spec: LayerSpec, h: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, window entries and the query latent of one layer."""
        names = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
        weights = (self.w[f"{prefix}.attn.{name}"] for name in names)
        q, kv, rank = self._fused(pieces.project)(h, *weights, table, self.config.norm_eps, self.mode.quantise)
        return q, kv, rank

    def output(self, prefix: str, out_NHC: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Attention outputs back to the model's width."""
        weights = (self.w[f"{prefix}.attn.{name}.weight"] for name in ("wo_a", "wo_b"))
        y: Tensor = self._fused(pieces.project_out)(out_NHC, *weights, table, self.config.o_groups, self.mode.quantise)
        return y

    def _attention(self, spec: LayerSpec, h: Tensor) -> Tensor:
        prefix, g = f"layers.{spec.index}", self.geometry
        table = g.rotary(spec)
        q, kv, rank = self.projections(prefix, spec, h, table)
        source = None
        if spec.ratio:
            if spec.owns_rows:
                self._publish(prefix, spec, h)
            if spec.selects:
                self.sources[spec.index] = self._select(prefix, spec, h, rank)
            assert spec.index_source is not None
            source = self.sources[spec.index_source]
        q_BTHC = q.unflatten(0, (g.batch, g.length))
        done = attend(
            g,
            q_BTHC,
            kv.unflatten(0, (g.batch, g.length)),
            None if source is None else self.rows,
            spec.ratio,
            None if source is None else source.ids_BTK,
            self.w[f"{prefix}.attn.attn_sink"],
        )
        if source is not None and self.queries_n is not None:
            self._gather_mass(spec, source, q_BTHC, done.total_BHT)
        return self.output(prefix, done.out_BTHC.flatten(0, 1), table)

    def _publish(self, prefix: str, spec: LayerSpec, h: Tensor) -> None:
        at, c, g = f"{prefix}.attn.compressor", self.config, self.geometry
        h_BTD = h.unflatten(0, (g.batch, g.length))[:, : g.length // spec.ratio * spec.ratio]
        wkv = self.w[f"{at}.wkv.weight"]
        if spec.ratio == 1:
            latent = F.linear(h_BTD, wkv).flatten(0, 1)
        else:
            kv = F.linear(h_BTD.float(), wkv.float()).unflatten(1, (-1, spec.ratio))
            gate = F.linear(h_BTD.float(), self.w[f"{at}.wgate.weight"].float()).unflatten(1, (-1, spec.ratio))
            latent = (kv * gate.softmax(2)).sum(2).flatten(0, 1).to(h.dtype)
        latent = pieces.norm(latent, self.w[f"{at}.norm.weight"], c.norm_eps)
        table = g.row_rotary(spec)
        index = f"{prefix}.attn.indexer"
        # Detached: the indexer learns from attention, the compressor never learns from the indexer.
        key = pieces.norm(F.linear(latent.detach(), self.w[f"{index}.wk.weight"]), self.w[f"{index}.k_norm.weight"], c.norm_eps)
        self.rows, self.keys = self._fused(_finish_rows)(latent, key, table, self.mode.quantise)
        self.rows, self.keys = (x.unflatten(0, (g.batch, -1)) for x in (self.rows, self.keys))

    def _select(self, prefix: str, spec: LayerSpec, h: Tensor, rank: Tensor) -> Source:
        at, c, g, keys = f"{prefix}.attn.indexer", self.config, self.geometry, self.keys
        assert keys is not None
        weights = self.w[f"{at}.wq_b.weight"], self.w[f"{at}.weights_proj.weight"]
        rank, h = rank.detach(), h.detach()
        source = Source(ids_BTK=None, kept_BTY=None, scores_BnM=None)
        if self.mode.select:
            with torch.no_grad():
                q, weight = self._fused(pieces.index_queries)(
                    rank, h, *weights, g.rotary(spec), c.index_n_heads, self.mode.quantise
                )
            held = None if spec.candidate_source is None else self.sources[spec.candidate_source].kept_BTY
            split = (g.batch, g.length)
            source.ids_BTK, source.kept_BTY = select(
                c, q.unflatten(0, split), weight.unflatten(0, split), keys.detach(), spec.ratio, held,
                spec.publishes_candidates,
            )  # fmt: skip
        if self.queries_n is not None:
            at_n = (torch.arange(g.batch, device=g.device).unsqueeze(1) * g.length + self.queries_n).flatten()
            table = tuple(part[at_n] for part in g.rotary(spec))
            source.scores_BnM = self._fused(_sampled_scores)(
                rank[at_n], h[at_n], *weights, table, keys, c.index_n_heads, self.mode.quantise
            )
        return source

    @torch.no_grad()
    def _gather_mass(self, spec: LayerSpec, source: Source, q_BTHC: Tensor, total_BHT: Tensor) -> None:
        assert self.queries_n is not None and self.rows is not None
        at = self.queries_n
        visible = self.geometry.visible(spec.ratio)[at]
        mass = self._fused(row_mass)(q_BTHC.detach()[:, at], self.rows.detach(), total_BHT.detach()[:, :, at], visible)
        source.mass_BnM = mass if source.mass_BnM is None else source.mass_BnM + mass
        source.readers += 1

    def _teach(self, out: Outcome) -> None:
        if self.queries_n is None:
            return
        for index, source in self.sources.items():
            assert source.scores_BnM is not None and source.mass_BnM is not None
            visible = self.geometry.visible(self.config.plan.layers[index].ratio)[self.queries_n]
            mass = source.mass_BnM / source.readers
            out.index_losses[index] = self._fused(distillation)(source.scores_BnM, mass, visible)
            if source.ids_BTK is not None:
                out.recalls[index] = recall(source.ids_BTK[:, self.queries_n], mass)


def _finish_rows(latent: Tensor, key: Tensor, table: tuple[Tensor, Tensor], quantise: bool) -> tuple[Tensor, Tensor]:
    rows, keys = rotate(latent, table), rotate(key, table)
    return (main_fp4(rows), mxfp4(keys)) if quantise else (rows, keys)


def _sampled_scores(
    rank: Tensor,
    h: Tensor,
    wq_b: Tensor,
    weights: Tensor,
    table: tuple[Tensor, Tensor],
    keys_BMI: Tensor,
    heads: int,
    quantise: bool,
) -> Tensor:
    q, weight = pieces.index_queries(rank, h, wq_b, weights, table, heads, quantise)
    q, weight = (x.unflatten(0, (len(keys_BMI), -1)) for x in (q, weight))
    return scores(q, weight, keys_BMI)
