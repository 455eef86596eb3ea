"""A pass's layers through the GPU operators: what a `Block` means, on packed weights and device state, for runs of any rows.

Reads and writes `CardState` in place and never waits for the device, so that a step can be captured in a CUDA graph. Must not
know buckets, graphs or requests. The meaning stands in `model/`; shapes as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig
from kvist.engine.card.places import Places
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import AttentionWeights, CompressorWeights, IndexerWeights, LayerWeights, MixWeights, MoeWeights
from kvist.kernels.experts.gpu import run_bank, run_both, run_shared
from kvist.kernels.group_pool.gpu import pool_rows_gpu
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import Entered, pass_gpu
from kvist.kernels.index_select.gpu import ScanTiling, groups_of, select_packed
from kvist.kernels.index_select.hopper import fits
from kvist.kernels.linear.gpu import EXPANDED_ROWS, linear_gpu
from kvist.kernels.linear.thin_triton import thin_fits, thin_gpu
from kvist.kernels.quantise.gpu import rows_gpu, write_rows
from kvist.kernels.routing.gpu import route_gpu
from kvist.kernels.sparse_attention.gpu import attend_packed
from kvist.kernels.streams.gpu import mean_streams_gpu


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What the layers so far have published: the last selection and the last candidates."""

    source: int | None = None
    topk_NK: Tensor | None = None
    pool_NB: Tensor | None = None

    def pick(self, rows_W: Tensor) -> Chosen:
        """What some of the rows have chosen."""
        picked = [None if part is None else part[rows_W] for part in (self.topk_NK, self.pool_NB)]
        return Chosen(source=self.source, topk_NK=picked[0], pool_NB=picked[1])


class Targets:
    """What the draft blocks look at of a step's rows, [N, targets*D]: filled layer by layer, and kept in the state."""

    def __init__(self, config: ModelConfig, state: CardState, at: Places) -> None:
        self.layers, self.width, self._keep = (
            config.dspark_target_layer_ids,
            config.dim,
            (state.targets, at.slot_long_N, at.position_N),
        )
        shape = (len(at.position_N), len(self.layers) * self.width)
        self.states_NX = torch.empty(shape, dtype=torch.bfloat16, device=state.device)

    def see(self, layer: int, x_NSD: Tensor) -> None:
        """The streams that enter a layer."""
        if layer in self.layers:
            mean_streams_gpu(x_NSD, self.states_NX, self.layers.index(layer) * self.width, self._keep)


def plain_product(x_NI: Tensor, w_OI: Tensor, *, wide: bool = False, forked: bool = False) -> Tensor:
    """bfloat16 rows times a bfloat16 weight, float32 sums rounded to bfloat16 once, or as they are (`wide`). `forked`: the first
    launch of a stream behind another one's work."""
    if thin_fits(x_NI, w_OI):
        return thin_gpu(x_NI, w_OI, wide=wide, forked=forked)
    return wide_product(x_NI, w_OI) if wide else torch.nn.functional.linear(x_NI, w_OI)


def wide_product(x_NI: Tensor, w_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """bfloat16 rows times a bfloat16 weight, float32 out: the products are exact, no sum is rounded to bfloat16."""
    if not x_NI.is_cuda:
        return torch.mm(x_NI.float(), w_OI.float().t(), out=out)
    if out is None:
        return torch.mm(x_NI, w_OI.t(), out_dtype=torch.float32)
    return torch.mm(x_NI, w_OI.t(), out_dtype=torch.float32, out=out)


def enter(config: ModelConfig, mix: MixWeights, y_ND: Tensor | None, x_NSD: Tensor, before: Mix) -> Entered:
    """Leave one sublayer (with `y_ND`) and enter the next."""
    return pass_gpu(
        y_ND, x_NSD, before, mix.fn, mix.base, mix.scale, mix.norm, iterations=config.hc_sinkhorn_iters, hc_eps=config.hc_eps,
        norm_eps=config.norm_eps, quantised=True,
    )  # fmt: skip


BESIDE_ROWS = 4
"""Rows from which the shared expert beside the routed ones is faster (13.2 ms a step of 6 rows for 14.0; 9.8 of 2 for 9.6)."""


class Layers:
    """The operators of one model on one card. `beside`: a stream for the shared expert while the routed ones run, and for a
    single row's keys and index weights while its queries are made, or None."""

    def __init__(self, config: ModelConfig, state: CardState, beside: torch.cuda.Stream | None = None) -> None:
        self.config, self.state, self.plan, self.beside = config, state, config.plan, beside
        self._groups: dict[int, Tensor] = {}

    def attention(self, layer: LayerWeights, at: Places, entered: Entered, chosen: Chosen) -> tuple[Tensor, Chosen]:
        """Normed input -> the sublayer's output [N,D] and what later layers may read."""
        c, w, spec, quantised = self.config, layer.attention, layer.spec, entered.quantised_ND
        assert quantised is not None
        both = linear_gpu(quantised, w.enter, None, 1)
        rank_NQ = rows_gpu(both[:, : c.q_lora_rank], form="fp8", norm=(w.query_norm, c.norm_eps))
        q_NX = linear_gpu(rank_NQ, w.query, None, 1)
        ring, rope = self.state.ring(spec.index), at.rope[spec.ratio > 0]
        assert ring.scales is not None
        write_rows(
            both[:, c.q_lora_rank :], ring.values, ring.scales, at.slot_N, at.cell_N, form="fp8",
            norm=(w.entry_norm, c.norm_eps), table=rope,
        )  # fmt: skip
        out_NHC, chosen = self.attended(layer, at, entered.h_ND, rank_NQ, q_NX, chosen)
        return self.out(w, out_NHC), chosen

    def attended(
        self, layer: LayerWeights, at: Places, h_ND: Tensor, rank_NQ: Tensor, q_NX: Tensor, chosen: Chosen,
        weight_NJ: Tensor | None = None,
    ) -> tuple[Tensor, Chosen]:  # fmt: skip
        """What queries [N, H * C] see, [N,H,C], and what later layers may read, once the rows' window entries are written:
        publishes, selects, attends. `weight_NJ`: what `apart` has given, which has then published too."""
        c, w, spec = self.config, layer.attention, layer.spec
        if w.compressor is not None and weight_NJ is None:
            self.publish(w.compressor, spec, at, h_ND)
        if w.indexer is not None:
            chosen = self.select(w.indexer, spec, at, h_ND, rank_NQ, chosen, weight_NJ)
        pages = None if spec.ratio == 0 or chosen.source is None else self.state.pages[chosen.source]
        out_NHC = attend_packed(
            q_NX.unflatten(1, (c.n_heads, c.head_dim)), self.state.ring(spec.index), at.span_N2, at.slot_N, pages,
            None if pages is None else chosen.topk_NK, w.sink, window=at.longest or self.plan.window,
            rope=at.rope[spec.ratio > 0],
        )  # fmt: skip
        return out_NHC, chosen

    def _alone(self, rows: int) -> Tensor:
        """Every query a group of its own."""
        if rows not in self._groups:
            self._groups[rows] = groups_of([1] * rows, 1, self.state.device)
        return self._groups[rows]

    def out(self, w: AttentionWeights, out_NHC: Tensor) -> Tensor:
        return linear_gpu(linear_gpu(out_NHC.flatten(1), w.out_a, None, self.config.o_groups), w.out_b, "fp8", 1)

    def publish(self, w: CompressorWeights, spec: LayerSpec, at: Places, h_ND: Tensor) -> None:
        """The group that a row ends becomes a page's row and key; where it ends none, nothing is written (facts 5.1)."""
        eps = self.config.norm_eps
        if spec.ratio == 1:
            latent_NC = rows_gpu(plain_product(h_ND, w.project), norm=(w.norm, eps))
        else:
            stand = (at.slot_long_N, at.position_N, at.offset_N)
            raw_NX, tail = plain_product(h_ND, w.project, wide=True), self.state.tails[spec.index]
            latent_NC = pool_rows_gpu(raw_NX, tail, *stand, spec.ratio, (w.norm, eps))
        planes, rope = self.state.rows.sources[spec.index], at.group_rope[spec.ratio]
        page_N, row_N = at.page[spec.ratio], at.row[spec.ratio]
        write_rows(latent_NC, planes.main_codes, planes.main_scales, page_N, row_N, form="main_fp4", table=rope)
        key_NI = plain_product(latent_NC, w.key)
        write_rows(key_NI, planes.key_codes, planes.key_scales, page_N, row_N, form="mxfp4", norm=(w.key_norm, eps), table=rope)

    def apart(self, w: AttentionWeights, spec: LayerSpec, at: Places, h_ND: Tensor) -> Tensor | None:
        """What a layer with an indexer makes of its normed input alone, on the stream beside: the row's publication where it is
        a source, and the index heads' weights for `select`. None, and nothing done, without that stream."""
        if self.beside is None or w.indexer is None:
            return None
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            weight_NJ = plain_product(h_ND, w.indexer.heads, forked=True)
            if w.compressor is not None:
                self.publish(w.compressor, spec, at, h_ND)
        return weight_NJ

    def select(
        self, w: IndexerWeights, spec: LayerSpec, at: Places, h_ND: Tensor, rank_NQ: Tensor, chosen: Chosen,
        weight_NJ: Tensor | None = None,
    ) -> Chosen:  # fmt: skip
        """Each query's rows of the layer's source, and the candidate pool where the layer publishes one. `weight_NJ`: what
        `apart` has given; the stream beside is waited for."""
        c, source = self.config, spec.kv_source
        assert source is not None and at.head_rope is not None
        q_MI = linear_gpu(rank_NQ, w.query, None, 1).view(-1, c.index_head_dim)
        q_NJI = rows_gpu(q_MI, form="mxfp4", table=at.head_rope).unflatten(0, (-1, c.index_n_heads))
        if weight_NJ is None:
            weight_NJ = plain_product(h_ND, w.heads)
        else:
            assert self.beside is not None, "there is a stream beside where `apart` gave weights"
            torch.cuda.current_stream().wait_stream(self.beside)
        pages, publish = self.state.pages[source], c.candidate_topk_blocks if spec.publishes_candidates else 0
        pool_NB = None if spec.candidate_source is None else chosen.pool_NB
        released = fits(q_NJI, pages, c.index_topk, c.candidate_block_size, publish)
        picked = select_packed(
            q_NJI, weight_NJ, pages, at.slot_N, at.visible[spec.ratio], at.groups_G2 if released else self._alone(len(q_NJI)),
            rows=at.tokens // spec.ratio,
            k=c.index_topk, block_size=c.candidate_block_size, pool_NB=pool_NB, publish_blocks=publish,
            tiling=None if released else ScanTiling(together=1),
        )  # fmt: skip
        return Chosen(source=source, topk_NK=picked.topk_NK, pool_NB=picked.candidates_NB if publish else chosen.pool_NB)

    def moe(self, w: MoeWeights, at: Places, entered: Entered) -> Tensor:
        """Normed input -> routed and shared outputs, summed in float32 and rounded once, [N,D]."""
        c, quantised = self.config, entered.quantised_ND
        assert quantised is not None
        beside = self.beside if BESIDE_ROWS <= len(quantised) < EXPANDED_ROWS else None
        shared_ND = self._shared(w, quantised, beside) if beside is not None else None
        ids_NK, weights_NK = route_gpu(
            entered.h_ND, w.gate, w.bias, w.bias_image, at.text_N, k=w.active, temperature=c.gate_temp,
            normalise=c.norm_topk_prob, scale=c.route_scale,
        )  # fmt: skip
        if beside is None or shared_ND is None:
            return run_both(quantised, ids_NK, weights_NK, w.routed, w.shared, c.swiglu_limit, "fp8")
        routed_ND = run_bank(quantised, ids_NK, weights_NK, w.routed, c.swiglu_limit, "fp8")
        torch.cuda.current_stream().wait_stream(beside)
        return torch.add(routed_ND, shared_ND, out=torch.empty_like(entered.h_ND))

    def _shared(self, w: MoeWeights, quantised_ND: Tensor, beside: torch.cuda.Stream) -> Tensor:
        """The shared expert's output, on the stream beside."""
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            return run_shared(quantised_ND, w.shared, self.config.swiglu_limit, "fp8")
