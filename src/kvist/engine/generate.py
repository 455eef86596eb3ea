"""Text in, a stream of text out: one request on a `Session`, with progress of its prefill and a final account.

Owns the loop around sampling, stop strings and limits. Must not know HTTP or terminals. On a session, not the engine: one request
has nobody to share pages, batches or a budget with, while the engine would plan memory for a whole context before it starts and
cut a prompt by the cost of a step instead of `chunk`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvist.engine.sampler import SamplingParams, sample
from kvist.engine.session import ImageSpan, Progress, Sequence, Session
from kvist.model.transformer import Transformer
from kvist.text.stops import StopMatcher
from kvist.text.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """Text that is certain, in order."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end: why (`stop`, `length`), the stop string if one matched, tokens, and seconds of both halves."""

    reason: str
    stop: str | None
    prompt_tokens: int
    new_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float


Event = TextDelta | Finished


@dataclass(frozen=True, kw_only=True)
class GenerateParams:
    """One request's wishes. `ignore_end` goes on past the end token (benchmarks)."""

    max_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[str, ...] = ()
    ignore_end: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


class Alone(Protocol):
    """One request on a model and a memory of its own: `Session`'s calls."""

    model: Transformer

    def prefill(self, sequences: list[Sequence], progress: Callable[[Progress], None] | None = None) -> Tensor: ...
    def decode(self, sequences: list[Sequence]) -> Tensor: ...


def alone(session: Session, tokens: int) -> Alone:
    """What runs one request of at most `tokens` tokens: captured steps on a card with impl 'gpu', else `Session.alone`."""
    if session.model.numerics.impl == "gpu" and session.ced:
        from kvist.engine.card.alone import CardSession

        card = CardSession.of(session.model, tokens, replay=session.replay, chunk=session.chunk)
        if card is not None:
            return card
    return session.alone(tokens)


def stream(
    session: Session,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    params: GenerateParams,
    *,
    images: tuple[ImageSpan, ...] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Iterator[Event]:
    """Generate after `prompt_ids`, yielding text as it becomes certain and `Finished` last.

    A stop string and what follows it never come out. Raises before any work if the request cannot run.
    """
    stops = StopMatcher(params.stops)
    decoder = StreamDecoder(tokenizer, skip_control=True)
    sequence = Sequence(0, torch.tensor(prompt_ids, dtype=torch.int64), images)
    session.check(sequence, params.max_tokens)
    own = alone(session, len(prompt_ids) + params.max_tokens)
    began = time.perf_counter()
    logits = own.prefill([sequence], progress)
    prefilled = time.perf_counter()
    new_ids: list[int] = []
    reason = "length"
    while True:
        token = sample(logits[0], params.sampling, len(sequence))
        new_ids.append(token)
        if token == own.model.config.eos_token_id and not params.ignore_end:
            reason = "stop"
            break
        if text := stops.feed(decoder.feed([token])):
            yield TextDelta(text=text)
        if stops.matched is not None:
            reason = "stop"
            break
        if len(new_ids) == params.max_tokens:
            break
        sequence.append(token)
        logits = own.decode([sequence])
    ended = time.perf_counter()
    rest = stops.feed(decoder.finish()) + stops.finish()
    if rest:
        yield TextDelta(text=rest)
    yield Finished(
        reason="stop" if stops.matched is not None else reason,
        stop=stops.matched,
        prompt_tokens=len(prompt_ids),
        new_ids=tuple(new_ids),
        prefill_s=prefilled - began,
        decode_s=ended - prefilled,
    )
