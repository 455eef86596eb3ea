"""Mixture of experts: a float32 router with separate text and image biases, routed FP4 experts, one shared FP8 expert.

Must not know attention or streams. Facts section 7.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvist.config import ModelConfig
from kvist.kernels.device.stored import bf16
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
        self._short_ED: Tensor | None = None

    def scores(self, x_ND: Tensor) -> Tensor:
        """Unbiased scores [N,E], float32."""
        return scores_ref(x_ND, self.weight, temperature=self.temperature, impl=self.numerics.wide_impl)

    def stored(self) -> Tensor:
        """The gate as it is stored, bfloat16. Raises `NotReleasedFormat` for values that are not."""
        if self._short_ED is None:
            self._short_ED = bf16(self.weight, "the router's gate")
        return self._short_ED

    def forward(self, x_ND: Tensor, text_N: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [N,K] ascending and their weights [N,K] float32. Equal biased scores: the lower expert wins."""
        return route(
            x_ND,
            self.stored() if self.numerics.product_impl == "gpu" else self.weight,
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
        self._packed: tuple[ResidentBank, ResidentBank] | None = None

    def attach(self, bank: ExpertBank) -> None:
        """Read routed experts through `bank` from now on; the own ones are given up."""
        self.experts, self.bank, self._packed = nn.ModuleList(), bank, None

    def forward(self, x_ND: Tensor, text_N: Tensor) -> Tensor:
        """[N,D] -> [N,D]: routed outputs summed in float32, the shared expert added, rounded once."""
        n = self.numerics
        ids_NK, weights_NK = self.gate(x_ND, text_N)
        bank: ExpertBank = self.bank
        shared: ResidentBank | tuple[Tensor, Tensor, Tensor]
        if n.product_impl == "gpu":
            bank, shared = self.pack()
        else:
            s = self.shared_experts
            w1, w2, w3 = (n.fp8_weight(layer.weight).to(x_ND.dtype) for layer in (s.w1, s.w2, s.w3))
            shared = (w1, w2, w3)
        out_ND = experts(
            n.activation(x_ND),
            ids_NK,
            weights_NK,
            bank,
            limit=self.limit,
            form=n.activation_form,
            shared=shared,
            impl=n.product_impl,
        )
        return out_ND.to(x_ND.dtype)

    def pack(self) -> tuple[ResidentBank, ResidentBank]:
        """Routed and shared experts as the card takes them: their stored codes in panels, made once and kept.

        Raises `NotReleasedFormat` for values that are not those of a file, ValueError for sizes that the card's operators do
        not take or experts that lie elsewhere.
        """
        if self._packed is None:
            from kvist.kernels.experts.packing import pack_bank

            if not len(self.experts):
                raise ValueError("impl 'gpu' packs experts in memory, these are read from a file; load without an expert budget")
            routed = [_values(expert) for expert in self.experts]
            self._packed = pack_bank(routed, "fp4", "experts"), pack_bank([_values(self.shared_experts)], "fp8", "shared_experts")
        return self._packed


def _values(expert: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(expert, Expert)
    return expert.w1.weight, expert.w2.weight, expert.w3.weight
