"""One meaning, many paths: full forward = prefill + decode = chunks = ragged batch, to the bit in `deterministic` mode.

In the default mode the paths agree within 1e-4 up to the first position where a recorded margin is below 1e-5.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.engine.session import Sequence, Session
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from tests.equivalence.conftest import toy
from tests.equivalence.margins import MarginRecorder

PROMPT = 41
CHUNKS = (1, 2, 3, 7, 16, 128)


def run(session: Session, ids: Tensor, prompt: int) -> Tensor:
    """Logits of positions prompt-1.. of given tokens, by prefill and one-token steps."""
    sequence = Sequence(0, ids[:prompt])
    rows = [session.prefill([sequence])]
    for token in ids[prompt:].tolist():
        sequence.append(token)
        rows.append(session.decode([sequence]))
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_score_is_bit_equal_for_every_chunk(seed: int, prompt: Tensor, chunk: int) -> None:
    model = toy(seed, True)
    assert torch.equal(Session(model, chunk=chunk).score(prompt), Session(model, chunk=10_000).score(prompt))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_and_decode_are_bit_equal_to_the_full_forward(seed: int, prompt: Tensor, chunk: int) -> None:
    model = toy(seed, True)
    full = Session(model, chunk=10_000).score(prompt)
    assert torch.equal(run(Session(model, replay="exact", chunk=chunk), prompt, PROMPT), full[PROMPT - 1 :])


def test_all_layers_prefill_equals_encoder_only_prefill(seed: int, prompt: Tensor) -> None:
    model = toy(seed, True)
    with_ced = run(Session(model, replay="exact"), prompt, PROMPT)
    assert torch.equal(with_ced, run(Session(model, replay="exact", ced=False), prompt, PROMPT))


def test_ragged_batch_of_five_is_bit_equal_to_each_alone(seed: int, prompt: Tensor) -> None:
    model = toy(seed, True)
    full = Session(model, chunk=10_000).score(prompt)
    lengths = [1, 5, 8, 23, 41]
    session = Session(model, replay="exact", chunk=7)
    sequences = [Sequence(slot, prompt[:n]) for slot, n in enumerate(lengths)]
    steps = [session.prefill(sequences)]
    for step in range(12):
        for sequence, n in zip(sequences, lengths, strict=True):
            sequence.append(int(prompt[n + step]))
        steps.append(session.decode(sequences))
    for index, n in enumerate(lengths):
        assert torch.equal(torch.stack([rows[index] for rows in steps]), full[n - 1 : n + 12]), f"prompt of {n}"


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_bounded_equals_exact_for_prompts_within_the_window(seed: int, prompt: Tensor, length: int) -> None:
    model = toy(seed, True)
    bounded, exact = (run(Session(model, replay=mode), prompt[:40], length) for mode in ("bounded", "exact"))
    assert torch.equal(bounded, exact)


def test_bounded_is_an_approximation_for_longer_prompts(prompt: Tensor, seed: int) -> None:
    model = toy(seed, True)
    bounded, exact = (run(Session(model, replay=mode), prompt, PROMPT) for mode in ("bounded", "exact"))
    assert not torch.equal(bounded, exact)


def test_exact_replay_needs_every_row_it_takes_and_no_more(prompt: Tensor, seed: int) -> None:
    """One row fewer changes bits somewhere (drafts included); the rows before it do not matter."""
    model = toy(seed, True)
    full = Session(model, chunk=10_000).score(prompt)
    longer = Session(model, replay="exact")
    longer.tail += 5
    assert torch.equal(run(longer, prompt, PROMPT), full[PROMPT - 1 :])
    shorter = Session(model, replay="exact")
    shorter.tail = model.plan.exact_decoder_replay - 1
    assert not torch.equal(run(shorter, prompt, PROMPT), full[PROMPT - 1 :])
    assert model.plan.exact_decoder_replay == (8 - 1) * 4


def test_packed_memory_gives_the_same_bits(seed: int, prompt: Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = toy(seed, False) if dtype is torch.float32 else _bf16(seed)
        logits = []
        for packed in (False, True):
            memory = DenseMemory(model.config, model.numerics, packed=packed)
            logits.append(run(Session(model, memory=memory), prompt, PROMPT))
        assert torch.equal(*logits)


def _bf16(seed: int):  # type: ignore[no-untyped-def]
    from kvist.model.initialise import random_model
    from kvist.presets import preset

    return random_model(preset("tiny"), Numerics(dtype=torch.bfloat16), seed)


def test_drafts_do_not_depend_on_how_the_prompt_was_computed(seed: int, prompt: Tensor) -> None:
    model = toy(seed, True)
    drafts = []
    for chunk, ced in ((1, True), (7, True), (128, False)):
        session = Session(model, replay="exact", chunk=chunk, ced=ced)
        sequence = Sequence(0, prompt[:PROMPT])
        session.prefill([sequence])
        drafts.append(session.draft([sequence], [int(prompt[PROMPT])]))
    for other in drafts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drafts[0], other, strict=True))


@pytest.mark.parametrize(("quantise", "expected"), [(False, 150), (True, 3)])
def test_default_mode_agrees_up_to_the_first_tiny_margin(quantise: bool, expected: int) -> None:
    """200 greedy steps a seed: logits within 1e-4 and the same tokens until a margin below 1e-5 explains a flip.

    With quantisers on, thousands of values a position can lie next to a rounding step, so few positions come before the
    first tiny margin; with them off only choices can flip, and the comparison reaches far.
    """
    compared = 0
    for seed in range(4):
        model = toy(seed, False, quantise)
        session = Session(model, replay="exact")
        sequence = Sequence(0, torch.tensor([5 + seed]))
        rows = [session.prefill([sequence])]
        for _ in range(200):
            sequence.append(int(rows[-1][0].argmax()))
            rows.append(session.decode([sequence]))
        stepwise = torch.cat(rows)
        with MarginRecorder(model) as margins:
            full = Session(model, chunk=10_000).score(sequence.ids_T)
        top = full.topk(2, dim=1).values
        close = (top[:, 0] - top[:, 1] < 1e-5).nonzero()
        explained = min(margins.first_position_below(1e-5), int(close[0]) if len(close) else len(full))
        for position in range(explained):
            gap = float((full[position] - stepwise[position]).abs().max())
            assert gap < 1e-4, f"seed {seed}, position {position}: {gap}, margins are tiny from {explained}"
            assert int(full[position].argmax()) == int(stepwise[position].argmax())
        compared += explained
    assert compared >= expected, f"only {compared} positions stand before a tiny margin; the comparison says nothing"
