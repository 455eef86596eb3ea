"""Requests on a model and a memory: chunked prefill that stops after the encoder, decode, scoring. Tokens in, logits out.

Owns `Sequence` (one request's tokens and unfinished work) and `Session` (a model with its memory). The causal
encoder-decoder split (report 2.2): a prompt runs the encoder half and the decoder source's rows; the decoder half runs
only on the last positions, `bounded` (the window, as published) or `exact`. Must not know text, sampling or HTTP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory, takes_native
from kvist.engine.errors import EmptyPrompt, RequestTooLong
from kvist.kernels.native import one_torch_thread
from kvist.model.dspark import Draft
from kvist.model.memory import DenseMemory, RequestMemory, Shared
from kvist.model.rows import Rows, consecutive_rows
from kvist.model.transformer import Flow, Transformer
from kvist.page_layout import PageLayout

P = ParamSpec("P")
R = TypeVar("R")

REPLAY_MODES = ("bounded", "exact")


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """An image in a prompt: the position of its first token and the embeddings of its whole span [tokens, D]."""

    start: int
    embeddings_SD: Tensor


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a prefill is: prompt tokens through the encoder, prompt tokens in all, layers run on them so far."""

    done: int
    total: int


class Sequence:
    """One request: its tokens so far, which of them are text, and what of the prompt is not yet computed."""

    def __init__(self, slot: int, ids: Tensor, images: tuple[ImageSpan, ...] = ()) -> None:
        self.slot, self.images = slot, images
        self.ids_T = ids.long()
        self.text_T = torch.ones(len(ids), dtype=torch.bool)
        for image in images:
            stop = image.start + len(image.embeddings_SD)
            if not 0 <= image.start < stop <= len(ids):
                raise ValueError(f"image span {image.start}..{stop} lies outside the prompt of {len(ids)} tokens")
            self.text_T[image.start : stop] = False
        self.computed = 0
        self.tail: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.ids_T)

    def append(self, token: int) -> None:
        """Add a chosen token, to be computed by the next decode."""
        self.ids_T = torch.cat([self.ids_T, torch.tensor([token])])
        self.text_T = torch.cat([self.text_T, torch.ones(1, dtype=torch.bool)])


def _inference(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    """Run a method without gradients and, where operators are native, with torch's threads out of their way."""

    @wraps(method)
    def run(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        native = self.model.numerics.product_impl == "cpu"
        with torch.inference_mode(), one_torch_thread() if native else nullcontext():
            return method(self, *args, **kwargs)

    return run


class Session:
    """A model, a memory and a way to run requests through both.

    `replay`: `bounded` runs the decoder half on the last `window` prompt positions (as published, default), `exact` on as
    many as make every later window entry exact. `ced=False` runs all layers on the whole prompt. `chunk`: most prompt
    tokens of a request in one pass. `memory`: the dense one by default. Inference only: nothing here keeps gradients.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        memory: RequestMemory | None = None,
        replay: str = "bounded",
        chunk: int = 512,
        ced: bool = True,
    ) -> None:
        if replay not in REPLAY_MODES:
            raise ValueError(f"replay must be one of {', '.join(REPLAY_MODES)}, got {replay!r}")
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        self.model, self.plan, self.chunk, self.ced, self.replay = model, model.plan, chunk, ced, replay
        self.device = model.embed.weight.device
        model.numerics.check_device(self.device)
        self.memory: RequestMemory = memory or DenseMemory(model.config, model.numerics)
        window, layers = self.plan.window, len(self.plan.layers)
        # A draft ring holds `window` entries of the last layers' inputs, one more than the query's own window reaches.
        self.tail = window if replay == "bounded" else max(window, self.plan.exact_decoder_replay + 1)
        self.encoder_stop = self.plan.decoder_start if ced else layers

    def check(self, sequence: Sequence, new_tokens: int = 0) -> None:
        """Raise EmptyPrompt, RequestTooLong or ValueError (bad token id) before any work is done."""
        limit = self.model.config.max_seq_len
        if not len(sequence):
            raise EmptyPrompt("the prompt has no tokens; give at least one")
        if len(sequence) + new_tokens > limit:
            raise RequestTooLong(
                f"{len(sequence)} prompt tokens and {new_tokens} new ones exceed the context of {limit}; shorten one of them"
            )
        self.model.check_ids(sequence.ids_T[sequence.computed :])

    @_inference
    def prefill(self, sequences: list[Sequence], progress: Callable[[Progress], None] | None = None) -> Tensor:
        """Run prompts (ragged) in chunks; logits [R,V] after each prompt's last token."""
        for sequence in sequences:
            self.check(sequence)
        total = sum(len(s) - s.computed for s in sequences)
        done = 0
        while pending := [s for s in sequences if s.computed < len(s)]:
            done += self._encode(pending)
            if progress is not None:
                progress(Progress(done=done, total=total))
        return self._decode_tails(sequences)

    @_inference
    def decode(self, sequences: list[Sequence]) -> Tensor:
        """Run the one token each sequence has beyond what is computed, through all layers; logits [R,V]."""
        for sequence in sequences:
            assert sequence.computed == len(sequence) - 1, (sequence.computed, len(sequence))
            self.check(sequence)
        rows = self._rows(sequences, [1] * len(sequences))
        flow = self.model(rows, self.memory)
        self._observe(flow, rows)
        for sequence in sequences:
            sequence.computed += 1
        return self.model.logits(flow)

    @_inference
    def extend(self, sequence: Sequence, ids: Tensor, progress: Callable[[Progress], None] | None = None) -> Tensor:
        """Append tokens that are known already and run them through all layers, as `decode` would one by one; logits [V]."""
        if not len(ids):
            raise ValueError("extend needs at least one token")
        sequence.ids_T = torch.cat([sequence.ids_T, ids.long()])
        sequence.text_T = torch.cat([sequence.text_T, torch.ones(len(ids), dtype=torch.bool)])
        self.check(sequence)
        begun, total = sequence.computed, len(sequence)
        while sequence.computed < total:
            count = min(self.chunk, total - sequence.computed)
            rows = self._rows([sequence], [count])
            flow = self.model(rows, self.memory)
            self._observe(flow, rows)
            sequence.computed += count
            if progress is not None:
                progress(Progress(done=sequence.computed - begun, total=total - begun))
        return self.model.logits(flow._replace(x_NSD=flow.x_NSD[-1:], pre_NS=flow.pre_NS[-1:]))[0]

    @_inference
    def draft(self, sequences: list[Sequence], first_ids: list[int]) -> Draft:
        """Propose the tokens after `first_ids`, which are taken as accepted at each sequence's next position."""
        if self.model.mtp is None:
            raise ValueError("this model has no draft blocks")
        positions = torch.tensor([s.computed - 1 for s in sequences])
        slots = [s.slot for s in sequences]
        first_R = torch.tensor(first_ids, device=self.device)
        return self.model.mtp.forward(first_R, positions, slots, self.memory, self.model.embed, self.model.head)

    @_inference
    def score(self, ids: Tensor, images: tuple[ImageSpan, ...] = ()) -> Tensor:
        """Logits [T,V] of every position: all layers on all positions, equal to the full forward whatever `chunk` is."""
        with self.slot() as slot:
            sequence = Sequence(slot, ids, images)
            self.check(sequence)
            parts = []
            while sequence.computed < len(sequence):
                count = min(self.chunk, len(sequence) - sequence.computed)
                rows = self._rows([sequence], [count])
                parts.append(self.model.logits(self.model(rows, self.memory)))
                sequence.computed += count
            return torch.cat(parts)

    @contextmanager
    def slot(self) -> Iterator[int]:
        """A free slot of the dense memory, released at the end whatever happens."""
        memory = self.memory
        assert isinstance(memory, DenseMemory), "slots of pages are opened by whoever shares the pages out"
        index = max(memory.slots, default=-1) + 1
        memory.slot(index)
        try:
            yield index
        finally:
            memory.release(index)

    def alone(self, tokens: int) -> Session:
        """The same on a memory of its own for one request, slot 0, of at most `tokens` tokens; it goes with the session.

        Pages, where native code runs whole layers over them, else the dense memory: the same bits. RequestTooLong if the
        system has no memory for them.
        """
        own, config, numerics = copy.copy(self), self.model.config, self.model.numerics
        if not (numerics.quantise and takes_native(numerics, self.device)):
            own.memory = DenseMemory(config, numerics)
            return own
        pages = -(-tokens // self.plan.page_tokens)
        try:
            memory = PagedMemory(config, numerics, pages=pages, slots=1, verify_rows=1, most_tokens=tokens)
        except RuntimeError as error:
            size = pages * PageLayout.of(config).page_bytes
            raise RequestTooLong(
                f"pages for {tokens} tokens take {size:,} bytes, which the system does not give beside windows of "
                f"{config.window_size:,} positions a layer; ask for fewer new tokens"
            ) from error
        memory.open(0, range(pages), 0)
        own.memory = memory
        return own

    def _rows(self, sequences: list[Sequence], counts: list[int]) -> Rows:
        starts = [(s.slot, s.computed, s.ids_T[s.computed : s.computed + n]) for s, n in zip(sequences, counts, strict=True)]
        ids_N, positions_N, segments = consecutive_rows(starts)
        text_N = torch.cat([s.text_T[s.computed : s.computed + n] for s, n in zip(sequences, counts, strict=True)])
        features_FD, feature_rows_F = self._features(sequences, counts)
        return Rows(
            token_ids_N=ids_N.to(self.device),
            positions_N=positions_N.to(self.device),
            text_N=text_N.to(self.device),
            segments=segments,
            engram_LNX=self._engram(sequences, [(s.computed, s.computed + n) for s, n in zip(sequences, counts, strict=True)]),
            features_FD=features_FD,
            feature_rows_F=feature_rows_F,
        )

    def _engram(self, sequences: list[Sequence], ranges: list[tuple[int, int]]) -> Tensor | None:
        if not self.model.config.engram_layer_ids:
            return None
        reach = self.model.config.engram_max_ngram_size - 1
        parts = []
        for sequence, (start, stop) in zip(sequences, ranges, strict=True):
            # An n-gram reaches `reach` tokens back; a barrier is kept by starting there unless the sequence does.
            origin = max(0, start - reach)
            ids_T, text_T = (line_T[origin:stop].to(self.device) for line_T in (sequence.ids_T, sequence.text_T))
            ids = self.model.engram_ids(ids_T, text_T, start - origin)
            assert ids is not None
            parts.append(ids)
        rows = torch.cat(parts, 1)
        self.model.prefetch_engram(rows)
        return rows

    def _features(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor | None, Tensor | None]:
        values, places, at = [], [], 0
        for sequence, count in zip(sequences, counts, strict=True):
            start, stop = sequence.computed, sequence.computed + count
            for image in sequence.images:
                low, high = max(image.start, start), min(image.start + len(image.embeddings_SD), stop)
                if low < high:
                    values.append(image.embeddings_SD[low - image.start : high - image.start])
                    places.append(torch.arange(at + low - start, at + high - start))
            at += count
        return (torch.cat(values).to(self.device), torch.cat(places).to(self.device)) if values else (None, None)

    def _encode(self, sequences: list[Sequence]) -> int:
        counts = [min(self.chunk, len(s) - s.computed) for s in sequences]
        rows = self._rows(sequences, counts)
        flow = self.model.run(self.model.begin(rows), rows, self.memory, 0, self.encoder_stop)
        if self.encoder_stop == self.plan.decoder_start:
            self.model.publish(flow, rows, self.memory)
        else:
            self._observe(flow, rows)
        keep = self.tail if self.encoder_stop == self.plan.decoder_start else 1
        for sequence, segment in zip(sequences, rows.segments, strict=True):
            fresh = (flow.x_NSD[segment.rows], flow.pre_NS[segment.rows])
            if sequence.tail is not None:
                fresh = (torch.cat([sequence.tail[0], fresh[0]]), torch.cat([sequence.tail[1], fresh[1]]))
            sequence.tail = (fresh[0][-keep:], fresh[1][-keep:])
            sequence.computed += segment.length
        return sum(counts)

    def _decode_tails(self, sequences: list[Sequence]) -> Tensor:
        tails = []
        for sequence in sequences:
            assert sequence.tail is not None
            tails.append(sequence.tail)
            sequence.tail = None
        starts = [(s.slot, len(s) - len(x), s.ids_T[len(s) - len(x) :]) for s, (x, _) in zip(sequences, tails, strict=True)]
        ids_N, positions_N, segments = consecutive_rows(starts)
        late = any(layer >= self.plan.decoder_start for layer in self.model.config.engram_layer_ids)
        rows = Rows(
            token_ids_N=ids_N.to(self.device),
            positions_N=positions_N.to(self.device),
            text_N=torch.cat([s.text_T[len(s) - len(x) :] for s, (x, _) in zip(sequences, tails, strict=True)]).to(self.device),
            segments=segments,
            engram_LNX=self._engram(sequences, [(g.position, g.position + g.length) for g in segments]) if late else None,
        )
        flow = Flow(torch.cat([x for x, _ in tails]), torch.cat([pre for _, pre in tails]), Shared())
        if self.encoder_stop == self.plan.decoder_start:
            flow = self.model.run(flow, rows, self.memory, self.plan.decoder_start, len(self.plan.layers), publish=False)
            self._observe(flow, rows)
        last_R = torch.tensor([g.start + g.length - 1 for g in segments], device=self.device)
        return self.model.logits(flow._replace(x_NSD=flow.x_NSD[last_R], pre_NS=flow.pre_NS[last_R]))

    def _observe(self, flow: Flow, rows: Rows) -> None:
        if self.model.mtp is not None and flow.targets:
            self.model.mtp.observe(flow.targets, rows, self.memory)
