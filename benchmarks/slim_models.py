"""Which model `v41-flash-slim` measures: the preset, or another trade of experts against layers, all at the released widths.

Owns the words that every figure carries. No torch, no device.
"""

from __future__ import annotations

from benchmarks.gpu_timing import BF16_FLOPS_PER_S, HBM_BYTES_PER_S
from kvist.config import ModelConfig, replace
from kvist.engine.card import cost
from kvist.presets import preset

BENCH = "v41-flash-slim"
RELEASED = preset("v41-flash")
FEWEST_LAYERS = 6


def measured(experts: int | None, layers: int | None) -> ModelConfig:
    """The preset with so many routed experts and layers a layer, None for its own.

    Half of fewer layers lie below the decoder's source; in both halves sources of rows and selections stand about as thick as in
    the release. Draft blocks are left out, since they look at its last layers. Raises ValueError for numbers out of range.
    """
    slim = preset(BENCH)
    if experts is not None:
        if not slim.n_activated_experts <= experts <= RELEASED.n_routed_experts:
            raise ValueError(f"--experts is {experts}; from {slim.n_activated_experts} to {RELEASED.n_routed_experts}")
        slim = replace(slim, n_routed_experts=experts)
    if layers is None or layers == slim.n_layers:
        return slim
    if not FEWEST_LAYERS <= layers < slim.n_layers or layers % 2:
        raise ValueError(f"--layers is {layers}; an even number from {FEWEST_LAYERS} to {slim.n_layers}")
    half = layers // 2
    apart = max(1, (half - 2) // 3)
    sources = tuple(sorted({*range(2, half, apart)[:3], half}))
    return replace(
        slim, n_layers=layers, compress_ratios=(0, 0, *(2,) * (half - 2), *(1,) * half), kv_source_layers=sources,
        index_source_layers=tuple(sorted({*sources, *range(half, layers, 4)})), candidate_source_layers=(half,),
        engram_layer_ids=(1, half - 1), n_mtp_layers=0, dspark_target_layer_ids=(),
    )  # fmt: skip


def pass_floor_ms(config: ModelConfig, rows: tuple[int, int]) -> float:
    """Milliseconds of a pass of so many rows in each half, one kind of operator after the other: each reads its weights once, or
    multiplies at the card's rate, whatever takes longer. Keys, streams and the head are left out."""
    start, flops = config.plan.decoder_start, cost.row_flops(config)
    total, expert = 0.0, 3 * config.dim * config.moe_inter_dim
    for layers, count in zip((start, config.n_layers - start), rows, strict=True):
        routed = cost.distinct(config.n_routed_experts, config.n_activated_experts, count)
        nbytes = {
            "projections": cost.projections(config) * cost.FP8, "routed experts": routed * expert * cost.FP4,
            "shared expert": expert * cost.FP8, "attention": 0.0,
        }  # fmt: skip
        total += layers * sum(max(nbytes[kind] / HBM_BYTES_PER_S, count * flops[kind] / BF16_FLOPS_PER_S) for kind in nbytes)
    return 1e3 * total


def label_of(config: ModelConfig) -> str:
    """What is the release's and what is not."""
    shares = [f"{config.n_routed_experts} of {RELEASED.n_routed_experts} experts"]
    if config.n_layers != RELEASED.n_layers:
        shares.append(f"{config.n_layers} of {RELEASED.n_layers} layers")
    return ", ".join([*shares, "random weights, one card"])
