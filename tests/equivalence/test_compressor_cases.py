"""Faults that users met around unfinished groups, ragged prefills and image spans: CMP-01, CMP-03, CMP-05, IDX-03, VIS-10.

Each compares a cached path with one forward over all tokens, in exact mode.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.engine.session import ImageSpan, Sequence, Session
from kvist.model.attention import Attention
from kvist.model.memory import DenseMemory
from kvist.model.transformer import Transformer
from tests.equivalence.conftest import toy


class WatchedMemory(DenseMemory):
    """A dense memory that notes which rows each source's own layer selected, by position."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.config, model.numerics)
        self.picked: dict[tuple[int, int], list[list[int]]] = {}

    def select(self, source, rows, q_NJI, weight_NJ, pool_NB, publish):  # type: ignore[no-untyped-def]
        choice = super().select(source, rows, q_NJI, weight_NJ, pool_NB, publish)
        for segment in rows.segments:
            for offset, ids in enumerate(choice.topk_NK[segment.rows].tolist()):
                self.picked.setdefault((source, segment.position + offset), []).append([i for i in ids if i >= 0])
        return choice


def test_cmp_01_unfinished_groups_score_their_own_keys() -> None:
    """24 tokens: prefill 12, then 12 single steps; selections and logits equal the one-shot forward at every position."""
    model = toy(3, False, False)
    loud = model.layers[4].attn
    assert isinstance(loud, Attention) and loud.indexer is not None and loud.indexer.wk is not None
    before = loud.indexer.wk.weight.clone()
    loud.indexer.wk.weight.mul_(10)  # a key taken from the wrong slot cannot pass by luck
    try:
        ids = torch.randint(4, 256, (24,), generator=torch.Generator().manual_seed(8))
        once, steps = WatchedMemory(model), WatchedMemory(model)
        session = Session(model, memory=once, chunk=100)
        full = session.score(ids)
        stepwise = Session(model, memory=steps, replay="exact", ced=False)
        sequence = Sequence(0, ids[:12])
        rows = [stepwise.prefill([sequence])]
        for token in ids[12:].tolist():
            sequence.append(token)
            rows.append(stepwise.decode([sequence]))
    finally:
        loud.indexer.wk.weight.copy_(before)
    assert float((torch.cat(rows) - full[11:]).abs().max()) < 1e-4
    assert steps.picked == once.picked
    for position in range(0, 24, 2):
        assert all(row < (position + 1) // 2 for row in once.picked[2, position][0])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_cmp_03_first_rows(length: int) -> None:
    """Rows of a ratio-r source after n tokens = floor(n / r); logits are finite and equal the naive forward."""
    model = toy(4, True)
    ids = torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(length))
    session = Session(model, replay="exact")
    logits = session.prefill([Sequence(0, ids)])
    assert bool(torch.isfinite(logits).all())
    assert torch.equal(logits, Session(model).score(ids)[-1:])
    for source in model.plan.kv_sources:
        assert len(session.memory.slot(0).main[source.index]) == length // source.ratio
        assert len(session.memory.slot(0).keys[source.index]) == length // source.ratio


@pytest.mark.parametrize("length", [1, 2, 9, 17, 40])
def test_cmp_05_cached_decode_equals_prefilling_again(length: int) -> None:
    """Greedy 16 tokens with a cache, and prefilling everything at each step: the same tokens, the same bits."""
    model = toy(5, True)
    ids = torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(length))
    session = Session(model, replay="exact")
    sequence = Sequence(0, ids)
    logits = session.prefill([sequence])
    for _ in range(16):
        again = Session(model, replay="exact").prefill([Sequence(0, sequence.ids_T)])
        assert torch.equal(logits, again)
        sequence.append(int(logits[0].argmax()))
        logits = session.decode([sequence])


def test_idx_03_packed_prefills_select_as_alone() -> None:
    """Requests of 12, 20 and 7 tokens in one step: selections and logits equal the solo runs."""
    model = toy(6, True)
    prompts = [torch.randint(4, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (12, 20, 7)]
    together = WatchedMemory(model)
    logits = Session(model, memory=together, replay="exact").prefill([Sequence(i, ids) for i, ids in enumerate(prompts)])
    alone = []
    for index, ids in enumerate(prompts):
        memory = WatchedMemory(model)
        assert torch.equal(logits[index : index + 1], Session(model, memory=memory, replay="exact").prefill([Sequence(0, ids)]))
        alone.append(memory.picked)
    for key, choices in together.picked.items():
        assert sorted(choices) == sorted(choice for solo in alone for choice in solo.get(key, []))


@pytest.mark.parametrize("chunk", [1, 5, 11])
def test_vis_10_an_image_span_may_be_cut_anywhere(chunk: int, prompt: Tensor) -> None:
    """Features are carried across chunk boundaries; no place in a span ever gets the placeholder's embedding."""
    model = toy(7, True)
    features = torch.randn(13, model.config.dim, generator=torch.Generator().manual_seed(1))
    images = (ImageSpan(start=9, embeddings_SD=features),)
    whole = Session(model, chunk=10_000).score(prompt, images)
    assert torch.equal(Session(model, chunk=chunk).score(prompt, images), whole)
    session = Session(model, replay="exact", chunk=chunk)
    assert torch.equal(session.prefill([Sequence(0, prompt, images)]), whole[-1:])
    assert not torch.equal(whole, Session(model, chunk=10_000).score(prompt))


def test_engram_history_stops_at_an_image(prompt: Tensor) -> None:
    """Tokens before an image never reach the n-grams of tokens after it."""
    model = toy(7, True)
    text = torch.ones(len(prompt), dtype=torch.bool)
    text[20:23] = False
    changed = prompt.clone()
    changed[17:20] = (changed[17:20] + 1) % 200 + 4
    a, b = (model.engram_ids(ids, text, 0) for ids in (prompt, changed))
    assert a is not None and b is not None
    assert torch.equal(a[:, 23:], b[:, 23:])
    assert not torch.equal(a[:, 18:20], b[:, 18:20])
