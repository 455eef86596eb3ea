"""Floating-point operations a token, against context length, for prefill and decode, with and without CED and HSI.

Owns the operation counts of one layer at one position and their means over a prompt. A multiply-add counts two. Knows
the configuration and its inventory only. Source: report 2.2, 2.3 and 3.2.2; facts sections 2 to 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from kvist.config import LayerMode, LayerSpec, ModelConfig
from kvist.inventory import Parameter, Storage, parameters, part_of

FORMAT_WEIGHTS = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
"""Cost relative to BF16 in the report's decode curve; float32 work of the model counts as BF16."""

# A product runs at the rate of its wider operand: FP4 experts meet FP8 activations.
_PRODUCT_FORMAT = {Storage.BF16: "bf16", Storage.F32: "bf16", Storage.FP8: "fp8", Storage.FP4: "fp8"}


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations by number format."""

    bf16: float = 0.0
    fp8: float = 0.0
    fp4: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(bf16=self.bf16 + other.bf16, fp8=self.fp8 + other.fp8, fp4=self.fp4 + other.fp4)

    def __mul__(self, factor: float) -> Flops:
        return Flops(bf16=self.bf16 * factor, fp8=self.fp8 * factor, fp4=self.fp4 * factor)

    @property
    def total(self) -> float:
        """All operations, each counted once."""
        return self.bf16 + self.fp8 + self.fp4

    @property
    def weighted(self) -> float:
        """BF16 equivalents: FP8 counts a half, FP4 a quarter."""
        return sum(getattr(self, name) * weight for name, weight in FORMAT_WEIGHTS.items())


@dataclass(frozen=True)
class FlopModel:
    """Counts for one configuration."""

    config: ModelConfig

    @cached_property
    def _weights(self) -> dict[tuple[int, bool], Flops]:
        """Operations with weights a token by (layer, published): `published` is what a kv source computes for others."""
        sums: dict[tuple[int, bool], Flops] = {}
        for parameter in parameters(self.config):
            if parameter.layer < self.config.n_layers and part_of(parameter.kind) in ("backbone", "engram"):
                key = parameter.layer, is_published(parameter)
                sums[key] = sums.get(key, Flops()) + self._of_parameter(parameter)
        return sums

    def _of_parameter(self, parameter: Parameter) -> Flops:
        if parameter.storage is Storage.TABLE or parameter.kind == "embedding":
            return Flops()
        count = float(parameter.count)
        if parameter.kind == "experts":
            count *= self.config.n_activated_experts / self.config.n_routed_experts
        if parameter.name.endswith(("indexer.wk.weight", "indexer.k_norm.weight")):
            count /= self.config.plan.layers[parameter.layer].ratio
        return Flops(**{_PRODUCT_FORMAT[parameter.storage]: 2 * count})

    def layer(self, spec: LayerSpec, window: float, visible: Visible, *, hsi: bool) -> Flops:
        """One layer for one token that sees `window` raw keys and `visible` tokens of context."""
        c = self.config
        total = self._weights[(spec.index, False)] + self._weights.get((spec.index, True), Flops())
        keys = window + (visible.mean_rows(spec.ratio, c.index_topk) if spec.ratio else 0.0)
        total += Flops(bf16=4.0 * keys * c.n_heads * c.head_dim)
        if spec.selects:
            pool = c.candidate_topk_blocks * c.candidate_block_size
            limit = pool if hsi and spec.mode is LayerMode.REINDEX and spec.candidate_source is not None else None
            rows = visible.mean_rows(spec.ratio, limit)
            # Products of FP4 queries and keys, then ReLU, head weights and their sum.
            total += Flops(fp4=2.0 * rows * c.index_n_heads * c.index_head_dim, bf16=3.0 * rows * c.index_n_heads)
        # Two collapses and two expansions of the streams (report 2.4.1); Sinkhorn's 4x4 work is below a thousandth.
        total += Flops(bf16=4.0 * c.hc_mult * (c.hc_mult + 2) * c.dim)
        return total

    def published(self, spec: LayerSpec) -> Flops:
        """Only what a kv source computes for the cache: compressor and index key."""
        return self._weights.get((spec.index, True), Flops())

    @property
    def ends(self) -> Flops:
        """Final norm and head for one position."""
        return self._weights[(-1, False)]

    def decode(self, context: int, *, hsi: bool = True) -> Flops:
        """One generated token that is the last of `context` tokens: all layers and the head."""
        visible = Visible(context - 1, context)
        window = min(context, self.config.window_size)
        layers = (self.layer(spec, window, visible, hsi=hsi) for spec in self.config.plan.layers)
        return _sum(layers) + self.ends

    def prefill(self, context: int, *, ced: bool = True, hsi: bool = True) -> Flops:
        """The mean over all tokens of a prompt of `context` tokens; logits for the last one only.

        With `ced` the decoder half runs on the last `window` tokens, each of which sees the replayed ones as its window,
        and its source compresses every token.
        """
        c, plan = self.config, self.config.plan
        whole = Visible(0, context)
        tail_tokens = min(context, c.window_size) if ced else context
        tail = Visible(context - tail_tokens, context)
        total = self.ends * (1.0 / context)
        for spec in plan.layers:
            replayed = spec.index >= plan.decoder_start
            seen = tail if replayed else whole
            start = seen.start if replayed else 0
            window = mean_clipped(1, context - start, 1, c.window_size)
            share = (seen.stop - seen.start) / context
            total += self.layer(spec, window, seen, hsi=hsi) * share
            if replayed:
                total += self.published(spec) * (1.0 - share)
        return total


@dataclass(frozen=True)
class Visible:
    """Positions start..stop-1 of a sequence, as queries; the mean number of compressed rows that they see."""

    start: int
    stop: int

    def mean_rows(self, ratio: int, limit: int | None) -> float:
        """Mean of min(limit, floor((t + 1) / ratio)) over the positions."""
        return mean_clipped(self.start + 1, self.stop, ratio, limit)


def mean_clipped(first: int, last: int, ratio: int, limit: int | None) -> float:
    """Mean of min(limit, floor(n / ratio)) for n = first..last, in closed form."""
    count = last - first + 1
    return (_clipped_sum(last, ratio, limit) - _clipped_sum(first - 1, ratio, limit)) / count


def _clipped_sum(last: int, ratio: int, limit: int | None) -> int:
    """Sum of min(limit, floor(n / ratio)) for n = 0..last."""
    free = last if limit is None else min(last, limit * ratio - 1)
    full, rest = divmod(free + 1, ratio)
    below = ratio * full * (full - 1) // 2 + full * rest
    return below + (0 if limit is None else (last - free) * limit)


def is_published(parameter: Parameter) -> bool:
    """True for the parameters with which a kv source makes rows for all layers: compressor and index key."""
    return parameter.kind == "compressor" or parameter.name.endswith(("indexer.wk.weight", "indexer.k_norm.weight"))


def _sum(items: Iterable[Flops]) -> Flops:
    total = Flops()
    for item in items:
        total += item
    return total
