"""Prefill and replay on a card against the reference model: pass by pass, each layer on the reference's own inputs, then whole.

A gate before anything is timed, and a test; decode goes on from what it leaves (`check.py`). Must not know timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvist.cache.paged_memory import PagedMemory
from kvist.config import ModelConfig
from kvist.engine.card.brought import Half, OnCard
from kvist.engine.card.check import Beside, ExactScores
from kvist.engine.card.passes import Ints, Pass, Piece, Prompt, cut, plan_pass
from kvist.engine.card.prefill import Flow as CardFlow
from kvist.engine.card.prefill import Prefill
from kvist.engine.replay import replay_span
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import leave_gpu
from kvist.model.block import Block
from kvist.model.initialise import random_model
from kvist.model.memory import Shared
from kvist.model.moe import MoE
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Flow, Transformer

TIE = 0.01
"""A router that prefers an expert to the next one by less may choose the other where sums are ordered otherwise."""


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """How far the card is off, row by row.

    `off`: of each layer and pass, relative to that layer's change of the streams, given the reference's own inputs; `margin`: by
    how much the reference's router prefers the row's last expert to the next one (biased scores). `errors`: of the logits of all
    decoder rows after all layers, relative; `spread`: by how much the reference itself moves there when its sums are
    bfloat16's; `agree`: rows whose best id is the reference's.
    """

    off: Tensor
    margin: Tensor
    errors: Tensor
    spread: Tensor
    agree: int

    @property
    def settled(self) -> float:
        """The worst row of a layer whose experts are no near tie."""
        return float(self.off[self.margin > TIE].max())

    def faults(self) -> str:
        """What lies beyond the bounds, in words; nothing if all is well.

        A row is typically off by a rounding that falls the other way; one with other experts is another row altogether, and
        must be explained by a near tie. Logits carry all layers of both: they may move twice as far as the reference's own.
        """
        typical, moved, own = (float(part.median()) for part in (self.off, self.errors, self.spread))
        ties = float((self.margin <= TIE).float().mean())
        found = [
            f"{name} {value:.4f}, at most {most:.4f}"
            for name, value, most in (
                ("the typical row of a layer is off by", typical, 0.03),
                ("a row without a near tie is off by", self.settled, 0.2),
                ("the share of near ties is", ties, 0.15),
                ("logits typically move by", moved, max(0.1, 2 * own)),
            )
            if not value <= most
        ]
        return "; ".join(found)

    def __str__(self) -> str:
        return (
            f"rows off by {float(self.off.median()):.4f} (median), {self.settled:.4f} (worst without a near tie), "
            f"{float(self.off.max()):.4f} (worst); logits by {float(self.errors.median()):.4f} (median, the reference itself "
            f"{float(self.spread.median()):.4f}); {self.agree} of {len(self.errors)} best ids agree"
        )


class Reference:
    """A model over paged memory that runs passes as the engine does: encoder half, decoder source, decoder half."""

    def __init__(self, model: Transformer, memory: PagedMemory, ids: Sequence[Tensor], device: torch.device) -> None:
        self.model, self.memory, self.ids, self.device = model, memory, ids, device
        self.crossed: Flow | None = None

    def layers(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Flow, Flow]]:
        """Each layer with what goes in and what comes out; `crossed` is what leaves the encoder half, all rows."""
        rows, split = self._rows(pieces), self.model.plan.decoder_start
        flow = self.model.begin(rows)
        for layer in range(split):
            before, flow = flow, self.model.run(flow, rows, self.memory, layer, layer + 1)
            yield layer, before, flow
        self.model.publish(flow, rows, self.memory)
        self.crossed = flow
        deep, segments = self._deep(pieces)
        if not segments:
            return
        upper = rows.pick(deep, segments, engram=True)
        flow = Flow(flow.x_NSD[deep], flow.pre_NS[deep], Shared())
        for layer in range(split, len(self.model.layers)):
            before, flow = flow, self.model.run(flow, upper, self.memory, layer, layer + 1, publish=layer != split)
            yield layer, before, flow

    def _rows(self, pieces: Sequence[Piece]) -> Rows:
        segments, at, engram = [], 0, []
        for piece in pieces:
            slot, count = piece.prompt.slot, piece.stop - piece.start
            publish = min(piece.prompt.span.hit, piece.stop)
            segments.append(Segment(slot=slot, start=at, length=count, position=piece.start, publish_from=publish))
            at += count
            text_T = torch.ones(piece.stop, dtype=torch.bool, device=self.device)
            found = self.model.engram_ids(self.ids[slot][: piece.stop].to(self.device), text_T, piece.start)
            engram += [] if found is None else [found]
        ids_N = torch.cat([self.ids[piece.prompt.slot][piece.start : piece.stop] for piece in pieces]).to(self.device)
        positions_N = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]).to(self.device)
        return Rows(
            token_ids_N=ids_N, positions_N=positions_N, text_N=torch.ones(at, dtype=torch.bool, device=self.device),
            segments=tuple(segments), engram_LNX=torch.cat(engram, 1) if engram else None,
        )  # fmt: skip

    def _deep(self, pieces: Sequence[Piece]) -> tuple[Tensor, tuple[Segment, ...]]:
        """Rows of the decoder half, and their segments."""
        segments, picked, at, first = [], [], 0, 0
        for piece in pieces:
            count = piece.stop - piece.deep
            if count:
                picked.append(torch.arange(piece.deep - piece.start, piece.stop - piece.start) + first)
                slot = piece.prompt.slot
                segments.append(Segment(slot=slot, start=at, length=count, position=piece.deep, publish_from=piece.deep))
            at, first = at + count, first + piece.stop - piece.start
        return (torch.cat(picked) if picked else torch.zeros(0, dtype=torch.int64)).to(self.device), tuple(segments)


class PrefillBeside(Beside):
    """As `Beside`, but nothing is taken over: the card computes `contexts` tokens of each request itself, `chunk` rows a pass."""

    def __init__(
        self,
        config: ModelConfig,
        contexts: tuple[int, ...],
        steps: int = 0,
        *,
        chunk: int,
        page_tokens: int | None,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        super().__init__(config, contexts, steps, page_tokens=page_tokens, device=device, seed=seed)
        self.prefill = Prefill(self.card, chunk=chunk)
        self.reference = Reference(self.model, self.memory, self.ids, device)
        self.other = Reference(*self._other(seed), self.ids, device)
        self._routed: list[Tensor] = []
        for block in self.model.layers:
            assert isinstance(block, Block)
            block.ffn.register_forward_pre_hook(self._watch)

    def _other(self, seed: int) -> tuple[Transformer, PagedMemory]:
        """The same model with sums in bfloat16, and a memory of its own."""
        numerics = Numerics(dtype=torch.bfloat16, whole_peaks=True)
        model = random_model(self.config, numerics, seed).to(self.device)
        if self.model.token_classes_V is not None:
            readers = {layer: self._engram(layer).reader for layer in self.config.engram_layer_ids}
            model.attach_engram(self.model.token_classes_V, {at: one for at, one in readers.items() if one is not None})
        rows = self.memory.rows
        memory = ExactScores(
            self.config, numerics, pages=len(rows.bytes_PB), slots=len(self.contexts), verify_rows=1,
            page_tokens=self.memory.layout.page_tokens, device=self.device,
        )  # fmt: skip
        for slot in range(len(self.contexts)):
            memory.open(slot, rows.table[slot, : rows.held[slot]].tolist(), 0)
        return model, memory

    def _watch(self, moe: nn.Module, given: tuple[Tensor, ...]) -> None:
        """The margin of each row's last expert in the reference, layer by layer."""
        assert isinstance(moe, MoE)
        ranked_NK = (moe.gate.scores(given[0]) + moe.gate.bias).topk(moe.gate.n_active + 1, 1).values
        self._routed.append(ranked_NK[:, -2] - ranked_NK[:, -1])

    def _prefill(self) -> None:
        """Requests start empty."""

    def cold(self, totals: Sequence[int]) -> list[Prompt]:
        """Prompts of the first tokens of each request, nothing cached."""
        return [self._replayed(slot, total, 0) for slot, total in enumerate(totals)]

    def hits(self, totals: Sequence[int], hits: Sequence[int]) -> list[Prompt]:
        """The same with the first tokens' pages kept and all windows forgotten."""
        for slot, hit in enumerate(hits):
            for memory in (self.memory, self.other.memory):
                memory.open(slot, memory.rows.table[slot, : memory.rows.held[slot]].tolist(), hit)
            self.state.open(slot, self.state.rows.table[slot, : self.state.rows.held[slot]].tolist())
        return [self._replayed(slot, total, hit) for slot, (total, hit) in enumerate(zip(totals, hits, strict=True))]

    def resumed(self, totals: Sequence[int], hits: Sequence[int]) -> list[Prompt]:
        """Prompts whose windows before `hits` lie in the rings of both."""
        window, pairs = self.config.plan.window, zip(totals, hits, strict=True)
        return [Prompt.resumed(slot, self._ids(slot, total), hit, window) for slot, (total, hit) in enumerate(pairs)]

    def _replayed(self, slot: int, total: int, hit: int) -> Prompt:
        return Prompt.replayed(slot, self._ids(slot, total), replay_span(self.config.plan, total, hit, "bounded"))

    def _ids(self, slot: int, total: int) -> Ints:
        ids: Ints = self.ids[slot][:total].numpy()
        return ids

    @torch.inference_mode()
    def compare(self, prompts: Sequence[Prompt]) -> Prefilled:
        """Run prompts whole, then again pass by pass beside the reference; the latter is what the state keeps."""
        cuts = list(cut(prompts, self.prefill.chunk))
        with self._undone():
            got_MV = torch.cat([self.prefill.compute(self._brought(pieces, every=True)) for pieces in cuts])
        self._routed, off, want, other = [], list[Tensor](), list[Tensor](), list[Tensor]()
        for pieces in cuts:
            here = self._brought(pieces, every=True)
            for layer, before, after in self.reference.layers(pieces):
                off.append(self._layer(layer, here, before, after))
            *_, (_, _, theirs) = self.other.layers(pieces)
            if len(here.deep):
                want.append(self.model.logits(after))
                other.append(self.other.model.logits(theirs))
            else:
                crossed = self.reference.crossed
                assert crossed is not None
                self.prefill.cross(here, self._card_flow(crossed))
        want_MV, other_MV = torch.cat(want), torch.cat(other)
        size_M = want_MV.norm(dim=1)
        errors, spread = ((part - want_MV).norm(dim=1) / size_M for part in (got_MV, other_MV))
        agree = int((got_MV.argmax(1) == want_MV.argmax(1)).sum())
        return Prefilled(off=torch.cat(off), margin=torch.cat(self._routed), errors=errors, spread=spread, agree=agree)

    def _brought(self, pieces: Sequence[Piece], *, every: bool = False) -> OnCard:
        """A pass on the card; `every`: logits of all decoder rows are wanted."""
        planned: Pass = plan_pass(pieces, self.prefill.bringer.sizes)
        if every:
            planned.arrays["wanted"] = torch.arange(planned.rows[1]).numpy()
        return self.prefill.bringer.derive(planned, self.prefill.bringer.send(planned))

    def _layer(self, layer: int, here: OnCard, before: Flow, after: Flow) -> Tensor:
        """Each row's error of one layer."""
        split = self.prefill.split
        if layer == split:
            crossed = self.reference.crossed
            assert crossed is not None
            got = self.prefill.cross(here, self._card_flow(crossed))
        else:
            half: Half = here.encoder if layer < split else here.decoder
            got = self.prefill.layer(self.prefill.weights.layers[layer], here, half, self._card_flow(before))
        assert got.y_ND is not None
        got_NSD = leave_gpu(got.y_ND, got.x_NSD, got.mix)
        change_N = (after.x_NSD.float() - before.x_NSD.float()).flatten(1).norm(dim=1)
        return (got_NSD.float() - after.x_NSD.float()).flatten(1).norm(dim=1) / change_N

    def _card_flow(self, flow: Flow) -> CardFlow:
        x_NSD, pre_NS, chosen = self._given(flow)
        # Engram adds to streams in place.
        return CardFlow(x_NSD=x_NSD.clone(), mix=Mix(pre_NS, pre_NS, pre_NS), y_ND=None, chosen=chosen)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What happens inside leaves no trace in the card's state."""
        state = self.state
        parts = (state.rows.bytes_PB, state.codes, state.scales, state.history, state.targets, *state.tails.values())
        kept = [part.clone() for part in parts]
        yield
        for part, copy in zip(parts, kept, strict=True):
            part.copy_(copy)
