"""Paged memory gives the bits of the dense packed memory: chunks, ragged batches, decode, replay, rollback, copies.

Pages of 4 to 16 tokens, so that rows, pages and groups end at different places. Cases CMP, IDX, PFX and SPC of the shared list.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.engine.session import Sequence, Session
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

VERIFY = 6
NUMERICS = {
    "ref": Numerics(),
    "deterministic": Numerics(deterministic=True),
    "cpu": Numerics(impl="cpu"),
    "bfloat16": Numerics(dtype=torch.bfloat16),
}
_models: dict[str, Transformer] = {}


def model_of(name: str) -> Transformer:
    """`tiny` with one set of random weights in one numerics."""
    if name not in _models:
        _models[name] = random_model(preset("tiny"), NUMERICS[name], 3)
    return _models[name]


def paged(model: Transformer, page_tokens: int = 8, slots: int = 8, pages: int = 128) -> PagedMemory:
    """A memory whose slots all have pages for 96 tokens, taken from the pool in a scattered order."""
    memory = PagedMemory(model.config, model.numerics, pages=pages, slots=slots, verify_rows=VERIFY, page_tokens=page_tokens)
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    each = pages // slots
    for slot in range(slots):
        memory.open(slot, free[slot * each : (slot + 1) * each], 0)
    return memory


def dense(model: Transformer) -> DenseMemory:
    return DenseMemory(model.config, model.numerics, packed=True)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 256, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("page_tokens", "chunk"), [(4, 1), (8, 3), (16, 7), (6, 64), (8, 16)])
def test_prefill_and_decode_in_ragged_batches(numerics: str, page_tokens: int, chunk: int) -> None:
    model = model_of(numerics)
    lengths = (1, 5, 41, 12, 8)
    logits = []
    for memory in (dense(model), paged(model, page_tokens)):
        session = Session(model, memory=memory, replay="exact", chunk=chunk)  # type: ignore[arg-type]
        sequences = [Sequence(slot, tokens(n, slot)) for slot, n in enumerate(lengths)]
        steps = [session.prefill(sequences)]
        for step in range(9):
            for sequence in sequences:
                sequence.append(7 + step)
            steps.append(session.decode(sequences))
        draft = session.draft(sequences, [9] * len(lengths))
        logits.append([*steps, draft.logits_RBV, draft.confidence_RB])
    for index, (one, other) in enumerate(zip(*logits, strict=True)):
        assert torch.equal(one, other), f"step {index}: {(one - other).abs().max()}"
