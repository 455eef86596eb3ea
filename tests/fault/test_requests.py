"""What a request can do wrong: each gets its named error before any work, and the session goes on unharmed."""

from __future__ import annotations

import pytest
import torch

from kvist.engine.errors import EmptyPrompt, NonFiniteLogits, RequestTooLong
from kvist.engine.sampler import SamplingParams, sample
from kvist.engine.session import ImageSpan, Sequence, Session
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.presets import preset
from tests.equivalence.conftest import toy


@pytest.fixture
def session() -> Session:
    return Session(toy(0, False))


@pytest.mark.parametrize("bad", [-1, 256, 2**31 - 1])
def test_token_ids_outside_the_vocabulary(session: Session, bad: int) -> None:
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary 0..255"):
        session.prefill([Sequence(0, torch.tensor([5, bad, 7]))])
    assert not session.memory.slots
    assert bool(torch.isfinite(session.prefill([Sequence(0, torch.tensor([5, 6, 7]))])).all())


def test_a_bad_request_does_not_touch_its_neighbours(session: Session) -> None:
    good = Sequence(0, torch.tensor([5, 6, 7]))
    with pytest.raises(ValueError, match="token id 999"):
        session.prefill([good, Sequence(1, torch.tensor([999]))])
    assert good.computed == 0 and not session.memory.slots


def test_empty_prompt(session: Session) -> None:
    with pytest.raises(EmptyPrompt, match="at least one"):
        session.prefill([Sequence(0, torch.tensor([], dtype=torch.int64))])
    with pytest.raises(EmptyPrompt):
        session.score(torch.tensor([], dtype=torch.int64))


def test_prompt_longer_than_the_context(session: Session) -> None:
    limit = session.model.config.max_seq_len
    with pytest.raises(RequestTooLong, match=f"exceed the context of {limit}"):
        session.check(Sequence(0, torch.full((limit - 1,), 5)), 2)
    with pytest.raises(RequestTooLong):
        session.prefill([Sequence(0, torch.full((limit + 1,), 5))])


def test_image_span_outside_the_prompt() -> None:
    with pytest.raises(ValueError, match="lies outside the prompt of 5 tokens"):
        Sequence(0, torch.arange(5), (ImageSpan(start=3, embeddings_SD=torch.zeros(4, 64)),))


@pytest.mark.parametrize("options", [{"replay": "window"}, {"chunk": 0}])
def test_session_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"replay must be|chunk must be"):
        Session(toy(0, False), **options)


def test_packed_memory_needs_quantisers() -> None:
    with pytest.raises(ValueError, match="quantised bytes only"):
        DenseMemory(preset("tiny"), Numerics(quantise=False), packed=True)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_logits_end_the_request(poison: float) -> None:
    logits = torch.zeros(16)
    logits[3] = poison
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogits, match="position 9"):
            sample(logits, SamplingParams(temperature=temperature), 9)


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"seed": -1}],
)
def test_sampling_parameters(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingParams(**options)  # type: ignore[arg-type]
