"""Prefill and replay on a card against the reference model: chunk by chunk, each layer on the reference's own inputs, then whole.

A gate before anything is timed, and a test; decode goes on from what it leaves (`check.py`). Must not know timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.engine.card.brought import Half, OnCard
from kvist.engine.card.check import Beside
from kvist.engine.card.passes import Ints, Piece, Prompt, cut, plan_pass
from kvist.engine.card.prefill import Flow as CardFlow
from kvist.engine.card.prefill import Prefill
from kvist.engine.replay import replay_span
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import leave_gpu
from kvist.model.memory import Shared
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Flow


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """How far the card is off: `layers`, the worst row of each layer and chunk, relative to the layer's change of the streams;
    `errors` of each prompt's logits after all layers; `agree`: whether the best id is the reference's."""

    layers: tuple[float, ...]
    errors: tuple[float, ...]
    agree: tuple[bool, ...]


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

    def _prefill(self) -> None:
        """Requests start empty."""

    def cold(self, totals: Sequence[int]) -> list[Prompt]:
        """Prompts of the first tokens of each request, nothing cached."""
        return [self._replayed(slot, total, 0) for slot, total in enumerate(totals)]

    def hits(self, totals: Sequence[int], hits: Sequence[int]) -> list[Prompt]:
        """The same with the first tokens' pages kept and all windows forgotten."""
        for slot, hit in enumerate(hits):
            theirs, mine = (rows.table[slot, : rows.held[slot]].tolist() for rows in (self.memory.rows, self.state.rows))
            self.memory.open(slot, theirs, hit)
            self.state.open(slot, mine)
        return [self._replayed(slot, total, hit) for slot, (total, hit) in enumerate(zip(totals, hits, strict=True))]

    def resumed(self, totals: Sequence[int], hits: Sequence[int]) -> list[Prompt]:
        """Prompts whose windows before `hits` lie in the rings of both."""
        window, pairs = self.config.plan.window, zip(totals, hits, strict=True)
        return [Prompt.resumed(slot, self._ids(slot, total), hit, window) for slot, (total, hit) in enumerate(pairs)]

    def _replayed(self, slot: int, total: int, hit: int) -> Prompt:
        return Prompt.replayed(slot, self._ids(slot, total), replay_span(self.config.plan, total, hit, "bounded"))

    @torch.inference_mode()
    def compare(self, prompts: Sequence[Prompt]) -> Prefilled:
        """Run prompts whole, then again pass by pass beside the reference; the latter is what the state keeps."""
        with self._undone():
            got_RV, best_R = self.prefill.run(prompts)
            got_RV, best_R = got_RV.clone(), best_R.clone()
        layers: list[float] = []
        want: dict[int, Tensor] = {}
        for pieces in cut(prompts, self.prefill.chunk):
            planned = plan_pass(pieces, self.prefill.bringer.sizes)
            here = self.prefill.bringer.derive(planned, self.prefill.bringer.send(planned))
            off, ended = self._pass(pieces, here)
            layers += off
            want |= ended
        want_RV = torch.stack([want[prompt.slot] for prompt in prompts])
        errors = (got_RV - want_RV).norm(dim=1) / want_RV.norm(dim=1)
        agree = best_R == want_RV.argmax(1)
        return Prefilled(layers=tuple(layers), errors=tuple(errors.tolist()), agree=tuple(agree.tolist()))

    def _pass(self, pieces: Sequence[Piece], here: OnCard) -> tuple[list[float], dict[int, Tensor]]:
        """One pass in both: each layer's error, and the reference's logits of prompts that end."""
        rows, split, off = self._piece_rows(pieces), self.config.plan.decoder_start, list[float]()
        flow = self.model.begin(rows)
        for layer in range(split):
            before, flow = flow, self.model.run(flow, rows, self.memory, layer, layer + 1)
            off.append(self._layer(layer, here, here.encoder, before, flow))
        self.model.publish(flow, rows, self.memory)
        given, deep = self._given_flow(flow), here.deep
        upper = rows.pick(deep, self._deep_segments(pieces), engram=True)
        flow = Flow(flow.x_NSD[deep], flow.pre_NS[deep], Shared())
        got = self.prefill.cross(here, given)
        if not len(deep):
            return off, {}
        for layer in range(split, len(self.model.layers)):
            before, flow = flow, self.model.run(flow, upper, self.memory, layer, layer + 1, publish=layer != split)
            if layer == split:
                off.append(self._off(before, flow, self._left(got)))
            else:
                off.append(self._layer(layer, here, here.decoder, before, flow))
        ended = [piece.prompt.slot for piece in pieces if piece.stop == piece.prompt.span.total]
        wanted = flow._replace(x_NSD=flow.x_NSD[here.wanted], pre_NS=flow.pre_NS[here.wanted])
        return off, dict(zip(ended, self.model.logits(wanted), strict=True))

    def _layer(self, layer: int, here: OnCard, half: Half, before: Flow, after: Flow) -> float:
        got = self.prefill.layer(self.prefill.weights.layers[layer], here, half, self._given_flow(before))
        return self._off(before, after, self._left(got))

    @staticmethod
    def _left(flow: CardFlow) -> Tensor:
        assert flow.y_ND is not None
        return leave_gpu(flow.y_ND, flow.x_NSD, flow.mix)

    def _given_flow(self, flow: Flow) -> CardFlow:
        x_NSD, pre_NS, chosen = self._given(flow)
        # Engram adds to streams in place.
        return CardFlow(x_NSD=x_NSD.clone(), mix=Mix(pre_NS, pre_NS, pre_NS), y_ND=None, chosen=chosen)

    def _ids(self, slot: int, total: int) -> Ints:
        ids: Ints = self.ids[slot][:total].numpy()
        return ids

    def _piece_rows(self, pieces: Sequence[Piece]) -> Rows:
        segments, at = [], 0
        for piece in pieces:
            count, hit = piece.stop - piece.start, piece.prompt.span.hit
            segments.append(
                Segment(slot=piece.prompt.slot, start=at, length=count, position=piece.start, publish_from=min(hit, piece.stop))
            )
            at += count
        ids_N = torch.cat([self.ids[piece.prompt.slot][piece.start : piece.stop] for piece in pieces]).to(self.device)
        positions_N = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]).to(self.device)
        engram = None
        if self.config.engram_layer_ids:
            every = [
                self.model.engram_ids(
                    self.ids[piece.prompt.slot][: piece.stop].to(self.device),
                    torch.ones(piece.stop, dtype=torch.bool, device=self.device),
                    piece.start,
                )
                for piece in pieces
            ]
            engram = torch.cat([one for one in every if one is not None], 1)
        text_N = torch.ones(len(ids_N), dtype=torch.bool, device=self.device)
        return Rows(token_ids_N=ids_N, positions_N=positions_N, text_N=text_N, segments=tuple(segments), engram_LNX=engram)

    def _deep_segments(self, pieces: Sequence[Piece]) -> tuple[Segment, ...]:
        segments, at = [], 0
        for piece in pieces:
            count = piece.stop - piece.deep
            if count:
                segments.append(
                    Segment(slot=piece.prompt.slot, start=at, length=count, position=piece.deep, publish_from=piece.deep)
                )
                at += count
        return tuple(segments)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What happens inside leaves no trace in the card's state."""
        state = self.state
        parts = (state.rows.bytes_PB, state.codes, state.scales, state.history, state.targets, *state.tails.values())
        kept = [part.clone() for part in parts]
        yield
        for part, copy in zip(parts, kept, strict=True):
            part.copy_(copy)
