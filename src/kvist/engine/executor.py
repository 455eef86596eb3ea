"""What runs an engine's steps on this device, and the memory it runs them on: chosen once, said once, never replaced in silence.

`Runner` passes the model over a paged memory (any device, any numerics); a model with impl 'gpu' that the card's own runner
takes is packed for it. Must not know scheduling or sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.checkpoint import expert_store
from kvist.checkpoint.expert_bank import ExpertStore
from kvist.checkpoint.reads import ReadFailed
from kvist.engine.batch import FeatureCache
from kvist.engine.budget import EngineConfig, MemoryPlan
from kvist.engine.errors import BudgetTooSmall
from kvist.engine.request import Job
from kvist.engine.runner import Runner, StepResult
from kvist.engine.scheduler import Piece
from kvist.engine.session import Session
from kvist.kernels.device import GpuUnavailable
from kvist.kernels.device.stored import NotReleasedFormat
from kvist.model.block import Block
from kvist.model.dspark import Draft
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout

LOG = logging.getLogger(__name__)
HOPPER = (9, 0)


class Memory(Protocol):
    """Where requests are placed: `PagedMemory`, or a card's."""

    @property
    def layout(self) -> PageLayout: ...
    @property
    def bytes_PB(self) -> Tensor: ...
    def open(self, slot: int, pages: Sequence[int], tokens: int) -> None: ...
    def extend(self, slot: int, pages: Sequence[int]) -> None: ...
    def exchange(self, slot: int, number: int, page: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...


class Executor(Protocol):
    """What runs pieces: `Runner`, or a card's. Attributes and methods as there."""

    rows: int
    tail_rows: int
    unread: ReadFailed | None
    features: FeatureCache

    @property
    def device(self) -> torch.device: ...
    @property
    def readers(self) -> Sequence[object]: ...
    @property
    def experts(self) -> ExpertStore | None: ...
    def guard(self) -> AbstractContextManager[object]: ...
    def check(self, pieces: Sequence[Piece]) -> dict[int, Exception]: ...
    def run(self, pieces: Sequence[Piece]) -> StepResult: ...
    def draft(self, jobs: Sequence[Job], sample: Callable[[Tensor, int], Tensor]) -> Draft: ...


def executor(model: Transformer, config: EngineConfig, plan: MemoryPlan) -> tuple[Memory, Executor]:
    """Memory and executor of an engine, with all that they will ever allocate.

    Raises BudgetTooSmall where the device has less free than planned, GpuUnavailable where impl 'gpu' cannot run or a kernel
    does not build, `NotReleasedFormat` for weights that it cannot pack.
    """
    device = model.embed.weight.device
    model.numerics.check_device(device)
    require_room(model, plan, device)
    drafts = config.drafts(model.config) > 0
    if model.numerics.impl == "gpu":
        lacking = lacks(model)
        if lacking is None:
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    return _on_card(model, plan, device, drafts=drafts)
            except (NotReleasedFormat, GpuUnavailable, BudgetTooSmall):
                raise
            except ValueError as error:
                lacking = str(error)
        _pack_experts(model)
        warmed(OneByOne(model))
        LOG.warning("engine: GPU operators launched one by one, not the card's captured steps, because %s", lacking)
    elif device.type == "cuda":
        LOG.warning(
            "engine: torch's own operators on %s (impl %r); impl 'gpu' in bfloat16 runs the card's", device, model.numerics.impl
        )
    memory = PagedMemory(
        model.config, model.numerics, pages=plan.pages, slots=plan.slots, verify_rows=plan.verify_rows,
        page_tokens=plan.layout.page_tokens, device=device,
    )  # fmt: skip
    runner = Runner(model, memory, feature_bytes=config.feature_bytes)
    if not drafts:
        runner.windows = None  # nobody will look into them
    return memory, runner


def device_needs(model: Transformer, config: EngineConfig, *, tiers: bool) -> dict[str, int]:
    """Bytes by name that a card holds beside pages, slots and a step's workspace: graphs, and staging of pages that move."""
    if model.embed.weight.device.type != "cuda":
        return {}
    from kvist.engine.card.page_mover import FIRST_BYTES, PART_BYTES

    needs = {"page staging": 2 * (PART_BYTES + FIRST_BYTES)} if tiers else {}
    if model.numerics.impl == "gpu" and lacks(model) is None:
        from kvist.engine.card.serving import graph_needs

        needs |= graph_needs(model.config, config)
    return needs


def lacks(model: Transformer) -> str | None:
    """Why a model's steps cannot run on the card's own runner, None if they can."""
    if model.config.vision is not None:
        return "the model takes pictures"
    if expert_store(model) is not None:
        return "its experts are read from files"
    if model.plan.decoder_start == len(model.plan.layers):
        return "the model has no decoder half"
    return None


def require_room(model: Transformer, plan: MemoryPlan, device: torch.device) -> None:
    """BudgetTooSmall unless the device has free what the plan, and packing for the card, will take."""
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Stored codes take a byte or half of one where memory holds two.
    packed = sum(weight.nbytes for weight in model.parameters()) // 2 if model.numerics.impl == "gpu" else 0
    if plan.total_bytes + packed > free:
        raise BudgetTooSmall(
            f"{device} has {free:,} bytes free beside the weights, the plan needs {plan.total_bytes:,}"
            + (f" and packed weights {packed:,}" if packed else "")
            + "; lower memory_bytes, pages, context or max_running"
        )


def _on_card(model: Transformer, plan: MemoryPlan, device: torch.device, *, drafts: bool) -> tuple[Memory, Executor]:
    """Pack the model and build what its first step needs."""
    from kvist.engine.card.serving import CardExecutor, CardMemory, card_tables
    from kvist.engine.card.state import CardState
    from kvist.engine.card.weights import pack

    weights = pack(model, card_tables(model, device), device)
    rows = max(plan.verify_rows, model.config.dspark_block_size) if drafts else 1
    state = CardState(
        model.config, slots=plan.slots, pages=plan.pages, most_tokens=model.config.max_seq_len, device=device, rows=rows,
        page_tokens=plan.layout.page_tokens,
    )  # fmt: skip
    runner = CardExecutor(weights, state, drafts=drafts)
    warmed(runner)
    LOG.info("engine: the card's captured steps on %s (impl 'gpu'), %d rows a request and step", device, rows)
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) != HOPPER:
        LOG.warning("engine: capability %d.%d, not %d.%d: general kernels run in place of those for Hopper", *found, *HOPPER)
    return CardMemory(state), runner


class Warming(Protocol):
    """Who builds kernels before there are requests."""

    @property
    def device(self) -> torch.device: ...
    def warm(self) -> None: ...


def warmed(runner: Warming) -> None:
    """Build and run a first step. GpuUnavailable for whatever a compiler or driver says to it."""
    try:
        runner.warm()
    except GpuUnavailable:
        raise
    except Exception as error:
        raise GpuUnavailable(f"impl 'gpu' does not run this model on {runner.device}: {error}; impl 'ref' runs it") from error


class OneByOne:
    """A model whose operators are launched one by one: its first step is one token's through all layers."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.device = model, model.embed.weight.device

    def warm(self) -> None:
        """See `Warming`."""
        Session(self.model).score(torch.zeros(1, dtype=torch.int64))


def _pack_experts(model: Transformer) -> None:
    """What the first pass would pack, now."""
    for block in (*model.layers, *(model.mtp or ())):
        assert isinstance(block, Block)
        block.ffn.pack()
