"""Index scores, top-k and candidate pools: IDX-01, IDX-05 and IDX-07 of the shared bug cases, every implementation.

Must not know models; the same tie rule inside a batch is tested with a memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvist.engine.sampler import SamplingParams, sample
from kvist.kernels.index_select import select
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, consecutive_rows
from kvist.model.stores import RowStore
from kvist.presets import preset
from kvist.quant import fake_mxfp4

IMPLS = ("ref", "rows", "wide", "cpu")


def chosen(scores_M: list[float], visible: int, impl: str, **options: object) -> tuple[list[int], list[int] | None]:
    """Rows and blocks picked for one query whose score of row m is scores[m]: one head each for positive and negative."""
    scores = torch.tensor(scores_M)
    keys = torch.zeros(len(scores_M), 32)
    keys[:, 0], keys[:, 1] = scores.clamp_min(0), (-scores).clamp_min(0)
    q = torch.zeros(1, 2, 32)
    q[0, 0, 0] = q[0, 1, 1] = 1.0
    picked = select(q, torch.tensor([[1.0, -1.0]]), keys, torch.tensor([visible]), impl=impl, **options)  # type: ignore[arg-type]
    blocks = picked.candidates_NB
    return picked.topk_NK[0].tolist(), None if blocks is None else blocks[0].tolist()


@pytest.mark.parametrize("impl", IMPLS)
def test_idx_01_relu_of_each_head(impl: str) -> None:
    """Key A has head products [3, -5], key B [1, 1]: with the ReLU A scores 3 against 2, without it -2."""
    q = torch.zeros(1, 2, 32)
    q[0, 0, 0] = q[0, 1, 1] = 1.0
    keys = torch.zeros(2, 32)
    keys[0, :2], keys[1, :2] = torch.tensor([3.0, -5.0]), torch.tensor([1.0, 1.0])
    picked = select(q, torch.ones(1, 2), keys, torch.tensor([2]), k=1, block_size=4, impl=impl)
    assert picked.topk_NK.tolist() == [[0]]


@pytest.mark.parametrize("packed", [False, True])
def test_idx_01_readers_see_the_keys_that_were_written(packed: bool) -> None:
    """Three keys written one by one (decode) and at once (prefill) read back alike, and as the format holds them."""
    keys = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    form = (lambda x: x) if packed else fake_mxfp4
    stores = [RowStore("key", packed, torch.float32) for _ in range(2)]
    stores[0].append(form(keys))
    for row in range(3):
        stores[1].append(form(keys[row : row + 1]))
    assert torch.equal(stores[0].read(), fake_mxfp4(keys))
    assert torch.equal(stores[1].read(), fake_mxfp4(keys))


# Rows of five blocks of four with the block maxima 5, 4, 3, 2, -9; 17 rows are visible, so that block 4 holds row 16.
MAXIMA = [1.0, 5, 2, 0, 0, 1, 4, 2, 3, 0, 0, 0, 0, 0, 2, 0, -9.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_idx_05_newest_block_is_pinned_and_takes_a_place(impl: str) -> None:
    own, pool = chosen(MAXIMA, 17, impl, k=4, block_size=4, publish_blocks=2)
    assert pool == [0, 4]
    assert own == [1, 2, 6, 8]  # the source's own choice ignores the pool; of the three 2s the lowest row wins
    pool_NB = torch.tensor([[0, 4]])
    assert chosen(MAXIMA, 17, impl, k=4, block_size=4, pool_NB=pool_NB)[0] == [0, 1, 2, 3]
    assert chosen(MAXIMA, 17, impl, k=8, block_size=4, pool_NB=pool_NB)[0] == [0, 1, 2, 3, 16, -1, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("visible", [1, 4, 5, 8])
def test_idx_05_a_pool_that_covers_everything_changes_nothing(visible: int, impl: str) -> None:
    scores = MAXIMA[:visible]
    _, pool = chosen(scores, visible, impl, k=4, block_size=4, publish_blocks=2)
    assert pool is not None
    blocks = -(-visible // 4)
    assert pool == list(range(blocks)) + [-1] * (2 - blocks)
    for k in (4, 8):
        free, _ = chosen(scores, visible, impl, k=k, block_size=4)
        assert chosen(scores, visible, impl, k=k, block_size=4, pool_NB=torch.tensor([pool]))[0] == free


@pytest.mark.parametrize("impl", IMPLS)
def test_idx_07_ties_go_to_the_lowest_row(impl: str) -> None:
    keys = torch.randn(30, 32, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([0, 1, 3, 4, 5, 30, 30])
    for _ in range(10):
        picked = select(torch.zeros(7, 2, 32), torch.ones(7, 2), keys, visible, k=4, block_size=4, impl=impl).topk_NK
        assert picked.tolist() == [[m if m < seen else -1 for m in range(4)] for seen in visible.tolist()]


def selected(memory: DenseMemory, requests: list[tuple[int, int, int]]) -> list[Tensor]:
    """Zero queries at (slot, first position, tokens) in one batch: what each request's rows select from source 4."""
    config = memory.config
    ids, positions, segments = consecutive_rows([(s, p, torch.zeros(n, dtype=torch.int64)) for s, p, n in requests])
    rows = Rows(token_ids_N=ids, positions_N=positions, text_N=torch.ones_like(ids, dtype=torch.bool), segments=segments)
    q = torch.zeros(len(ids), config.index_n_heads, config.index_head_dim)
    picked = memory.select(4, rows, q, torch.ones(len(ids), config.index_n_heads), None, False).topk_NK
    return [picked[segment.rows] for segment in segments]


@pytest.mark.parametrize("impl", ["ref", "wide", "cpu"])
def test_idx_07_ties_do_not_depend_on_batch_or_chunk(impl: str) -> None:
    memory = DenseMemory(preset("tiny"), Numerics(impl=impl))
    for slot in range(5):
        store = memory.slot(slot).keys[4] = RowStore("key", False, torch.float32)
        store.append(torch.randn(30, 32, generator=torch.Generator().manual_seed(slot)))
    alone = selected(memory, [(0, 20, 10)])[0]
    assert alone.tolist() == [[0, 1, 2, 3]] * 10
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        batch = selected(memory, [(slot, 20, 10) for slot in order])
        assert all(torch.equal(part, alone) for part in batch)
    chunks = torch.cat([selected(memory, [(0, start, 3)])[0] for start in (20, 23, 26)])
    assert torch.equal(chunks, alone[:9])


def test_idx_07_equal_logits_give_the_same_token_every_time() -> None:
    logits = torch.full((100,), -1.0)
    logits[[17, 60]] = 3.0
    for seed in range(10):
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}):
            assert sample(logits, SamplingParams(seed=seed, **options), position=seed) == 17


def test_select_names_an_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="no impl 'fast'"):
        chosen([1.0], 1, "fast", k=1, block_size=1)


def test_random_model_selects_distinct_visible_rows() -> None:
    """min(k, visible) distinct, visible rows at every position of a random model with exact-zero ties."""
    model = random_model(preset("tiny"), Numerics(), seed=7)
    for layer in model.plan.layers:
        if layer.selects:
            model.layers[layer.index].attn.indexer.wq_b.weight.zero_()  # type: ignore[union-attr]
    seen: dict[int, Tensor] = {}
    for layer in model.plan.layers:
        if layer.selects:
            module = model.layers[layer.index].attn
            module.register_forward_hook(lambda _m, _a, out, at=layer.index: seen.__setitem__(at, out[1].topk_NK))  # type: ignore[union-attr]
    ids = torch.arange(10, 50)
    text = torch.ones(40, dtype=torch.bool)
    ids_N, positions, segments = consecutive_rows([(0, 0, ids)])
    rows = Rows(token_ids_N=ids_N, positions_N=positions, text_N=text, segments=segments, engram_LNX=model.engram_ids(ids, text))
    model(rows, DenseMemory(model.config, model.numerics))
    for layer, picked in seen.items():
        spec = model.plan.layers[layer]
        for position, row in enumerate(picked.tolist()):
            visible = (position + 1) // spec.ratio
            real = [m for m in row if m >= 0]
            assert len(set(real)) == len(real) == min(4, visible)
            assert all(m < visible for m in real)
            if spec.candidate_source is None:
                assert real == list(range(min(4, visible)))
