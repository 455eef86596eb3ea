"""nano, 16 streams at once through paged memory at 4K of context on the CPU, against one stream of the foundation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases import Benchmark, Case, Options, TimedCase, WrongResult
from benchmarks.nano_model import gate, nano, twin, weights_label
from kvist.cache.paged_memory import PagedMemory
from kvist.engine.session import Sequence, Session

STREAMS = 16
STEPS = 16


def _prompts(context: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(64, nano("cpu").config.vocab_size, (context,), generator=random) for _ in range(STREAMS)]


def paged_session(prompts: list[torch.Tensor], room: int) -> tuple[Session, list[Sequence]]:
    """A session on paged memory that has read all prompts, with pages for `room` more tokens each."""
    model = nano("cpu")
    size = model.plan.page_tokens
    each = -(-(len(prompts[0]) + room) // size)
    memory = PagedMemory(model.config, model.numerics, pages=each * len(prompts), slots=len(prompts), verify_rows=6)
    session = Session(model, memory=memory)
    sequences = [Sequence(slot, prompt) for slot, prompt in enumerate(prompts)]
    for sequence in sequences:
        memory.open(sequence.slot, range(each * sequence.slot, each * (sequence.slot + 1)), 0)
        session.prefill([sequence])
    return session, sequences


def _decode(session: Session, sequences: list[Sequence], steps: int) -> torch.Tensor:
    logits = []
    for step in range(steps):
        for sequence in sequences:
            sequence.append(100 + step)
        logits.append(session.decode(sequences))
    return torch.stack(logits)


def _build(options: Options) -> Iterator[Case]:
    gate()
    context = 512 if options.quick else 4096
    prompts = _prompts(context)
    session, sequences = paged_session(prompts, room=STEPS * (options.rounds + 8) * 2)
    alone = Session(nano("cpu"))
    sequence = Sequence(0, prompts[3])
    alone.prefill([sequence])

    def one(steps: int) -> torch.Tensor:
        """The lone stream from its prompt on, each time anew."""
        copy, ids = twin(alone, sequence, "cpu")
        return _decode(copy, [ids], steps)

    batch, single = _decode(session, sequences, 4)[:, 3], one(4)[:, 0]
    if not torch.equal(batch, single):
        raise WrongResult(f"stream 3 of the batch differs from itself alone by {float((batch - single).abs().max())}")
    yield TimedCase(
        name=f"{STREAMS} streams, {context}, {weights_label()}",
        variants={
            f"{STREAMS} at once, pages": lambda: _decode(session, sequences, STEPS),
            "one, dense memory": lambda: one(STREAMS * STEPS),
        },
        subject=f"{STREAMS} at once, pages",
        check=lambda: None,
        work=STREAMS * STEPS,
        unit="tokens/s",
    )


BENCHMARK = Benchmark(
    name="nano-decode-b16",
    summary="nano on the CPU: 16 streams through pages against one stream, decode at 4K, tokens a second",
    build=_build,
)
