"""`report(config)`: everything `kvist plan` says about a configuration, as data. Nothing is allocated.

Owns `PlanReport` and active parameter counts. Must not know how a report is printed (render.py) or drawn (figures.py).
The command line calls `report`, `print_report(report, console)` and, for --plot DIR, `write_figures(report, dir)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvist.config import ModelConfig
from kvist.inventory import (
    DTYPE_BYTES,
    Parameter,
    ParameterCounts,
    Storage,
    count_parameters,
    parameters,
    part_of,
    tensor_specs,
)
from kvist.page_layout import PageLayout
from kvist.plan.cache_bytes import Step, waterfall
from kvist.plan.flops import FlopModel, Flops, is_published


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One line of the layer table. Sources are layer indices; `cache_bytes` a token are this layer's own global rows."""

    index: str
    mode: str
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidates: str
    rope: str
    engram: bool
    experts: str
    parameters: int
    cache_bytes: Fraction
    window_bytes: int


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """Tensors of one class: number, payload bytes, logical parameters."""

    kind: str
    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class FlopRow:
    """Operations a token at one context length. `full_decode`: without HSI; `full_prefill`: without CED and HSI."""

    context: int
    decode: Flops
    full_decode: Flops
    prefill: Flops
    prefill_without_ced: Flops
    full_prefill: Flops


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """All numbers of a configuration. Bytes are payload (no file headers); parameters are logical."""

    config: ModelConfig
    layers: tuple[LayerRow, ...]
    counts: ParameterCounts
    active_prefill: int
    active_decode: int
    kinds: tuple[KindRow, ...]
    tensors: int
    nbytes: int
    layout: PageLayout
    cache_bytes_per_token: Fraction
    waterfall: tuple[Step, ...]
    window_bytes: int
    draft_window_bytes: int
    flops: tuple[FlopRow, ...]


def report(config: ModelConfig) -> PlanReport:
    """Compute the whole report (under a second for the release)."""
    layout = PageLayout.of(config)
    kinds = kind_rows(config)
    return PlanReport(
        config=config,
        layers=layer_rows(config, layout),
        counts=count_parameters(config),
        active_prefill=active_parameters(config, decode=False),
        active_decode=active_parameters(config, decode=True),
        kinds=kinds,
        tensors=sum(row.tensors for row in kinds),
        nbytes=sum(row.nbytes for row in kinds),
        layout=layout,
        cache_bytes_per_token=layout.bytes_per_token,
        waterfall=waterfall(config),
        window_bytes=config.n_layers * window_bytes(config),
        draft_window_bytes=config.n_mtp_layers * window_bytes(config),
        flops=flop_rows(config),
    )


def active_parameters(config: ModelConfig, *, decode: bool) -> int:
    """Parameters that take part in one token: looked-up rows of tables, the chosen experts, everything else whole.

    Decode: all layers and the head. Prefill: the layers below the decoder half and what its source publishes for every
    token (CED); the replayed tail and the one row of logits are not counted, as in the report. No drafts, no vision.
    """
    start = config.plan.decoder_start
    total = 0
    for parameter in parameters(config):
        if part_of(parameter.kind) not in ("backbone", "engram") or parameter.layer >= config.n_layers:
            continue
        below = 0 <= parameter.layer < start or parameter.kind == "embedding"
        if decode or below or (parameter.layer == start and is_published(parameter)):
            total += _active(config, parameter)
    return total


def _active(config: ModelConfig, parameter: Parameter) -> int:
    if parameter.kind == "embedding":
        return config.dim
    if parameter.storage is Storage.TABLE:
        return config.engram_columns * config.engram_head_dim
    if parameter.kind == "experts":
        # Every expert has the same three matrices, so the chosen share of the class is exact after summing a layer.
        index = int(parameter.name.split(".experts.")[1].split(".")[0])
        return parameter.count if index < config.n_activated_experts else 0
    return parameter.count


def window_bytes(config: ModelConfig) -> int:
    """Window KV of one layer and sequence: E4M3 codes and E8M0 scales of `window_size` entries."""
    return config.window_size * config.window_row_bytes


def kind_rows(config: ModelConfig) -> tuple[KindRow, ...]:
    """Tensor classes in order of first appearance."""
    sums: dict[str, list[int]] = {}
    for spec in tensor_specs(config):
        row = sums.setdefault(spec.kind, [0, 0, 0])
        elements = spec.nbytes // DTYPE_BYTES[spec.dtype]
        row[0] += 1
        row[1] += spec.nbytes
        row[2] += 0 if spec.dtype == "F8_E8M0" else 2 * elements if spec.dtype == "I8" else elements
    return tuple(KindRow(kind=k, tensors=t, nbytes=b, parameters=p) for k, (t, b, p) in sums.items())


def layer_rows(config: ModelConfig, layout: PageLayout) -> tuple[LayerRow, ...]:
    """The layer table: backbone, then drafts."""
    counts: dict[int, int] = {}
    for parameter in parameters(config):
        counts[parameter.layer] = counts.get(parameter.layer, 0) + parameter.count
    rows = []
    for spec in (*config.plan.layers, *config.plan.drafts):
        draft = spec.index >= config.n_layers
        own = (plane.bytes_per_token for plane in layout.planes if plane.layer == spec.index)
        pool = "publishes" if spec.publishes_candidates else ""
        pool = f"of {spec.candidate_source}" if spec.candidate_source is not None else pool
        routed = (config.dspark_n_routed_experts, config.dspark_n_activated_experts)
        routed = routed if draft else (config.n_routed_experts, config.n_activated_experts)
        rows.append(
            LayerRow(
                index=f"mtp.{spec.index - config.n_layers}" if draft else str(spec.index),
                mode="draft" if draft else spec.mode.value,
                ratio=spec.ratio,
                kv_source=spec.kv_source,
                index_source=spec.index_source,
                candidates=pool,
                rope=f"{spec.rope_theta:g}" + (" YaRN" if spec.yarn else ""),
                engram=spec.engram is not None,
                experts=f"{routed[1]}/{routed[0]}+1",
                parameters=counts[spec.index],
                cache_bytes=sum(own, Fraction(0)),
                window_bytes=window_bytes(config),
            )
        )
    return tuple(rows)


def contexts(config: ModelConfig) -> tuple[int, ...]:
    """Powers of four from 1K up to the longest context, and that one."""
    lengths = []
    length = 1024
    while length < config.max_seq_len:
        lengths.append(length)
        length *= 4
    return (*lengths, config.max_seq_len)


def flop_rows(config: ModelConfig) -> tuple[FlopRow, ...]:
    """Operations a token at each of `contexts`."""
    model = FlopModel(config)
    return tuple(
        FlopRow(
            context=n,
            decode=model.decode(n),
            full_decode=model.decode(n, hsi=False),
            prefill=model.prefill(n),
            prefill_without_ced=model.prefill(n, ced=False),
            full_prefill=model.prefill(n, ced=False, hsi=False),
        )
        for n in contexts(config)
    )
