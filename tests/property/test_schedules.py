"""Random valid layer schedules: full forward = decode = chunked, bit for bit; invalid ones are refused by name.

Ratios 1 to 5, any source placement, several candidate pools, pools below top-k (missing rows are -1, never masked rows).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.config import ConfigError, LayerMode, ModelConfig, replace
from kvist.engine.session import Sequence, Session
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset


@st.composite
def schedules(draw: st.DrawFn) -> ModelConfig:
    """A small model with a random schedule that keeps every rule."""
    n_layers = draw(st.integers(1, 6))
    ratios: list[int] = []
    kv, index, pools = [], [], []
    current = 0
    for layer in range(n_layers):
        kind = draw(st.sampled_from(["window", "full", "reindex", "reuse"] if current else ["window", "full"]))
        if kind == "full":
            current = draw(st.integers(1, 5))
            kv.append(layer)
        if kind in ("full", "reindex"):
            index.append(layer)
            if draw(st.booleans()):
                pools.append(layer)
        ratios.append(0 if kind == "window" else current)
    return replace(
        preset("tiny"),
        n_layers=n_layers,
        n_mtp_layers=0,
        dspark_target_layer_ids=(),
        compress_ratios=tuple(ratios),
        kv_source_layers=tuple(kv),
        index_source_layers=tuple(index),
        candidate_source_layers=tuple(pools),
        candidate_topk_blocks=draw(st.integers(1, 3)),
        candidate_block_size=draw(st.integers(1, 4)),
        index_topk=draw(st.integers(1, 9)),
        window_size=draw(st.integers(1, 9)),
        engram_layer_ids=(draw(st.integers(0, n_layers - 1)),),
        engram_num_embeddings=(660,),
        dim=32,
        n_routed_experts=4,
    )


@settings(max_examples=12, deadline=None)
@given(config=schedules(), chunk=st.integers(1, 9), cut=st.integers(1, 20), seed=st.integers(0, 99))
def test_every_path_gives_the_same_bits(config: ModelConfig, chunk: int, cut: int, seed: int) -> None:
    check_paths(config, chunk, cut, seed)


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(config=schedules(), chunk=st.integers(1, 9), cut=st.integers(1, 20), seed=st.integers(0, 99))
def test_every_path_gives_the_same_bits_many(config: ModelConfig, chunk: int, cut: int, seed: int) -> None:
    check_paths(config, chunk, cut, seed)


def check_paths(config: ModelConfig, chunk: int, cut: int, seed: int) -> None:
    model = random_model(config, Numerics(deterministic=True, impl="cpu" if seed % 2 else "ref"), seed)
    ids = torch.randint(4, 256, (22,), generator=torch.Generator().manual_seed(seed))
    full = Session(model, chunk=10_000).score(ids)
    assert torch.equal(Session(model, chunk=chunk).score(ids), full)
    session = Session(model, replay="exact", chunk=chunk)
    sequence = Sequence(0, ids[:cut])
    rows = [session.prefill([sequence])]
    for token in ids[cut:].tolist():
        sequence.append(token)
        rows.append(session.decode([sequence]))
    assert torch.equal(torch.cat(rows), full[cut - 1 :])


@given(config=schedules())
@settings(max_examples=60, deadline=None)
def test_the_plan_names_sources_that_exist(config: ModelConfig) -> None:
    for spec in config.plan.layers:
        if spec.mode is LayerMode.WINDOW:
            assert spec.kv_source is None and spec.index_source is None
        else:
            assert spec.kv_source is not None and spec.kv_source <= spec.index
            assert config.plan.layers[spec.kv_source].ratio == spec.ratio
        if spec.candidate_source is not None:
            assert config.plan.layers[spec.candidate_source].kv_source == spec.kv_source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layers": (4,), "index_source_layers": (4, 6)}, "no kv source stands before"),
        ({"compress_ratios": (0, 0, 0, 2, 1, 1, 1, 1, 0, 0, 0)}, "layer 2 is a kv source"),
        ({"index_source_layers": (4, 6)}, "not in index_source_layers"),
        ({"candidate_source_layers": (5,)}, "not in index_source_layers"),
        ({"compress_ratios": (0, 0, 2, 3, 1, 1, 1, 1, 0, 0, 0)}, "with ratio 2"),
        ({"compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1, 1, 0, 0)}, "drafts are window only"),
        ({"compress_ratios": (0, 0, 2)}, "compress_ratios has 3 entries"),
        ({"kv_source_layers": (2, 99)}, "outside 0..7"),
        ({"index_source_layers": (4, 2, 6)}, "ascending"),
        ({"index_source_layers": (1, 2, 4, 6)}, "window only"),
        ({"head_dim": 40}, "multiple of 32"),
        ({"n_layers": 0}, "at least 1"),
        ({"vocab_size": 2**50}, "absurdly large"),
        ({"rope_theta": float("nan")}, "finite"),
    ],
)
def test_invalid_schedules_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(preset("tiny"), **changes)
