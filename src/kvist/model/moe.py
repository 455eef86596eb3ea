"""Mixture of experts: a float32 router with separate text and image biases, routed FP4 experts, one shared FP8 expert.

Must not know attention or streams. Facts section 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvist.config import ModelConfig
from kvist.kernels.experts import ExpertBank, ResidentBank, experts
from kvist.kernels.routing import route, scores_ref
from kvist.model.layers import QuantLinear
from kvist.model.numerics import Numerics


class Router(nn.Module):
    """sqrt(softplus(W x)) scores; the bias only selects, the weights come from unbiased scores."""

    def __init__(self, config: ModelConfig, numerics: Numerics, n_experts: int, n_active: int) -> None:
        super().__init__()
        self.numerics = numerics
        self.weight = nn.Parameter(torch.empty(n_experts, config.dim))
        self.bias = nn.Parameter(torch.zeros(n_experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(n_experts), requires_grad=False)
        self.n_active, self.temperature = n_active, config.gate_temp
        self.normalise, self.scale = config.norm_topk_prob, config.route_scale

    def scores(self, x_ND: Tensor) -> Tensor:
        """Unbiased scores [N,E], float32."""
        return scores_ref(x_ND, self.weight, temperature=self.temperature, impl=self.numerics.product_impl)

    def forward(self, x_ND: Tensor, text_N: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [N,K] ascending and their weights [N,K] float32. Equal biased scores: the lower expert wins."""
        return route(
            x_ND,
            self.weight,
            self.bias,
            self.bias_vl,
            text_N,
            k=self.n_active,
            temperature=self.temperature,
            normalise=self.normalise,
            scale=self.scale,
            impl=self.numerics.product_impl,
        )


class Expert(nn.Module):
    """w1 (gate), w2 (down), w3 (up) of one SwiGLU expert."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.w1 = QuantLinear(config.dim, config.moe_inter_dim, numerics)
        self.w2 = QuantLinear(config.moe_inter_dim, config.dim, numerics)
        self.w3 = QuantLinear(config.dim, config.moe_inter_dim, numerics)


class ModuleBank(ResidentBank):
    """Experts held as modules, as the reference does."""

    def __init__(self, modules: nn.ModuleList, numerics: Numerics) -> None:
        # Held by name once: attribute look-ups of modules cost as much as a small native product.
        self.layers = [(module.w1, module.w2, module.w3) for module in modules if isinstance(module, Expert)]
        self.numerics = numerics

    def expert(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `ResidentBank`."""
        n = self.numerics
        w1, w2, w3 = self.layers[index]
        parts = n.fp4_weight(w1.weight), n.fp4_weight(w2.weight), n.fp4_weight(w3.weight)
        if parts[0].dtype is n.dtype:
            return parts
        return parts[0].to(n.dtype), parts[1].to(n.dtype), parts[2].to(n.dtype)


class MoE(nn.Module):
    """Routed experts plus the shared one. Without `own_experts` a bank must be attached that reads them from elsewhere."""

    def __init__(
        self, config: ModelConfig, numerics: Numerics, n_experts: int, n_active: int, *, own_experts: bool = True
    ) -> None:
        super().__init__()
        self.gate = Router(config, numerics, n_experts, n_active)
        self.experts = nn.ModuleList(Expert(config, numerics) for _ in range(n_experts if own_experts else 0))
        self.shared_experts = Expert(config, numerics)
        self.bank: ExpertBank = ModuleBank(self.experts, numerics)
        self.numerics, self.limit = numerics, config.swiglu_limit

    def attach(self, bank: ExpertBank) -> None:
        """Read routed experts through `bank` from now on; the own ones are given up."""
        self.experts, self.bank = nn.ModuleList(), bank

    def forward(self, x_ND: Tensor, text_N: Tensor) -> Tensor:
        """[N,D] -> [N,D]: routed outputs summed in float32, the shared expert added, rounded once."""
        n = self.numerics
        ids_NK, weights_NK = self.gate(x_ND, text_N)
        s = self.shared_experts
        w1, w2, w3 = (n.fp8_weight(layer.weight).to(x_ND.dtype) for layer in (s.w1, s.w2, s.w3))
        out_ND = experts(
            n.activation(x_ND),
            ids_NK,
            weights_NK,
            self.bank,
            limit=self.limit,
            form=n.activation_form,
            shared=(w1, w2, w3),
            impl=n.product_impl,
        )
        return out_ND.to(x_ND.dtype)
