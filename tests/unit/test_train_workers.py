"""Training over two processes (gloo): loads, balance biases and weights as in one process; and the dense comparison's loop.

Named case: TRN-05 (loads are counted once a token, whatever the number of micro-batches and workers).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing

from kvist.presets import tiny
from kvist.train.baseline import train_dense
from kvist.train.loop import Recipe, Run, Team, train_step
from kvist.train.sampling import Corpus, Mixture, Recall, Sampler

CONFIG = tiny()
CLASSES = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
CPU = torch.device("cpu")
RECALL = Recall(lead=(10, 11), middle=(12,), end=(13,), names=tuple(range(100, 150)), digits=tuple(range(20, 30)))
# All steps attend every row: which queries teach the indexers depends on the number of micro-batches of a worker.
RECIPE = Recipe(steps=3, step_tokens=256, micro_tokens=128, short_length=32, dense_until=1.1, quantise_from=2.0, long_from=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tiers of a language in which a token mostly follows its predecessor by a small step."""
    at, rng = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for tier in ("prose", "docs", "code"):
        for split in ("train", "heldout"):
            (np.cumsum(rng.integers(1, 4, 6000)) % 180 + 20).astype("<u2").tofile(at / f"{tier}.{split}.u16")
            np.save(at / f"{tier}.{split}.offsets.npy", np.array([0, 2500, 6000]))
            np.save(at / f"{tier}.{split}.bytes.npy", np.array([7500, 10500]))
    return at


def _steps(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    run, sampler, geometry = Run.start(CONFIG, RECIPE, CPU), Sampler(Corpus(folder, "train"), Mixture(), RECALL, 1), None
    team = Team.join(CPU)
    for _ in range(RECIPE.steps):
        _, geometry, _ = train_step(run, sampler, team, CLASSES, torch.float32, geometry)
    if team.rank == 0:
        torch.save({name: w.detach() for name, w in run.weights.items()}, out)


def _worker(rank: int, size: int, port: int, folder: Path, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _steps(folder, out)
    torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_trn_05_two_workers_train_as_one(folder: Path, tmp_path: Path) -> None:
    """Two micro-batches in one process, or one in each of two: the same biases to the bit, the same weights to rounding."""
    _steps(folder, tmp_path / "one.pt")
    torch.multiprocessing.spawn(_worker, (2, _free_port(), folder, tmp_path / "two.pt"), nprocs=2)  # type: ignore[no-untyped-call]
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "two.pt"))
    moved = 0
    for name, value in one.items():
        if name.endswith("gate.bias"):
            assert torch.equal(value, two[name]), name
            moved += bool(value.any())
        elif ".indexer." not in name:
            assert float((value - two[name]).norm()) <= 1e-4 * float(value.norm()) + 1e-6, name
    assert moved >= CONFIG.n_layers - 1


def test_dense_comparison_learns_and_is_judged_on_held_out_text(folder: Path, tmp_path: Path) -> None:
    """Fewer bits than a uniform guess over the 180 ids in use, on every tier, and the figures stand in the file."""
    recipe = Recipe(step_tokens=1024, micro_tokens=1024, short_length=32, length=64, log_every=5, warmup_steps=5, dense_until=0.5)
    sampler, held_out = Sampler(Corpus(folder, "train"), Mixture(), RECALL, 1), Corpus(folder, "heldout")
    few, many = (
        train_dense(CONFIG, recipe, sampler, tmp_path, CPU, held_out, inner=64, tokens=n * 1024, seconds=300, limit=3000)
        for n in (5, 40)
    )
    uniform = np.log2(180) * 6000 / 18000
    for tier in ("prose", "docs", "code"):
        assert many["bits_per_byte"][tier] < few["bits_per_byte"][tier]
        assert many["bits_per_byte"][tier] < uniform
    assert (tmp_path / "dense.json").is_file()
