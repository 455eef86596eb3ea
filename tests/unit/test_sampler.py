"""The sampler: filters, noise, frequencies, penalties, masks, log-probabilities, and every bad parameter by name."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.engine.errors import NonFiniteLogits
from kvist.engine.sampler import SamplingParams, choose, filter_logits, gumbel_noise, sample
from kvist.engine.sampling.adjust import adjust
from kvist.engine.sampling.grammar_text import GrammarUnsatisfiable
from kvist.engine.sampling.history import History
from kvist.engine.sampling.params import copy_seed


def test_greedy_takes_the_lower_id_of_equal_logits() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert all(sample(logits, SamplingParams(), position) == 1 for position in range(5))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    params = SamplingParams(temperature=1.0, seed=3)
    counts = torch.bincount(torch.tensor([sample(logits, params, p) for p in range(4000)]), minlength=3) / 4000
    assert float((counts - torch.softmax(logits, 0)).abs().max()) < 0.03


def test_noise_is_keyed_by_seed_and_position() -> None:
    assert torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(1, 2, 50))
    assert not torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(1, 3, 50))
    assert not torch.equal(gumbel_noise(1, 2, 50), gumbel_noise(2, 2, 50))
    assert torch.equal(gumbel_noise(1, 2, 50)[:20], gumbel_noise(1, 2, 20))


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-8, 8), min_size=1, max_size=20),
    k=st.integers(0, 20),
    p=st.floats(0.05, 1),
    m=st.floats(0, 1),
)
def test_filters(values: list[float], k: int, p: float, m: float) -> None:
    logits = torch.tensor(values)
    kept = torch.isfinite(filter_logits(logits, SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m)))
    probs = torch.softmax(logits.double(), 0)
    assert kept[int(logits.argmax())]
    assert not k or int(kept.sum()) <= k
    # whoever is kept has no better one that is not
    worst = probs[kept].min()
    assert bool((probs[~kept] <= worst).all())
    if m and not k and p == 1:
        assert bool((probs[kept] >= m * probs.max() - 1e-12).all())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for p, count in ((0.4, 1), (0.5, 1), (0.6, 2), (0.81, 3), (1.0, 4)):
        assert int(torch.isfinite(filter_logits(logits, SamplingParams(temperature=1.0, top_p=p))).sum()) == count


def test_top_p_counts_a_long_flat_tail() -> None:
    """One token of 30% and 6,999 equal ones, each far below the best: 0.9 takes nearly all of them, lower ids first."""
    logits = torch.full((7000,), -8.0)
    logits[3] = 0.0
    kept = torch.isfinite(filter_logits(logits, SamplingParams(temperature=1.0, top_p=0.9)))
    total = 1 + 6999 * np.exp(-8.0)
    assert int(kept.sum()) == 1 + int(np.ceil((0.9 * total - 1) / np.exp(-8.0)))
    assert bool(kept[: int(kept.sum())].all())


def bits(allowed: list[int], size: int) -> np.ndarray:
    """A mask of `size` ids that allows some."""
    flags = np.zeros(size, np.uint8)
    flags[allowed] = 1
    return np.packbits(flags, bitorder="little")


def test_penalties_by_hand() -> None:
    history = History([2, 2, 5])
    for token in (1, 1, 3):
        history.append(token)
    logits = np.array([1, 1, -2, 4, 0, 3], np.float32)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: -3, 4: 1.5})
    adjust(logits, params, history)
    # 1: twice in the reply; 2 and 5: prompt only; 3: once in the reply
    assert logits.tolist() == [-2, 0.5 - 0.5 - 0.5, -4, 2 - 0.5 - 0.25, 1.5, 1.5]


def test_history_is_what_was_appended_and_not_taken_back() -> None:
    history, dice = History([7, 7, 9]), random.Random(4)
    reply: list[int] = []
    for _ in range(500):
        if reply and dice.random() < 0.3:
            count = dice.randrange(1, min(4, len(reply)) + 1)
            history.rollback(count)
            del reply[-count:]
        else:
            reply.append(dice.randrange(60))
            history.append(reply[-1])
        ids, counts = history.replied()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(reply)
        assert sorted(history.seen().tolist()) == sorted({7, 9, *reply})
    with pytest.raises(ValueError, match=f"cannot take back {len(reply) + 1} of {len(reply)}"):
        history.rollback(len(reply) + 1)


def test_rows_behind_drafts_count_them_and_leave_no_trace() -> None:
    history = History([1])
    params = SamplingParams(frequency_penalty=1.0)
    behind, after = np.zeros(4, np.float32), np.zeros(4, np.float32)
    adjust(behind, params, history.ahead([2, 2, 3]))
    adjust(after, params, history)
    assert behind.tolist() == [0, 0, -2, -1] and after.tolist() == [0, 0, 0, 0] and len(history) == 0


def test_srv_07_penalties_and_biases_beside_a_plain_row() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(4, 3)
    wishes = [SamplingParams(), SamplingParams(repetition_penalty=4.0), SamplingParams(logit_bias={0: 5.0}), SamplingParams()]
    found = choose(logits, wishes, [0, 0, 0, 0], [None, History([1]), None, None])
    assert [choice.token for choice in found] == [1, 2, 0, 1]


def test_srv_09_a_row_of_nan_ends_its_request_only() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1
    logits[1] = float("nan")
    for temperature in (0.0, 0.01):
        found = choose(logits, [SamplingParams(temperature=temperature)] * 3, [5, 6, 7])
        assert [choice.token for choice in found] == [4, -1, 4]
        assert isinstance(found[1].error, NonFiniteLogits) and "position 6" in str(found[1].error)
        assert found[0].error is None and found[2].error is None


def test_masks_forbid_and_a_dead_end_is_an_error() -> None:
    logits = torch.arange(20.0).expand(4, 20)
    masks = [bits([3, 9], 20), bits([], 20), None, bits([5], 8)]  # the last is shorter: ids from 8 on are not allowed
    found = choose(
        logits, [SamplingParams(), SamplingParams(), SamplingParams(temperature=0.1), SamplingParams()], [0] * 4, None, masks
    )
    assert [choice.token for choice in found] == [9, -1, 19, 5]
    assert isinstance(found[1].error, GrammarUnsatisfiable)


def test_penalties_cannot_make_noise_of_a_row() -> None:
    logits = torch.full((1, 3), 3e38)
    choice = choose(logits, [SamplingParams(temperature=1.0, repetition_penalty=0.01)], [4], [History([0])])[0]
    assert choice.token == -1 and isinstance(choice.error, NonFiniteLogits)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0]])
    params = SamplingParams(temperature=0.2, logit_bias={3: 100.0}, logprobs=2)
    details = choose(logits, [params], [0])[0].logprobs
    expected = torch.log_softmax(logits[0].double(), 0)
    assert details is not None and details.token == 3
    assert abs(details.logprob - float(expected[3])) < 1e-12
    assert [token for token, _ in details.top] == [1, 2]
    assert all(abs(value - float(expected[token])) < 1e-12 for token, value in details.top)
    assert choose(logits, [SamplingParams()], [0])[0].logprobs is None


def test_copies_have_seeds_of_their_own() -> None:
    copies = SamplingParams(temperature=1.0, seed=5, n=4).copies()
    assert [copy.n for copy in copies] == [1] * 4 and copies[0].seed == 5
    assert len({copy.seed for copy in copies}) == 4
    assert [copy.seed for copy in copies] == [copy_seed(5, index) for index in range(4)]
    assert SamplingParams(seed=5, n=9).copies()[3].seed == copies[3].seed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"temperature must lie in \[0, 100\], got -0.5; 0 is greedy"),
        ({"temperature": 1e-9}, r"0 or at least 0.0001, got 1e-09"),
        ({"temperature": "hot"}, r"got 'hot'"),
        ({"temperature": True}, r"got True"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_k": 1.5}, r"top_k must be an integer in 0..2147483648, got 1.5"),
        ({"top_k": 1 << 40}, r"top_k must be an integer in 0..2147483648, got 1099511627776"),
        ({"min_p": float("nan")}, r"min_p must lie in \[0, 1\], got nan"),
        ({"repetition_penalty": 0}, r"repetition_penalty must lie in \[0.01, 100\], got 0"),
        ({"presence_penalty": float("inf")}, r"presence_penalty .* got inf"),
        ({"frequency_penalty": -1000}, r"frequency_penalty must lie in \[-100, 100\], got -1000"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias token id must be an integer at least 0, got -1"),
        ({"logit_bias": {"a": 1.0}}, r"logit_bias token id must be an integer at least 0, got 'a'"),
        ({"logit_bias": {4: 200}}, r"logit_bias of token 4 must lie in \[-100, 100\], got 200"),
        ({"logit_bias": dict.fromkeys(range(5000), 1.0)}, r"5000 entries, at most 4096"),
        ({"n": 0}, r"n must be an integer in 1..128, got 0; send several requests"),
        ({"n": 10**6}, r"n must be an integer in 1..128, got 1000000"),
        ({"seed": 2**64}, r"seed must be an integer in 0.."),
        ({"logprobs": 21}, r"logprobs must be an integer in 0..20, got 21"),
    ],
)
def test_every_bad_value_is_named_with_its_limit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_biases_outside_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={300: 1.0})
    params.check_vocabulary(301)
    with pytest.raises(ValueError, match=r"logit_bias names token id 300, the vocabulary is 0..299; leave it out"):
        params.check_vocabulary(300)
