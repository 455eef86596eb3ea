"""A request alone, as `kvist generate` runs it: on pages of its own where native code runs layers, the dense memory's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.checkpoint import build_model, locate
from kvist.config import replace
from kvist.engine import session as session_module
from kvist.engine.errors import RequestTooLong
from kvist.engine.generate import Finished, GenerateParams, TextDelta, stream
from kvist.engine.sampler import SamplingParams
from kvist.engine.session import Session
from kvist.engine.terminal import book_text
from kvist.kernels.native import native_or_none
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset
from kvist.text.tokenizer import Tokenizer
from tests.equivalence.conftest import toy
from tests.equivalence.test_chain import PROMPT, run
from tests.kernels.test_native_layer import counted

compiled = pytest.mark.skipif(native_or_none() is None, reason="no C compiler: no native code runs layers")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def nano() -> Transformer:
    return build_model(locate("nano"), numerics=Numerics(impl="cpu"))


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_it_is_bit_equal_to_the_full_forward(seed: int, prompt: Tensor, chunk: int) -> None:
    model = toy(seed, True)
    full = Session(model, chunk=10_000).score(prompt)
    own = Session(model, replay="exact", chunk=chunk).alone(len(prompt))
    assert torch.equal(run(own, prompt, PROMPT), full[PROMPT - 1 :])


def test_bounded_replay_gives_the_dense_memorys_bits(seed: int, prompt: Tensor) -> None:
    model = toy(seed, True)
    session = Session(model, chunk=16)
    assert torch.equal(run(session.alone(len(prompt)), prompt, PROMPT), run(session, prompt, PROMPT))


@compiled
def test_pages_serve_float32_on_native_operators_only() -> None:
    config = preset("tiny")
    for numerics, pages in (
        (Numerics(impl="cpu"), True),
        (Numerics(impl="cpu", deterministic=True), True),
        (Numerics(), False),
        (Numerics(deterministic=True), False),
        (Numerics(impl="cpu", dtype=torch.bfloat16), False),
        (Numerics(impl="cpu", quantise=False), False),
    ):
        memory = Session(random_model(config, numerics, 3)).alone(20).memory
        assert type(memory) is (PagedMemory if pages else DenseMemory), numerics


@compiled
@pytest.mark.parametrize("length", [1, 127, 128, 700])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_replies_of_nano_are_the_dense_memorys(
    nano: Transformer, monkeypatch: pytest.MonkeyPatch, length: int, temperature: float
) -> None:
    """Prompts that end inside a page, with one and behind a chunk; text and tokens, and every layer in native calls."""
    tokenizer = Tokenizer(locate("nano"))
    ids = [nano.config.bos_token_id, *tokenizer.encode(book_text()[:6000])][:length]
    sampling = SamplingParams(temperature=temperature, seed=5)
    params = GenerateParams(max_tokens=NEW_TOKENS, sampling=sampling, ignore_end=True)
    session = Session(nano)
    with counted("kvist_layers") as layers:
        paged = list(stream(session, tokenizer, ids, params))
    assert layers[0] >= NEW_TOKENS, "layers were not run by native calls"
    monkeypatch.setattr(session_module, "takes_native", lambda numerics, device: False)
    with counted("kvist_layers") as layers:
        dense = list(stream(session, tokenizer, ids, params))
    assert layers[0] == 0
    texts = [[event.text for event in events if isinstance(event, TextDelta)] for events in (paged, dense)]
    assert texts[0] == texts[1]
    ends = [event.new_ids for events in (paged, dense) for event in events if isinstance(event, Finished)]
    assert len(ends[0]) == NEW_TOKENS
    assert ends[0] == ends[1]


@compiled
def test_requests_at_once_do_not_meet(nano: Transformer) -> None:
    """Two streams of one session, taken in turn, say what each says alone; the session's own memory stays empty."""
    tokenizer, session = Tokenizer(locate("nano")), Session(nano)
    params = GenerateParams(max_tokens=12, ignore_end=True)
    prompts = [tokenizer.encode(text) for text in ("It was a", "She had been")]
    alone = [[*stream(session, tokenizer, ids, params)] for ids in prompts]
    first, second = (stream(session, tokenizer, ids, params) for ids in prompts)
    taken: list[list[object]] = [[], []]
    for one, other in zip(first, second, strict=False):
        taken[0].append(one)
        taken[1].append(other)
    for events, expected in zip(taken, alone, strict=True):
        shown = [event.text for event in events if isinstance(event, TextDelta)]
        assert shown
        assert shown == [event.text for event in expected if isinstance(event, TextDelta)][: len(shown)]
    assert isinstance(session.memory, DenseMemory)
    assert not session.memory.slots


def test_a_request_that_cannot_run_takes_no_memory(nano: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Session, tokens: int) -> Session:
        raise AssertionError(f"memory for {tokens} tokens was asked for")

    monkeypatch.setattr(Session, "alone", refuse)
    with pytest.raises(RequestTooLong, match="exceed the context"):
        next(stream(Session(nano), Tokenizer(locate("nano")), [5, 6], GenerateParams(max_tokens=10**12)))


@compiled
def test_a_context_beyond_any_memory_costs_nothing_until_it_is_asked_for() -> None:
    model = random_model(replace(preset("tiny"), max_seq_len=2**40), Numerics(impl="cpu"), 3)
    session = Session(model)
    assert isinstance(session.alone(300).memory, PagedMemory)
    with pytest.raises(RequestTooLong, match=r"pages for 1000000000000 tokens take [\d,]+ bytes"):
        session.alone(10**12)
