"""Engram hashing and gate: ENG-02, ENG-04 and ENG-06 of the shared bug cases, and the numbers of the release.

Must not know tokenizers (classes are given) or checkpoints beyond an id that leaves a table.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.checkpoint import EngramTable
from kvist.config import ModelConfig, replace
from kvist.model.engram import engram_gate, hash_plan, hash_rows
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.presets import preset

CLASSES = torch.tensor([3, 1, 4, 1, 5])


def toy_config() -> ModelConfig:
    """Compressed vocabulary 8, prime search from 5, two heads, n-grams to 4, layers 1 and 14."""
    return replace(
        preset("tiny"),
        n_layers=16,
        compress_ratios=(0,) * 16,
        kv_source_layers=(),
        index_source_layers=(),
        candidate_source_layers=(),
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(72, 204),
        engram_vocab_size=5,
        engram_n_heads=2,
        engram_max_ngram_size=4,
        engram_compressed_vocab_size=8,
    )


def test_eng_02_primes_and_totals() -> None:
    primes = hash_plan(toy_config()).primes
    assert primes.tolist() == [[[5, 7], [11, 13], [17, 19]], [[23, 29], [31, 37], [41, 43]]]
    assert primes.sum((1, 2)).tolist() == [72, 204]


def test_released_primes_sum_to_the_published_row_counts() -> None:
    config = preset("v41-flash")
    assert hash_plan(config).primes.sum((1, 2)).tolist() == [384006168, 384016682] == list(config.engram_num_embeddings)


PLAIN = [
    [1, 11, 19, 24, 50, 57],
    [3, 10, 13, 23, 45, 71],
    [0, 6, 12, 32, 52, 55],
    [4, 10, 21, 23, 39, 68],
    [1, 7, 22, 30, 38, 70],
]
IMAGE_AT_2 = [*PLAIN[:2], [1, 10, 13, 24, 50, 66], [2, 9, 14, 27, 36, 66], [1, 7, 19, 25, 38, 70]]


def text_mask(image: int | None) -> Tensor:
    mask = torch.ones(5, dtype=torch.bool)
    if image is not None:
        mask[image] = False
    return mask


@pytest.mark.parametrize("image, rows", [(None, PLAIN), (2, IMAGE_AT_2)], ids=["text", "image"])
@pytest.mark.parametrize("start", range(5))
def test_eng_02_rows(start: int, image: int | None, rows: list[list[int]]) -> None:
    """From any start the same rows: decode hashes one position with its history, prefill hashes all."""
    found = hash_rows(toy_config(), CLASSES, text_mask(image), 2, start)
    assert found[0].tolist() == rows[start:]


def test_eng_02_nothing_behind_a_barrier_reaches_a_row() -> None:
    """Changing what lies before an image changes no row after it; without the image it does."""
    other = CLASSES.clone()
    other[0] = 6
    config = toy_config()
    for image, equal in ((1, True), (None, False)):
        mask = text_mask(image)
        tails = [hash_rows(config, classes, mask, 2)[:, 2:] for classes in (CLASSES, other)]
        assert torch.equal(*tails) == equal


def test_eng_02_the_gate_at_an_image_is_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    x, key = (torch.randn(5, 4, 32, generator=generator) for _ in range(2))
    gate = engram_gate(x, key, torch.ones(4, 32), text_mask(2), 1e-20)
    assert gate[2].tolist() == [0.0] * 4
    assert bool((gate[[0, 1, 3, 4]] > 0).all())


def test_eng_02_image_positions_pass_through_a_layer() -> None:
    model = random_model(preset("tiny"), Numerics(), seed=0)
    ids, mask = torch.tensor([7, 8, 9, 10, 11]), text_mask(2)
    rows = Rows(
        token_ids_N=ids,
        positions_N=torch.arange(5),
        text_N=mask,
        segments=(Segment(slot=0, start=0, length=5, position=0),),
        engram_LNX=model.engram_ids(ids, mask),
    )
    flow = model.run(model.begin(rows), rows, DenseMemory(model.config, model.numerics), 0, 1)
    out = model.layers[1].remember(flow.x_NSD, rows)  # type: ignore[operator]
    assert torch.equal(out[2], flow.x_NSD[2])
    assert all(not torch.equal(out[n], flow.x_NSD[n]) for n in (0, 1, 3, 4))


@pytest.mark.parametrize("bad", [-1, 256, 2**31 - 1, -(2**31)])
def test_eng_04_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    model = random_model(preset("tiny"), Numerics(), seed=0)
    ids = torch.tensor([5, bad, 7])
    for call in (model.engram_ids, lambda i, mask: model.check_ids(i)):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary 0..255"):
            call(ids, torch.ones(3, dtype=torch.bool))
    rows = Rows(
        token_ids_N=ids,
        positions_N=torch.arange(3),
        text_N=torch.ones(3, dtype=torch.bool),
        segments=(Segment(slot=0, start=0, length=3, position=0),),
    )
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        model.begin(rows)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_eng_04_classes_and_table_rows_never_wrap(bad: int) -> None:
    classes = CLASSES.clone()
    classes[1] = bad
    with pytest.raises(ValueError, match=r"token classes must lie in 0\.\.7"):
        hash_rows(toy_config(), classes, text_mask(None), 2)
    table = EngramTable(torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 1, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match=r"leave the table's 0\.\.7"):
        table.rows(torch.tensor([[3, bad]]))


def test_eng_04_neighbours_of_a_refused_id_hash_as_before() -> None:
    """A refusal leaves nothing behind: the same history without the bad id gives the rows it always gave."""
    model = random_model(preset("tiny"), Numerics(), seed=0)
    ids, mask = torch.tensor([5, 6, 7]), torch.ones(3, dtype=torch.bool)
    before = model.engram_ids(ids, mask)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.engram_ids(torch.tensor([5, -1, 7]), mask)
    assert torch.equal(model.engram_ids(ids, mask), before)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_eng_06_only_a_mask_of_equal_length_is_taken(tokens: int, length: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, key = (torch.randn(tokens, 4, 32, generator=generator) for _ in range(2))
    mask = torch.ones(length, dtype=torch.bool)
    if tokens == length:
        assert engram_gate(x, key, torch.ones(4, 32), mask, 1e-20).shape == (tokens, 4)
    else:
        with pytest.raises(ValueError, match=rf"bool of shape \({tokens},\)"):
            engram_gate(x, key, torch.ones(4, 32), mask, 1e-20)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_eng_06_only_bool_masks_are_taken(tokens: int) -> None:
    x = torch.ones(tokens, 4, 32)
    for dtype in (torch.int64, torch.uint8, torch.float32):
        with pytest.raises(ValueError, match="must be bool"):
            engram_gate(x, x, torch.ones(4, 32), torch.ones(tokens, dtype=dtype), 1e-20)
    with pytest.raises(ValueError, match="must be bool"):
        hash_rows(toy_config(), CLASSES, torch.ones(5, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="must be bool"):
        hash_rows(toy_config(), CLASSES, torch.ones(4, dtype=torch.bool), 2)


def test_eng_06_no_tokens_give_no_rows() -> None:
    model = random_model(preset("tiny"), Numerics(), seed=0)
    nothing = torch.zeros(0, dtype=torch.int64)
    ids = model.engram_ids(nothing, nothing.bool())
    assert ids is not None
    assert ids.shape == (2, 0, 6)
    x = torch.zeros(0, 4, model.config.dim)
    assert model.layers[1].engram(x, ids[0], nothing.bool()).shape == x.shape  # type: ignore[operator, union-attr]
