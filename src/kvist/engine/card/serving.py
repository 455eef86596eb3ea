"""A card as the engine's executor: prefill passes, verify steps by graphs and drafts on one `CardState`, driven by pieces.

Pages and tables are the engine's own (the bytes of `page_layout`), windows lie in FP8 rings, and nothing is handed over between
prefill and decode. Must not know scheduling, sampling rules or pages' owners. Shapes: W wanted rows, R requests, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from kvist.checkpoint.expert_bank import ExpertStore
from kvist.checkpoint.reads import ReadFailed
from kvist.checkpoint.tables import EngramTable
from kvist.config import ModelConfig
from kvist.engine.batch import FeatureCache
from kvist.engine.budget import EngineConfig
from kvist.engine.card import cost, passes
from kvist.engine.card.device_model import BUCKETS, Batch, DeviceModel
from kvist.engine.card.draft import CardDrafts
from kvist.engine.card.rooms import ROWS, RUNS, spare_rows
from kvist.engine.card.small_passes import MOST_GRAPHS, SmallPasses, WatchedPrefill
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights
from kvist.engine.replay import replay_span
from kvist.engine.request import Job, State
from kvist.engine.runner import StepResult
from kvist.engine.scheduler import Piece
from kvist.kernels.engram.gpu import StoredRows
from kvist.model.block import Block
from kvist.model.dspark import Draft
from kvist.model.initialise import TableInMemory
from kvist.model.transformer import Transformer
from kvist.quant import quantise_fp8_rows

LOG = logging.getLogger(__name__)
SLOW_S = 1.0
"""What launching a step takes at most when nothing has to be compiled or captured for it."""


class CardMemory:
    """The calls by which the engine places requests, on a card's state."""

    def __init__(self, state: CardState) -> None:
        self.state, self.layout = state, state.layout

    @property
    def bytes_PB(self) -> Tensor:
        """The pool, uint8 [pages, page_bytes], without the spare page."""
        return self.state.rows.bytes_PB[:-1]

    def open(self, slot: int, pages: Sequence[int], tokens: int) -> None:
        """Begin a request whose first `tokens` positions' rows lie in `pages`. ValueError unless whole groups fit in them."""
        if tokens % self.state.plan.alignment:
            raise ValueError(
                f"a prefix of {tokens} tokens ends inside a group; cut it to a multiple of {self.state.plan.alignment}"
            )
        self.state.open(slot, pages)
        self.state.rows.require(slot, tokens)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Give a request more pages."""
        self.state.rows.add_pages(slot, pages)

    def exchange(self, slot: int, number: int, page: int) -> None:
        """Let a request read its page `number` from another one, which holds the same tokens' rows."""
        self.state.rows.exchange(slot, number, page)

    def close(self, slot: int) -> None:
        """End a request; its pages are the pool's affair."""
        self.state.rows.set_pages(slot, ())

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        self.bytes_PB[target].copy_(self.bytes_PB[source])


class CardExecutor:
    """Runs a step's pieces: prompts in one pass, decoding requests with their drafts in graphs of up to 64 requests.

    `rows` and `tail_rows` count what has run, `features`, `readers`, `experts` and `unread` are as a `Runner`'s and hold nothing:
    pictures and files are not served here.
    """

    unread: ReadFailed | None = None
    experts: ExpertStore | None = None
    readers: Sequence[object] = ()

    def __init__(self, weights: CardWeights, state: CardState, *, drafts: bool) -> None:
        self.model = DeviceModel(weights, state)
        self.state, self.device, self.config = state, state.device, weights.config
        self.prefill = WatchedPrefill(self.model)
        self.passes = SmallPasses(self.prefill)
        self.blocks = CardDrafts(self.model) if drafts else None
        self.features = FeatureCache(0)
        self.rows = self.tail_rows = 0
        self._filled: dict[int, tuple[int, int]] = {}

    @torch.inference_mode()
    def warm(self) -> None:
        """Build and run a page of a prompt, a step and a draft on the spare slot, so that a kernel which does not build is found
        before there are requests."""
        spare, size = self.state.spare, self.state.layout.page_tokens
        span = replay_span(self.state.plan, size, 0, "bounded")
        prompt = passes.Prompt.replayed(spare, np.zeros(size, dtype=np.int64), span)
        planned = passes.plan_pass([passes.Piece(prompt=prompt, start=0, stop=size)], self.prefill.bringer.sizes)
        self.passes.run(planned)
        for rows in sorted({1, self.state.most_rows if self.device.type == "cuda" else 1}):
            held = self.model.buffers(1, rows)
            held.slots_M.fill_(spare)
            self.model.runner(held, 1, advance=False)()
        if self.blocks is not None:
            self.blocks.proposed([0], [0], [spare])
            if self.device.type == "cuda":
                self.blocks.prepare()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def guard(self) -> AbstractContextManager[object]:
        """Kernels are launched on the current device, which must be this one in whatever thread steps."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def check(self, pieces: Sequence[Piece]) -> dict[int, Exception]:
        """Pieces that cannot run, by number: those with pictures."""
        refused = ValueError("this engine runs on the card's own runner, which takes no pictures; start it with impl 'ref'")
        return {number: refused for number, piece in enumerate(pieces) if piece.job.request.images}

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> StepResult:
        """Run all pieces; logits piece by piece. A piece is finite if its encoder rows and wanted logits are."""
        prompts = [number for number, piece in enumerate(pieces) if piece.job.state is State.PREFILL]
        decoding = [number for number, piece in enumerate(pieces) if piece.job.state is not State.PREFILL]
        logits: dict[int, Tensor] = {}
        finite: dict[int, Tensor] = {}
        began = time.perf_counter()
        if prompts:
            self._read([pieces[number] for number in prompts], prompts, logits, finite)
        for first in range(0, len(decoding), BUCKETS[-1]):
            numbers = decoding[first : first + BUCKETS[-1]]
            self._decode([pieces[number] for number in numbers], numbers, logits)
        if (seconds := time.perf_counter() - began) > SLOW_S:
            # Nothing has been waited for yet: this was building.
            sizes = len(prompts), len(decoding), max(piece.stop - piece.start for piece in pieces)
            LOG.warning("card: kernels or a graph for %d prompts, %d requests, up to %d rows: %.1f s, once", *sizes, seconds)
        self.rows += sum(piece.stop - piece.start for piece in pieces)
        self.tail_rows += sum(piece.decoded for piece in pieces)
        parts = [logits[number] for number in range(len(pieces))]
        logits_WV, counts = torch.cat(parts), [len(part) for part in parts]
        # One look at the device for all: every row of logits, then every prompt.
        told = iter(torch.cat([logits_WV.isfinite().all(1), *(flag[None] for flag in finite.values())]).tolist())
        flags = [all(list(islice(told, count))) for count in counts]
        for number, fine in zip(finite, told, strict=True):
            flags[number] = flags[number] and fine
        return StepResult(logits_WV, counts, flags)

    def _read(
        self, pieces: Sequence[Piece], numbers: Sequence[int], logits: dict[int, Tensor], finite: dict[int, Tensor]
    ) -> None:
        """One pass over prompts' rows."""
        planned = passes.plan_pass([_prompt_piece(piece) for piece in pieces], self.prefill.bringer.sizes)
        wanted, at = [], 0
        for piece in pieces:
            deep = piece.stop - piece.decoded
            wanted.append(np.arange(max(piece.wanted, deep), piece.stop) - deep + at)
            at += piece.decoded
        planned.arrays["wanted"] = np.concatenate(wanted)
        logits_WV, finite_N = self.passes.run(planned)
        logits |= dict(zip(numbers, logits_WV.split([len(rows) for rows in wanted]), strict=True))
        parts = finite_N.split([piece.stop - piece.start for piece in pieces])
        finite |= {number: part.all() for number, part in zip(numbers, parts, strict=True)}

    def _decode(self, pieces: Sequence[Piece], numbers: Sequence[int], logits: dict[int, Tensor]) -> None:
        """One step of requests that decode, each with its drafts."""
        ids = [piece.job.tokens.window(piece.start, piece.stop, piece.job.drafts)[0].tolist() for piece in pieces]
        batch = Batch(
            tokens=tuple(token for line in ids for token in line), positions=tuple(piece.start for piece in pieces),
            slots=tuple(_slot(piece.job) for piece in pieces), lengths=tuple(len(line) for line in ids),
        )  # fmt: skip
        logits_NV, _ = self.model.decode(batch)
        # The buffers are written again by the next step of this shape, which may come before these are read.
        logits |= dict(zip(numbers, logits_NV.clone().split([len(line) for line in ids]), strict=True))

    @torch.inference_mode()
    def draft(self, jobs: Sequence[Job], sample: Callable[[Tensor, int], Tensor]) -> Draft:
        """A block of draft tokens behind each job's newest token. Confidence is that of the most probable drafts."""
        assert self.blocks is not None, "this engine drafts nothing"
        self._fill(jobs)
        lines = [[int(job.tokens.ids[-1]) for job in jobs], [len(job) - 2 for job in jobs], [_slot(job) for job in jobs]]
        proposed = self.blocks.proposed(*lines)
        head, embed = self.blocks.weights.markov_head, self.blocks.weights.markov_embed
        previous_R, logits, tokens = torch.tensor(lines[0], device=self.device), [], []
        for place in range(self.blocks.block):
            bias_RV = torch.nn.functional.linear(embed[previous_R], head).float()
            logits.append(proposed.base_RBV[:, place] + bias_RV)
            previous_R = sample(logits[-1], place)
            tokens.append(previous_R)
        return Draft(proposed.base_RBV, torch.stack(logits, 1), torch.stack(tokens, 1), proposed.confidence_RB)

    def _fill(self, jobs: Sequence[Job]) -> None:
        """Write the draft windows of what was computed since they were written last, as far as drafts will look back."""
        assert self.blocks is not None
        slots, positions = list[int](), list[int]()
        for job in jobs:
            assert job.span is not None
            slot, stop = _slot(job), len(job) - 1
            admitted, filled = self._filled.get(slot, (0, 0))
            first = filled if admitted == job.admitted else job.span.decode_from
            for position in range(max(first, stop - self.config.plan.window), stop):
                slots.append(slot)
                positions.append(position)
            self._filled[slot] = (job.admitted, stop)
        self.blocks.fill(slots, positions)


def graph_needs(config: ModelConfig, engine: EngineConfig) -> dict[str, int]:
    """Device bytes of what an engine's steps and passes may capture, by name."""
    most = min(engine.max_running, BUCKETS[-1])
    requests = [bucket for number, bucket in enumerate(BUCKETS) if not number or BUCKETS[number - 1] < most]
    cost_rows = max(engine.step_cost, engine.mixed_cost) + spare_rows(RUNS[-1])
    widest = next((rows for rows in ROWS if rows >= cost_rows), ROWS[-1])
    return cost.graph_bytes(
        config, requests=requests, rows=1 + engine.drafts(config), passes=MOST_GRAPHS, widest=widest, ends=RUNS[-1]
    )


def _slot(job: Job) -> int:
    assert job.slot is not None, "only admitted jobs have pieces"
    return job.slot


def _prompt_piece(piece: Piece) -> passes.Piece:
    assert piece.job.span is not None, "a prefill has a plan"
    prompt = passes.Prompt.replayed(_slot(piece.job), piece.job.tokens.ids, piece.job.span)
    return passes.Piece(prompt=prompt, start=piece.start, stop=piece.stop)


def card_tables(model: Transformer, device: torch.device) -> dict[int, StoredRows]:
    """A model's Engram tables as stored, pinned on the host so that kernels read them. ValueError for tables left in files."""
    tables = {}
    for layer in model.config.engram_layer_ids:
        block = model.layers[layer]
        assert isinstance(block, Block) and block.engram is not None
        reader = block.engram.reader
        if isinstance(reader, EngramTable):
            codes, scales = reader.codes, reader.scales
        elif isinstance(reader, TableInMemory):
            codes, scales = (part.view(torch.uint8) for part in quantise_fp8_rows(reader.values_RX.float()))
        else:
            raise ValueError(f"Engram tables are read row by row from files ({type(reader).__name__}); load them whole")
        # A copy: a mapped file that shrinks must not be read by kernels.
        whole = codes.cpu().contiguous().clone(), scales.cpu().contiguous().clone()
        tables[layer] = StoredRows(*(part.pin_memory() for part in whole)) if device.type == "cuda" else StoredRows(*whole)
    return tables
