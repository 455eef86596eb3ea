"""nano, one stream, decode at 4K and 16K of context on the CPU: whole layers, operators, the reference; calls a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase, WrongResult
from benchmarks.nano_model import (
    count_calls,
    decode_bytes,
    decode_tokens,
    gate,
    nano,
    observe_cost,
    on_one_thread,
    prefilled,
    prompt,
    read_bandwidth,
    require_close,
    twin,
    weights_label,
)
from kvist.engine.session import Sequence, Session

TOKENS = 32


def paged(ids: torch.Tensor, tokens: int) -> tuple[Session, Sequence]:
    """A session on pages with room for `tokens` more that has read the prompt: layers run as one native call each."""
    session, sequence = Session(nano("cpu")).alone(len(ids) + tokens), Sequence(0, ids)
    session.prefill([sequence])
    return session, sequence


def _require_one_meaning(one: tuple[Session, Sequence], session: Session, sequence: Sequence) -> None:
    """Whole layers over pages give the bits of the operators one by one over dense memory. Raises `WrongResult`."""
    ours, theirs = decode_tokens(*one, 4), decode_tokens(*twin(session, sequence, "cpu"), 4)
    if not torch.equal(ours, theirs):
        raise WrongResult(f"whole layers differ from their operators by {float((ours - theirs).abs().max())}")


def _single(session: Session, sequence: Sequence, impl: str) -> torch.Tensor:
    """Logits [16,V] of 16 different next tokens, none of which sees another."""
    logits = []
    for token in range(100, 116):
        copy, ids = twin(session, sequence, impl)
        ids.append(token)
        logits.append(copy.decode([ids]))
    return torch.cat(logits)


def _build(options: Options) -> Iterator[Case]:
    gate()
    for context in (512,) if options.quick else (4096, 16384):
        session, sequence = prefilled("cpu", context)
        whole = paged(prompt(context), TOKENS * (options.rounds + 4))
        _require_one_meaning(whole, session, sequence)
        reference, reference_sequence = twin(session, sequence, "ref")

        def check(state: tuple[Session, Sequence] = (session, sequence)) -> None:
            require_close(_single(*state, "cpu"), _single(*state, "ref"), "16 tokens, each decoded from the same memory")

        moved = decode_bytes(nano("cpu"), context) + observe_cost(nano("cpu"))
        label = f"{context // 1024}K, {weights_label()}" if context >= 1024 else f"{context}, {weights_label()}"
        yield TimedCase(
            name=label,
            variants={
                "whole layers, pages": lambda o=whole: decode_tokens(o[0], o[1], TOKENS),  # type: ignore[misc]
                "operators one by one": lambda s=session, q=sequence: decode_tokens(s, q, TOKENS),  # type: ignore[misc]
                "ref, 1 thread": lambda s=reference, q=reference_sequence: on_one_thread(lambda: decode_tokens(s, q, TOKENS)),  # type: ignore[misc]
            },
            subject="whole layers, pages",
            check=check,
            work=TOKENS,
            unit="tokens/s",
            floor=read_bandwidth() / moved,
            moved_bytes=moved * TOKENS,
        )
        yield from _calls(label, *whole, reference, reference_sequence)


def _calls(label: str, session: Session, sequence: Sequence, other: Session, other_sequence: Sequence) -> Iterator[Case]:
    native, operators = count_calls(lambda: decode_tokens(session, sequence, 1))
    _, reference_operators = count_calls(lambda: decode_tokens(other, other_sequence, 1))
    yield CountedCase(
        name=f"calls a token, {label}",
        count=lambda: native + operators,
        check=lambda: None,
        unit="calls",
        better="lower",
        peers={"native calls": native, "torch calls": operators, "ref torch calls": reference_operators},
    )


BENCHMARK = Benchmark(
    name="nano-decode-b1",
    summary="nano on the CPU: one stream, tokens a second at 4K and 16K, calls a token, the weight-read limit",
    build=_build,
)
