"""What a step or a pass must read, compute and hold: arithmetic on a configuration, no torch, no device.

Floors are bytes over the card's read bandwidth. Must not know how a step is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.config import ModelConfig
from kvist.page_layout import PageLayout

FP8, FP4, BF16, F32 = 1 + 1 / 1024, 0.5 + 1 / 32, 2.0, 4.0
"""Bytes a weight, scales included (one for 32 x 32, one for 1 x 32)."""
GRAPH_ROOM, KEPT_BYTES = 1.75, 128 << 20
"""What graphs of many sizes take in their one memory, of what the widest needs alone, and what operators keep beside it. Measured
at released widths: 1.03 GB in all with passes of 2,048 rows, which need 0.62; 0.13 GB from the first pass of 150 rows on."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes that one kind of operator reads and writes in a step."""

    name: str
    nbytes: float


def distinct(experts: int, active: int, rows: int) -> float:
    """How many of `experts` are expected to be chosen by `rows` rows that choose `active` each, evenly."""
    return experts * (1 - (1 - active / experts) ** rows)


def projections(c: ModelConfig) -> int:
    """FP8 weights of one layer's attention."""
    enter, query = (c.q_lora_rank + c.head_dim) * c.dim, c.n_heads * c.head_dim * c.q_lora_rank
    return enter + query + c.o_lora_rank * c.n_heads * c.head_dim + c.dim * c.o_groups * c.o_lora_rank


def step_parts(c: ModelConfig, batch: int, context: int) -> list[Part]:
    """A step of `batch` requests whose contexts hold `context` tokens each. Sums are expectations where experts are chosen."""
    plan, layers, expert = c.plan, len(c.plan.layers), 3 * c.dim * c.moe_inter_dim
    selecting = [spec for spec in plan.layers if spec.selects]
    keys = window = selected = 0.0
    for spec in plan.layers:
        rows = context // spec.ratio if spec.ratio else 0
        window += min(plan.window, context) * c.window_row_bytes
        selected += min(c.index_topk, rows) * c.main_row_bytes
        if spec.selects:
            pool = c.candidate_topk_blocks * c.candidate_block_size if spec.candidate_source is not None else rows
            keys += min(pool, rows) * c.key_row_bytes
    streams = 2 * layers * (2 * c.hc_mult + 3) * c.dim * BF16
    hashed = c.engram_columns * c.engram_head_dim * (c.hc_mult + 1) * c.dim
    compressors = sum((1 if spec.ratio == 1 else 2) * c.dim + c.index_head_dim for spec in plan.kv_sources) * c.head_dim
    indexer = c.index_n_heads * (c.index_head_dim * c.q_lora_rank * FP8 + c.dim * BF16)
    routed = distinct(c.n_routed_experts, c.n_activated_experts, batch)
    mixers = (2 * layers + 1) * (2 * c.hc_mult + c.hc_mult**2) * c.hc_mult * c.dim
    return [
        Part(name="routed experts, FP4", nbytes=layers * routed * expert * FP4),
        Part(name="attention projections, FP8", nbytes=layers * projections(c) * FP8),
        Part(name="shared experts, FP8", nbytes=layers * expert * FP8),
        Part(name="head, bfloat16", nbytes=c.vocab_size * c.dim * BF16),
        Part(name="Engram projections, FP8", nbytes=len(c.engram_layer_ids) * hashed * FP8),
        Part(name="router, bfloat16", nbytes=layers * c.n_routed_experts * c.dim * BF16),
        Part(name="hyper-connections, float32", nbytes=mixers * F32),
        Part(name="streams between sublayers", nbytes=batch * streams),
        Part(name="indexer weights", nbytes=len(selecting) * indexer),
        Part(name="compressors, bfloat16", nbytes=compressors * BF16),
        Part(name="index keys", nbytes=batch * keys),
        Part(name="window and selected rows", nbytes=batch * (window + selected)),
    ]  # fmt: skip


def step_bytes(c: ModelConfig, batch: int, context: int) -> float:
    """The sum of `step_parts`."""
    return sum(part.nbytes for part in step_parts(c, batch, context))


def weight_bytes(c: ModelConfig) -> float:
    """Device bytes of a packed backbone with every expert; Engram's tables lie on the host."""
    routed = len(c.plan.layers) * c.n_routed_experts * 3 * c.dim * c.moe_inter_dim * FP4
    once = {part.name: part.nbytes for part in step_parts(c, 0, 0)}
    # the embedding is as large as the head, and only its rows are read
    return routed + sum(once.values()) + c.vocab_size * c.dim * BF16


def draft_bytes(c: ModelConfig) -> float:
    """Device bytes of the packed draft blocks."""
    blocks, expert, rank = len(c.plan.drafts), 3 * c.dim * c.moe_inter_dim, c.dspark_markov_rank
    mixers = 2 * (2 * c.hc_mult + c.hc_mult**2) * c.hc_mult * c.dim * F32
    block = projections(c) * FP8 + c.dspark_n_routed_experts * (expert * FP4 + c.dim * BF16) + expert * FP8 + mixers
    return blocks * block + len(c.dspark_target_layer_ids) * c.dim**2 * FP8 + 2 * c.vocab_size * rank * BF16


def state_bytes(c: ModelConfig, batch: int, context: int, distinct_contexts: int) -> float:
    """Device bytes of pages and rings: `distinct_contexts` of the requests have pages of their own, the others share them."""
    layout, plan = PageLayout.of(c), c.plan
    pages = distinct_contexts * -(-context // layout.page_tokens) + batch
    rings = (len(plan.layers) + len(plan.drafts)) * plan.window * c.window_row_bytes
    tails = sum(2 * spec.ratio * c.head_dim * F32 for spec in plan.kv_sources if spec.ratio > 1)
    targets = plan.window * len(c.dspark_target_layer_ids) * c.dim * BF16 if plan.drafts else 0.0
    return pages * layout.page_bytes + batch * (rings + tails + targets)


def pass_bytes(c: ModelConfig, rows: int) -> float:
    """Device bytes that a pass of `rows` rows holds at its widest beside weights and state: the experts', or attention's.

    Streams before and after, and either the choices' hidden rows and outputs with both float32 sums, or queries and outputs.
    """
    streams = 2 * c.hc_mult * c.dim * BF16 + 3 * c.dim * BF16
    experts = c.n_activated_experts * (c.moe_inter_dim + c.dim) * BF16 + 2 * c.dim * F32
    attention = 2 * c.n_heads * c.head_dim * BF16 + c.o_groups * c.o_lora_rank * BF16
    engram = len(c.engram_layer_ids) * c.engram_columns * c.engram_head_dim * BF16
    return rows * (streams + max(experts, attention) + 2 * engram)


def row_flops(c: ModelConfig) -> dict[str, float]:
    """Operations of one row in one layer by kind, where all of `index_topk` rows are there; a multiply-add counts two."""
    expert = 3 * c.dim * c.moe_inter_dim
    return {
        "projections": 2 * projections(c),
        "routed experts": 2 * c.n_activated_experts * expert,
        "shared expert": 2 * expert,
        "attention": 4.0 * (c.window_size + c.index_topk) * c.n_heads * c.head_dim,
    }


def replay_rows(c: ModelConfig, hits: int, suffix: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows of the encoder and of the decoder half: of hits whose windows are rebuilt, and of hits that have them."""
    window = c.plan.window
    return (hits * (window + suffix), hits * window), (hits * suffix, hits * min(suffix, window))


def graph_bytes(c: ModelConfig, *, requests: Sequence[int], rows: int, passes: int, widest: int, ends: int) -> dict[str, int]:
    """Device bytes that captured steps and passes hold, by name, when all that may be captured are.

    Steps come for each of the numbers `requests` with 1 to `rows` rows a request, and drafts where `rows` is above 1; `passes` of
    them are kept, of at most `widest` rows and `ends` logits. All graphs share one memory, as wide as the widest; beside it lie
    the logits that each leaves.
    """
    logit, total = c.vocab_size * 4, sum(requests)
    left = passes * ends + (total * c.dspark_block_size if rows > 1 else 0)
    working = KEPT_BYTES + GRAPH_ROOM * pass_bytes(c, max(widest, max(requests) * rows))
    return {"graphs": int(working) + left * logit, "step logits": total * rows * (rows + 1) // 2 * logit}
