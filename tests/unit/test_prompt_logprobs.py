"""Prompt log-probabilities equal the full forward's, whatever the chunk, with the best tokens beside them."""

from __future__ import annotations

import pytest
import torch

from kvist.engine.errors import EmptyPrompt, NonFiniteLogits
from kvist.engine.sampling.logprobs import best_ids, prompt_logprobs
from kvist.engine.session import Session
from tests.equivalence.conftest import toy


def test_they_equal_the_full_forward() -> None:
    ids = torch.randint(5, 200, (40,), generator=torch.Generator().manual_seed(3))
    session = Session(toy(0, False))
    expected = torch.log_softmax(session.score(ids).double(), -1)
    found = prompt_logprobs(session, ids.tolist(), 3)
    assert len(found) == 40 and found[0] is None
    for position, details in enumerate(found[1:], 1):
        assert details is not None and details.token == int(ids[position])
        assert abs(details.logprob - float(expected[position - 1, details.token])) < 1e-9
        values = expected[position - 1].sort(descending=True).values[:3]
        assert [value for _, value in details.top] == pytest.approx(values.tolist(), abs=1e-9)
    assert all(entry is None or entry.top == () for entry in prompt_logprobs(session, ids.tolist()))


def test_bad_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(toy(0, False))
    with pytest.raises(ValueError, match=r"must be in 0..20, got 21"):
        prompt_logprobs(session, [5, 6], 21)
    with pytest.raises(EmptyPrompt):
        prompt_logprobs(session, [])
    with pytest.raises(ValueError, match="token id 256"):
        prompt_logprobs(session, [5, 256])
    monkeypatch.setattr(session, "score", lambda ids, images: torch.full((len(ids), 256), float("nan")))
    with pytest.raises(NonFiniteLogits, match="position 1"):
        prompt_logprobs(session, [5, 6])


def test_best_ids_put_the_lower_of_equals_first() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0]).numpy()
    assert best_ids(row, 3).tolist() == [1, 3, 2]
    assert best_ids(row, 99).tolist() == [1, 3, 2, 4, 5, 0]
    assert best_ids(row, 0).tolist() == []
