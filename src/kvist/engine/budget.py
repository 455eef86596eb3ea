"""The memory plan of an engine, made before it serves: pages, slots, workspace. Nothing of it grows afterwards.

Owns `EngineConfig` (budgets and limits) and the arithmetic from a budget in bytes to pages. Must not know tensors or torch.
Sizes follow from the layer plan and the page layout; design section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvist.config import ModelConfig
from kvist.engine.errors import BudgetTooSmall
from kvist.engine.replay import Replay, check_replay
from kvist.page_layout import PageLayout

MIB = 1 << 20
SCORE_BYTES = 4 << 22
"""Most bytes of index scores at a time (`kernels/index_select`: tiles of queries), unless one query has more."""
SCORE_COPIES = 3
"""Products of queries and keys, what is positive of them, and that times the heads' weights."""
DRAFT_ROWS = 2048
"""Rows of plain decode steps that are kept for draft windows at most (`draft_windows`)."""
ATTENTION_WIDTHS, MLP_WIDTHS = 12, 4
"""Buffers a patch that the vision tower has alive at once, of its width in attention, of both its widths in the MLP."""
ACTIVATIONS = 6
"""Stream-sized buffers alive at once in a layer (streams, normed input, their products), a generous count."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Budgets and limits of an engine.

    `memory_bytes`: device memory for cache, slots and workspace; or `pages` directly. `context`: the longest request that is
    promised (default: what fits, at most the model's). `step_cost`: encoder rows a step may cost (a row of the decoder half
    costs its share of layers); `mixed_cost`: the same beside decoding requests, which bounds the gap between their tokens.
    `speculation`: `adaptive`, `off` or a fixed number of drafts to verify. `draft`: drafts proposed (None: the block).
    `acceptance`: `keyed` (never changes an output) or `rejection`.
    """

    memory_bytes: int | None = None
    pages: int | None = None
    page_tokens: int | None = None
    context: int | None = None
    max_running: int = 16
    max_waiting: int = 1024
    step_cost: int = 512
    mixed_cost: int = 128
    replay: Replay = "bounded"
    speculation: str | int = "adaptive"
    draft: int | None = None
    acceptance: str = "keyed"
    feature_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "step_cost", "mixed_cost"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (self.memory_bytes is None) == (self.pages is None):
            raise ValueError("give memory_bytes or pages, one of the two")
        if self.speculation not in ("adaptive", "off") and not isinstance(self.speculation, int):
            raise ValueError(f"speculation must be 'adaptive', 'off' or a number of drafts, got {self.speculation!r}")
        if self.acceptance not in ("keyed", "rejection"):
            raise ValueError(f"acceptance must be 'keyed' or 'rejection', got {self.acceptance!r}")

    def drafts(self, config: ModelConfig) -> int:
        """Drafts a step may verify. ValueError for more than the draft blocks were trained to propose."""
        if not config.n_mtp_layers or self.speculation == "off":
            return 0
        block = config.dspark_block_size
        most = block if self.draft is None else self.draft
        wanted = self.speculation if isinstance(self.speculation, int) else most
        for name, value in (("draft", most), ("speculation", wanted)):
            if not 1 <= value <= block:
                raise ValueError(f"{name} is {value}; the draft blocks propose 1 to {block} tokens ('off' switches them off)")
        return min(most, wanted)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What an engine will allocate, in bytes, and what fits."""

    layout: PageLayout
    pages: int
    slots: int
    slot_bytes: int
    verify_rows: int
    workspace: dict[str, int]
    context: int

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.layout.page_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.page_bytes + self.slots * self.slot_bytes + sum(self.workspace.values())

    @property
    def tokens(self) -> int:
        """Tokens whose global rows fit the pages."""
        return self.pages * self.layout.page_tokens

    def render(self, tiers: dict[str, int] | None = None) -> str:
        """The plan as text; `tiers`: byte budgets of lower tiers by name."""
        lines = [
            f"pages        {self.page_bytes:>14,} B  {self.pages:,} of {self.layout.page_tokens} tokens: {self.tokens:,} tokens",
            f"slots        {self.slots * self.slot_bytes:>14,} B  {self.slots} requests at a time: windows, unfinished groups",
            *(f"{name:<12} {size:>14,} B" for name, size in self.workspace.items()),
            f"total        {self.total_bytes:>14,} B  longest request {self.context:,} tokens",
            f"tokens       {self.tokens:>14,}    in device pages, {float(self.layout.bytes_per_token):g} B a token",
        ]
        for name, size in (tiers or {}).items():
            lines.append(f"             {size // self.layout.page_bytes * self.layout.page_tokens:>14,}    in tier {name}")
        return "\n".join(lines)


def slot_bytes(config: ModelConfig, verify_rows: int, dtype_bytes: int) -> int:
    """Bytes of one slot: window rings of all layers and draft blocks, raw tails of sources with ratio above 1."""
    plan = config.plan
    layers = len(plan.layers) + len(plan.drafts)
    rings = layers * (plan.window + verify_rows) * config.head_dim * dtype_bytes
    tails = sum((spec.ratio - 1 + verify_rows) * config.head_dim * 4 * 2 for spec in plan.kv_sources if spec.ratio > 1)
    return rings + tails


def _images(config: ModelConfig, engine: EngineConfig, rows: int, dtype_bytes: int) -> int:
    """Held features and one span that comes on top, a step's own rows of them, and the tower at work on the largest picture."""
    if (vision := config.vision) is None:
        return 0
    span, row = vision.max_image_tokens, config.dim * dtype_bytes
    patches = span * vision.downsample_ratio**2
    inside = max(ATTENTION_WIDTHS * vision.hidden_size, MLP_WIDTHS * (vision.hidden_size + vision.intermediate_size))
    return max(engine.feature_bytes, span * row) + (span + 2 * rows) * row + patches * inside * dtype_bytes


def _workspace(config: ModelConfig, engine: EngineConfig, verify_rows: int, context: int, dtype_bytes: int) -> dict[str, int]:
    cost = max(engine.step_cost, engine.mixed_cost)
    decode = engine.max_running * verify_rows
    rows = cost + decode
    # Of a prompt that is scored every row has logits; such a row costs all layers.
    scored = cost * max(1, config.plan.decoder_start) // len(config.plan.layers)
    least = min((spec.ratio for spec in config.plan.kv_sources), default=1)
    scores = max(SCORE_BYTES, SCORE_COPIES * config.index_n_heads * (context // least) * dtype_bytes)
    stream = config.hc_mult * config.dim * dtype_bytes
    blocks = -(-context // config.candidate_block_size)
    kept = min(config.plan.window * engine.max_running, DRAFT_ROWS) if verify_rows > 1 else 0
    candidates = min(config.candidate_topk_blocks, blocks) if config.candidate_source_layers else 0
    return {
        "activations": rows * stream * ACTIVATIONS,
        "logits": (2 * decode + scored) * config.vocab_size * 4,
        "scores": scores + context * (config.index_head_dim * dtype_bytes),
        "choices": rows * 8 * (config.index_topk + candidates),
        "selected": rows * min(config.index_topk, context) * config.head_dim * dtype_bytes,
        # Kept, and put together and in order when windows are filled.
        "draft inputs": 3 * kept * len(config.dspark_target_layer_ids) * config.dim * dtype_bytes,
        "images": _images(config, engine, rows, dtype_bytes),
    }


def plan_memory(
    config: ModelConfig, engine: EngineConfig, *, dtype_bytes: int, more: Mapping[str, int] = MappingProxyType({})
) -> MemoryPlan:
    """Pages, slots and workspace for a budget; `more`: what the device takes besides, in bytes by name (`executor.device_needs`).

    Raises BudgetTooSmall if not even one request fits, ValueError for limits.
    """
    check_replay(config.plan, engine.replay)
    layout = PageLayout.of(config, engine.page_tokens)
    drafts = engine.drafts(config)
    rows = 1 + drafts
    slot = slot_bytes(config, rows, dtype_bytes)
    wanted = config.max_seq_len if engine.context is None else engine.context
    if not 1 <= wanted <= config.max_seq_len:
        raise ValueError(f"context {wanted} must lie in 1..{config.max_seq_len}, the model's own")
    if engine.pages is not None:
        pages = engine.pages
        reach = min(wanted, max(0, pages) * layout.page_tokens)
        workspace = _workspace(config, engine, rows, reach, dtype_bytes) | dict(more)
    else:
        assert engine.memory_bytes is not None
        workspace = _workspace(config, engine, rows, wanted, dtype_bytes) | dict(more)
        left = engine.memory_bytes - engine.max_running * slot - sum(workspace.values())
        pages = min(max(0, left) // layout.page_bytes, engine.max_running * -(-wanted // layout.page_tokens) * 64)
    least = 1 if engine.context is None else -(-engine.context // layout.page_tokens)
    if pages < least:
        tokens = layout.page_tokens if engine.context is None else engine.context
        fixed = engine.max_running * slot + sum(workspace.values())
        raise BudgetTooSmall(
            f"{pages} pages fit, one request of {tokens:,} tokens needs {least} ({layout.page_bytes:,} bytes each, besides "
            f"{fixed:,} bytes of slots and workspace); give at least {fixed + least * layout.page_bytes:,} bytes, "
            "or lower max_running, step_cost or context"
        )
    return MemoryPlan(
        layout=layout,
        pages=pages,
        slots=engine.max_running,
        slot_bytes=slot,
        verify_rows=rows,
        workspace=workspace,
        context=min(wanted, pages * layout.page_tokens),
    )
