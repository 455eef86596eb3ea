"""A layer of one row in nine launches on Hopper: what `Layers` means, with norms, quantisers, router and sums inside the launches
that need them.

Must not know buckets, graphs or requests. Shapes as in `layers.py`, N = 1.
"""

from __future__ import annotations

from torch import Tensor

from kvist.engine.card.layers import Chosen, Layers, Targets
from kvist.engine.card.places import Places
from kvist.engine.card.weights import CardWeights, LayerWeights, MixWeights, MoeWeights
from kvist.kernels.device.row import Parts, blocks_of, on_hopper
from kvist.kernels.experts.row import Router, experts_row
from kvist.kernels.experts.row import fits as experts_fit
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import leave_gpu
from kvist.kernels.hyper_connections.row import Head, streams_row
from kvist.kernels.linear.row import MOST_INPUTS, Entry, product_of_parts, product_of_streams, product_row

Output = Tensor | Parts | None
"""A sublayer's output [1,D], whole or in parts; None before the first."""


def left(y_ND: Output, x_NSD: Tensor, mix: Mix) -> Tensor:
    """Streams with a sublayer's output folded in."""
    if y_ND is None:
        return x_NSD
    if isinstance(y_ND, Parts):
        return streams_row(y_ND, x_NSD, mix, None).x_NSD
    return leave_gpu(y_ND, x_NSD, mix)


def fits(weights: CardWeights, like: Tensor) -> bool:
    """Whether one row of this model runs so where `like` lies."""
    c = weights.config
    moe = weights.layers[0].moe
    return (
        on_hopper(like) and c.hc_mult == 4 and c.dim <= MOST_INPUTS["from_streams"]
        and c.q_lora_rank <= MOST_INPUTS["from_parts"]
        and c.o_groups * c.o_lora_rank <= MOST_INPUTS["from_row"]
        and c.n_heads * c.head_dim // c.o_groups <= MOST_INPUTS["from_row"]
        and c.head_dim <= 512 and c.q_lora_rank % 64 == 0 and c.head_dim % 64 == 0 and c.o_lora_rank % 64 == 0
        and experts_fit(moe.routed, moe.shared, len(moe.gate), moe.active, blocks_of(like.device))
    )  # fmt: skip


class OneRow:
    """The operators of one model on one card, for one row."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.config = layers, layers.config

    def layer(
        self, layer: LayerWeights, at: Places, x_NSD: Tensor, mix: Mix, y_ND: Output, chosen: Chosen, targets: Targets | None
    ) -> tuple[Tensor, Mix, Tensor | Parts, Chosen]:
        """See `DeviceModel.layer`, behind Engram."""
        head = self._enter(layer.attention_mix, y_ND, x_NSD, mix)
        if targets is not None:
            targets.see(layer.spec.index, head.passed.x_NSD)
        y_ND, mix, chosen = self._attention(layer, at, head, chosen)
        head = self._enter(layer.moe_mix, y_ND, head.passed.x_NSD, mix)
        y_ND, mix = self._moe(layer.moe, at, head)
        return head.passed.x_NSD, mix, y_ND, chosen

    def _enter(self, w: MixWeights, y_ND: Output, x_NSD: Tensor, mix: Mix) -> Head:
        c = self.config
        return Head(streams_row(y_ND, x_NSD, mix, w.fn), w.base, w.scale, w.norm, c.hc_sinkhorn_iters, c.hc_eps, c.norm_eps)

    def _attention(self, layer: LayerWeights, at: Places, head: Head, chosen: Chosen) -> tuple[Parts, Mix, Chosen]:
        c, w, spec = self.config, layer.attention, layer.spec
        ring, rope = self.layers.state.ring(spec.index), at.rope[spec.ratio > 0]
        assert ring.scales is not None
        parts, h_ND, _ = product_of_streams(head, w.enter)
        weight_NJ = self.layers.apart(w, spec, at, h_ND)
        entry = Entry(w.entry_norm, *rope, ring.values, ring.scales, at.slot_N, at.cell_N)
        q_NX, rank_NQ, mix = product_of_parts(parts, w.query_norm, c.norm_eps, w.query, entry, head)
        out_NHC, chosen = self.layers.attended(layer, at, h_ND, rank_NQ, q_NX, chosen, weight_NJ)
        narrow_NX = product_row(out_NHC.flatten(1), w.out_a, groups=c.o_groups, quantise=True)
        assert isinstance(narrow_NX, Tensor)
        out = product_row(narrow_NX, w.out_b, whole=False, near=True)
        assert isinstance(out, Parts)
        return out, mix, chosen

    def _moe(self, w: MoeWeights, at: Places, head: Head) -> tuple[Tensor | Parts, Mix]:
        c = self.config
        router = Router(w.gate, w.bias, w.bias_image, w.active, c.gate_temp, c.norm_topk_prob, c.route_scale)
        out = experts_row(head, router, at.text_N, w.routed, w.shared, limit=c.swiglu_limit)
        return out.parts, out.mix
