"""One step on the model: encoder half over all rows, the decoder source's rows, decoder half over the rows that need it.

Owns the ragged forward of the causal encoder-decoder split (report 2.2) and of drafting. A prompt's rows run the decoder
half only from their `decode_from` on, in the same step as their encoder rows, so nothing is kept between steps but the
memory. Must not know scheduling, sampling rules or pages' owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.checkpoint import expert_store
from kvist.checkpoint.engram_store import StoredTable
from kvist.checkpoint.reads import ReadFailed
from kvist.engine.batch import BatchBuilder, FeatureCache
from kvist.engine.draft_windows import DraftWindows
from kvist.engine.request import Job
from kvist.engine.scheduler import Piece
from kvist.kernels.native import one_torch_thread
from kvist.model.block import Block
from kvist.model.dspark import Draft
from kvist.model.memory import Shared
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Flow, Transformer


class StepResult(NamedTuple):
    """float32 logits [W,V] of the wanted rows, piece by piece; rows wanted a piece; whether each piece's rows are finite."""

    logits_WV: Tensor
    counts: list[int]
    finite: list[bool]


class Runner:
    """A model on a paged memory. `rows` and `tail_rows` count what has run: encoder rows, decoder rows."""

    def __init__(self, model: Transformer, memory: PagedMemory, *, feature_bytes: int) -> None:
        self.model, self.memory, self.plan = model, memory, model.plan
        self.device = model.embed.weight.device
        model.numerics.check_device(self.device)
        self.features = FeatureCache(feature_bytes)
        self.batch = BatchBuilder(model, self.features, self.device)
        self.layers, self.split = len(self.plan.layers), self.plan.decoder_start
        self.rows = self.tail_rows = 0
        # An expert that cannot be read then costs the rows that chose it, which become NaN, not the whole step.
        self.experts = expert_store(model)
        self.unread: ReadFailed | None = None
        if self.experts is not None:
            self.experts.isolate = True
        blocks = (model.layers[layer] for layer in model.config.engram_layer_ids)
        self.readers = [block.engram.reader for block in blocks if isinstance(block, Block) and block.engram is not None]
        self.windows = None if model.mtp is None else DraftWindows(model.mtp, memory, self.plan.window)
        low = [layer for layer in model.targets if layer < self.split]
        if low and self.split < self.layers:
            raise ValueError(f"draft blocks read layers {low} of the encoder half; the decoder half starts at {self.split}")

    def guard(self) -> AbstractContextManager[object]:
        """Where operators are native, torch's own threads stay out of their way; a card is the current one in any thread."""
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return one_torch_thread() if self.model.numerics.product_impl == "cpu" else nullcontext()

    @torch.inference_mode()
    def check(self, pieces: Sequence[Piece]) -> dict[int, Exception]:
        """What a pass would need from outside and cannot get, by piece: images that fail, table rows that cannot be read.

        Read before the pass, so that a failure is that request's only and no ring has been touched.
        """
        failed: dict[int, Exception] = {}
        self.batch.forget()
        for number, piece in enumerate(pieces):
            try:
                self.batch.fetch(piece)
            except Exception as error:  # noqa: BLE001  # handed to the request whose image it is
                failed[number] = error
        tables = [(place, reader) for place, reader in enumerate(self.readers) if isinstance(reader, StoredTable)]
        if not tables:
            return failed
        sound = [number for number in range(len(pieces)) if number not in failed]
        if sound and self._read(tables, [pieces[number] for number in sound]) is not None:
            for number in sound:
                if (unread := self._read(tables, [pieces[number]])) is not None:
                    failed[number] = unread
        return failed

    def _read(self, tables: list[tuple[int, StoredTable]], pieces: Sequence[Piece]) -> ReadFailed | None:
        engram_LNX = self.batch.engram(pieces)
        assert engram_LNX is not None
        try:
            for place, reader in tables:
                reader.rows(engram_LNX[place])
        except ReadFailed as error:
            return error
        return None

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> StepResult:
        """Run all pieces in one ragged pass. One segment a request; draft windows are filled from decoder rows.

        `unread` is then the first error of reading an expert in this pass, if there was any: what made rows not finite.
        """
        if self.experts is not None:
            self.experts.take_failures()  # of drafts, which cost nobody a reply
        result = self._run(pieces)
        failures = [] if self.experts is None else self.experts.take_failures()
        self.unread = failures[0] if failures else None
        return result

    def _run(self, pieces: Sequence[Piece]) -> StepResult:
        with self.guard():
            rows = self.batch.rows(pieces)
            flow = self.model.begin(rows)
            self.rows += len(rows.token_ids_N)
            deep = [piece.decoded for piece in pieces]
            self.tail_rows += sum(deep)
            if sum(deep) == len(rows.token_ids_N) or self.split == self.layers:
                upper, flow = rows, self.model.run(flow, rows, self.memory, 0, self.layers)
                finite_N = flow.x_NSD.isfinite().flatten(1).all(1)
                starts = [segment.start for segment in rows.segments]
            else:
                flow = self.model.run(flow, rows, self.memory, 0, self.split)
                self.model.publish(flow, rows, self.memory)
                finite_N = flow.x_NSD.isfinite().flatten(1).all(1)
                upper, flow, starts = self._upper(pieces, rows, flow, deep)
            if self.windows is not None and flow.targets:
                self.windows.saw(flow.targets, upper, pieces)
            finite = [bool(finite_N[segment.rows].all()) for segment in rows.segments]
            return self._logits(pieces, flow, starts, finite)

    def _upper(self, pieces: Sequence[Piece], rows: Rows, flow: Flow, deep: Sequence[int]) -> tuple[Rows, Flow, list[int]]:
        """The decoder half on the last `deep` rows of each piece; where each piece's rows start in its result."""
        picked, segments, starts, at = [], [], [], 0
        for segment, count in zip(rows.segments, deep, strict=True):
            starts.append(at - (segment.length - count))
            if not count:
                continue
            first = segment.start + segment.length - count
            picked.append(torch.arange(first, first + count))
            position = segment.position + segment.length - count
            segments.append(Segment(slot=segment.slot, start=at, length=count, position=position, publish_from=position))
            at += count
        if not picked:
            empty = rows.token_ids_N[:0]
            return rows.pick(empty, ()), Flow(flow.x_NSD[empty], flow.pre_NS[empty], Shared()), starts
        index_n = torch.cat(picked).to(self.device)
        upper = rows.pick(index_n, tuple(segments), engram=any(k >= self.split for k in self.model.config.engram_layer_ids))
        start = Flow(flow.x_NSD[index_n], flow.pre_NS[index_n], Shared())
        return upper, self.model.run(start, upper, self.memory, self.split, self.layers, publish=False), starts

    def _logits(self, pieces: Sequence[Piece], flow: Flow, starts: Sequence[int], finite: list[bool]) -> StepResult:
        counts = [piece.stop - piece.wanted for piece in pieces]
        index = [
            torch.arange(start + piece.wanted - piece.start, start + piece.stop - piece.start)
            for piece, start in zip(pieces, starts, strict=True)
        ]
        index_W = torch.cat(index).to(self.device)
        if not len(index_W):
            return StepResult(flow.x_NSD.new_zeros(0, self.model.config.vocab_size, dtype=torch.float32), counts, finite)
        wanted = flow._replace(x_NSD=flow.x_NSD[index_W], pre_NS=flow.pre_NS[index_W])
        return StepResult(self.model.logits(wanted), counts, finite)

    @torch.inference_mode()
    def draft(self, jobs: Sequence[Job], sample: Callable[[Tensor, int], Tensor]) -> Draft:
        """A block of draft tokens behind each job's newest token; the job's positions before it are computed."""
        assert self.model.mtp is not None, "this model has no draft blocks"
        first_R = torch.tensor([int(job.tokens.ids[-1]) for job in jobs], device=self.device)
        positions_R = torch.tensor([len(job) - 2 for job in jobs])
        slots = [job.slot for job in jobs if job.slot is not None]
        assert self.windows is not None
        with self.guard():
            self.windows.fill()
            return self.model.mtp(first_R, positions_R, slots, self.memory, self.model.embed, self.model.head, sample)
