"""A layer of two to eight rows in ten launches on Hopper: what `Layers` means, by projections, router and passes over the
streams whose sums are those of one row (`one_row.py`), so that these do not depend on a row's company.

Must not know buckets, graphs or requests. Shapes as in `layers.py`, N up to 8.
"""

from __future__ import annotations

from torch import Tensor

from kvist.engine.card.layers import Chosen
from kvist.engine.card.one_row import OneRow
from kvist.engine.card.places import Places
from kvist.engine.card.weights import CardWeights, LayerWeights, MoeWeights
from kvist.kernels.device.row import Parts, blocks_of, on_hopper
from kvist.kernels.experts.few import few_experts, takes
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.row import MOST_WIDTH, Head
from kvist.kernels.linear.row import Entry
from kvist.kernels.linear.rows import MOST_RANK, MOST_ROWS, finish_rows, product_of_streams_rows, product_rows
from kvist.kernels.linear.rows import fits as product_fits
from kvist.kernels.routing.rows import fits as router_fits
from kvist.kernels.routing.rows import route_rows


def fits(weights: CardWeights, like: Tensor) -> bool:
    """Whether up to `MOST_ROWS` rows of this model run so where `like` lies."""
    c, w = weights.config, weights.layers[0].attention
    if not on_hopper(like):
        return False
    blocks, drafts = blocks_of(like.device), () if weights.drafts is None else weights.drafts.blocks
    products = ((w.enter, False), (w.query, True), (w.out_a, True), (w.out_b, False))
    return (
        c.hc_mult == 4 and c.dim <= MOST_WIDTH and c.q_lora_rank <= MOST_RANK and c.head_dim <= 512
        and c.q_lora_rank % 64 == 0 and c.head_dim % 64 == 0 and c.o_lora_rank % 64 == 0
        and all(_routes(moe, c.dim, blocks) for moe in (weights.layers[0].moe, *(block.moe for block in drafts)))
        and all(product_fits(MOST_ROWS, weight, blocks, whole=whole) for weight, whole in products)
    )  # fmt: skip


def _routes(moe: MoeWeights, width: int, blocks: int) -> bool:
    """Whether router and experts are two launches."""
    return router_fits(len(moe.gate), moe.active, width, blocks) and takes(moe.routed, MOST_ROWS, moe.active, moe.shared)


class FewRows(OneRow):
    """The same for two to eight rows."""

    def _attention(self, layer: LayerWeights, at: Places, head: Head, chosen: Chosen) -> tuple[Parts, Mix, Chosen]:
        c, w, spec = self.config, layer.attention, layer.spec
        ring, rope = self.layers.state.ring(spec.index), at.rope[spec.ratio > 0]
        assert ring.scales is not None
        parts, h_ND, _ = product_of_streams_rows(head, w.enter)
        weight_NJ = self.layers.apart(w, spec, at, h_ND)
        entry = Entry(w.entry_norm, *rope, ring.values, ring.scales, at.slot_N, at.cell_N)
        rank_NQ, mix = finish_rows(parts, w.query_norm, c.norm_eps, entry, head)
        q_NX = product_rows(rank_NQ, w.query, near=True)
        assert isinstance(q_NX, Tensor)
        out_NHC, chosen = self.layers.attended(layer, at, h_ND, rank_NQ, q_NX, chosen, weight_NJ)
        narrow_NX = product_rows(out_NHC.flatten(1), w.out_a, groups=c.o_groups, quantise=True)
        assert isinstance(narrow_NX, Tensor)
        out = product_rows(narrow_NX, w.out_b, whole=False, near=True)
        assert isinstance(out, Parts)
        return out, mix, chosen

    def _moe(self, w: MoeWeights, at: Places, head: Head) -> tuple[Tensor, Mix]:
        c = self.config
        routed = route_rows(
            head, w.gate, w.bias, w.bias_image, at.text_N, k=w.active, temperature=c.gate_temp, normalise=c.norm_topk_prob,
            scale=c.route_scale,
        )  # fmt: skip
        out_ND = few_experts(routed.quantised_ND, routed.ids_NK, routed.weights_NK, w.routed, w.shared, limit=c.swiglu_limit)
        return out_ND, routed.mix
