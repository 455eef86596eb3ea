"""A transformer block on four streams: attention and experts, each entered and left through hyper-connections.

Functional in what travels: (streams, pre, shared) -> (streams', pre', shared'). Must not know the schedule of other layers.
Report 2.4.1; facts section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvist.config import LayerSpec, ModelConfig
from kvist.kernels import hyper_connections
from kvist.kernels.hyper_connections import Mix
from kvist.model.attention import Attention
from kvist.model.engram import Engram
from kvist.model.layers import RMSNorm
from kvist.model.memory import LayerPlaces, Shared, SharedMemory
from kvist.model.moe import MoE
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows
from kvist.model.whole_layer import Stretch, WholeLayer, servable


class Block(nn.Module):
    """One layer; `engram` stands before it on the layers that have one."""

    engram: Engram | None

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        numerics: Numerics,
        n_experts: int,
        n_active: int,
        *,
        own_experts: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.spec, self.numerics = config, spec, numerics
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config, spec, numerics)
        self.ffn = MoE(config, numerics, n_experts, n_active, own_experts=own_experts)
        s = config.hc_mult
        logits = 2 * s + s * s
        for half in ("attn", "ffn"):
            self.register_parameter(f"hc_{half}_fn", nn.Parameter(torch.zeros(logits, s * config.dim)))
            self.register_parameter(f"hc_{half}_base", nn.Parameter(torch.zeros(logits)))
            self.register_parameter(f"hc_{half}_scale", nn.Parameter(torch.ones(3)))
        self.engram = Engram(config, numerics) if spec.engram is not None else None
        self.servable = servable(self)
        self._native: WholeLayer | None = None

    def remember(self, x_NSD: Tensor, rows: Rows) -> Tensor:
        """The streams with this layer's Engram added; unchanged on other layers."""
        if self.engram is None:
            return x_NSD
        if rows.engram_LNX is None:
            raise ValueError(f"layer {self.spec.index} needs Engram row ids; the batch has none")
        assert self.spec.engram is not None
        return self.engram(x_NSD, rows.engram_LNX[self.spec.engram], rows.text_N)

    def forward(
        self, x_NSD: Tensor, pre_NS: Tensor, rows: Rows, memory: SharedMemory, shared: Shared, *, publish: bool = True
    ) -> tuple[Tensor, Tensor, Shared]:
        """Streams [N,S,D] after Engram -> streams after the experts, the collapse weights for what follows, `Shared`."""
        whole = self.whole(rows, memory)
        if whole is not None:
            layer, places = whole
            alone = Stretch(rows, places)
            shared = alone.add(layer, shared, publish=publish)
            x_NSD, pre_NS = alone.run(x_NSD, pre_NS)
            if layer.experts is not None:
                return x_NSD, pre_NS, shared
        else:
            h_ND, mix = self.enter("attn", x_NSD, pre_NS)
            y_ND, shared = self.attn(h_ND, rows, memory, shared, publish=publish)
            x_NSD, pre_NS = hyper_connections.leave(y_ND, x_NSD, mix, impl=self.numerics.product_impl), mix.pre_NS
        h_ND, after = self.enter("ffn", x_NSD, pre_NS)
        y_ND = self.ffn(h_ND, rows.text_N)
        x_NSD = hyper_connections.leave(y_ND, x_NSD, after, impl=self.numerics.product_impl)
        return x_NSD, after.pre_NS, shared

    def whole(self, rows: Rows, memory: SharedMemory) -> tuple[WholeLayer, LayerPlaces] | None:
        """The block as one native call, where memory and numerics allow it and nobody listens inside."""
        if not self.servable or torch.is_grad_enabled() or not len(rows.token_ids_N):
            return None
        places = memory.places(rows)
        if places is None:
            return None
        whole = self._native
        if whole is None or whole.block is not self or not whole.current(moved=rows.many):
            whole = self._native = WholeLayer(self)
        return None if whole.watched else (whole, places)

    def enter(self, half: str, x_NSD: Tensor, pre_NS: Tensor) -> tuple[Tensor, Mix]:
        """The normed input of one half and that half's coefficients."""
        norm = self.attn_norm if half == "attn" else self.ffn_norm
        return hyper_connections.enter(
            x_NSD,
            pre_NS,
            getattr(self, f"hc_{half}_fn"),
            getattr(self, f"hc_{half}_base"),
            getattr(self, f"hc_{half}_scale"),
            norm.weight,
            iterations=self.config.hc_sinkhorn_iters,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.norm_eps,
            impl=self.numerics.product_impl,
        )
