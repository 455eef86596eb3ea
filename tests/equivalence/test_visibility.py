"""CMP-07 of the shared bug cases: nothing of a later token reaches an earlier position, and a row is visible only when its
whole group is in the past. Bit for bit, in the deterministic mode. Must not know how selections are made.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.engine.session import Session
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(preset("tiny"), Numerics(deterministic=True), seed=11)


def logits(model: Transformer, ids: Tensor) -> Tensor:
    return Session(model).score(ids)


@pytest.mark.parametrize("changed", range(1, 16))
def test_cmp_07_earlier_logits_are_bit_identical(model: Transformer, changed: int) -> None:
    ids = torch.randint(4, 256, (16,), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[changed] = (int(ids[changed]) + 17) % 256
    one, two = logits(model, ids), logits(model, other)
    assert torch.equal(one[:changed], two[:changed])
    assert not torch.equal(one[changed], two[changed])


@pytest.mark.parametrize("ratio, source", [(2, 2), (1, 4)])
def test_cmp_07_a_row_is_visible_when_its_group_is_complete(model: Transformer, ratio: int, source: int) -> None:
    """Row j is visible to query t exactly if (j + 1) * ratio <= t + 1; token 14 does not see the group of 14 and 15."""
    picked: list[Tensor] = []
    attention = model.layers[source].attn
    handle = attention.register_forward_hook(lambda _m, _a, out: picked.append(out[1].topk_NK))  # type: ignore[union-attr]
    try:
        logits(model, torch.arange(30, 46))
    finally:
        handle.remove()
    topk = torch.cat(picked)
    assert len(topk) == 16
    for t, rows in enumerate(topk.tolist()):
        real = [j for j in rows if j >= 0]
        assert all((j + 1) * ratio <= t + 1 for j in real)
        assert len(real) == min(model.config.index_topk, (t + 1) // ratio)
    if ratio == 2:
        assert 7 not in topk[14].tolist()
