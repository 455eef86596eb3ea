"""The judgement at the end of `kvist train`: every measure is taken of something, and changes nothing (TRN-05).

Runs on the toy configuration in float32 on the CPU.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from kvist.presets import tiny
from kvist.train.evaluate import Judge, judge_all
from kvist.train.loop import Recipe, Run, Team, train_step
from kvist.train.sampling import Corpus, Mixture, Sampler
from kvist.train.weights import storages
from tests.unit.test_train_workers import CLASSES, CPU, RECALL, folder

CONFIG = tiny()
RECIPE = Recipe(
    steps=2, step_tokens=256, micro_tokens=128, short_length=32, length=64, long_length=128, dense_until=0.0, quantise_from=0.0
)
TIERS = ("prose", "docs", "code")
__all__ = ["folder"]  # the fixture


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    torch.set_num_threads(1)
    run, sampler = Run.start(CONFIG, RECIPE, CPU), Sampler(Corpus(folder, "train"), Mixture(), RECALL, 1)
    for _ in range(RECIPE.steps):
        train_step(run, sampler, Team(), CLASSES, torch.float32, None)
    return run


def judge_of(run: Run, tokens: int) -> Judge:
    return Judge(
        config=CONFIG, weights=run.weights, storage=storages(CONFIG), classes_V=CLASSES, device=CPU, dtype=torch.float32,
        tokens=tokens,
    )  # fmt: skip


def test_every_measure(run: Run, folder: Path, tmp_path: Path) -> None:
    """Batches hold more rows (32) than a measure asks for (24): none is the mean of nothing."""
    held = Corpus(folder, "heldout")
    before = {name: weight.detach().clone() for name, weight in run.weights.items()}
    found = judge_all(judge_of(run, 2048), held, RECALL, tmp_path / "e.json", length=32, long_length=64, limit=300)
    assert json.loads((tmp_path / "e.json").read_text()) == found
    for name, weight in run.weights.items():
        assert torch.equal(weight, before[name]), f"judging changed {name}"
        assert weight.grad is None, f"judging left a gradient of {name}"
    # About as good as guessing one of the vocabulary: a token is 3 bytes here.
    guess = math.log2(CONFIG.vocab_size) * 6000 / 18000
    for tier in TIERS:
        bits = found["bits_per_byte"][tier]
        assert bits["packed"] == pytest.approx(bits["unpacked"], rel=0.05)
        assert bits["packed"] == pytest.approx(guess, rel=0.25)
        for nats in found["loss_by_position"][tier].values():
            assert nats == pytest.approx(math.log(CONFIG.vocab_size), rel=0.25)
    assert set(found["needles"]) == {"32", "64"}
    for needle in found["needles"].values():
        assert needle["trials"] >= 48
        assert 0 <= needle["whole"] <= needle["digits"] <= 1
    for recalls in found["indexer_recall"].values():
        assert len(recalls) == len(CONFIG.index_source_layers)
        assert all(0 < share["selected"] <= 1 and 0 < share["random"] <= 1 for share in recalls.values())
