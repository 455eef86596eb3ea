"""Random use of an expert store by several threads: every expert handed out is the file's, whatever was read ahead or reused.

Memory of evicted experts is used again, so a value that changes while it is held would show here.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.checkpoint import ExpertStore, ReadFailed, open_files, save_checkpoint
from kvist.checkpoint.reads import FileReads
from kvist.config import replace
from kvist.inventory import parameters
from kvist.kernels.experts import Triple
from kvist.kernels.native import Packed, library, pack_fp4
from kvist.model.numerics import Numerics
from kvist.presets import preset

CONFIG = replace(preset("tiny"), n_routed_experts=12)
LAYERS = CONFIG.n_layers + CONFIG.n_mtp_layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "toy"
    generator = torch.Generator().manual_seed(0)
    state = {p.name: torch.randn(p.shape, generator=generator) for p in parameters(CONFIG)}
    save_checkpoint(CONFIG, state, None, out, shard_bytes=500_000)
    return out


def count(layer: int) -> int:
    return CONFIG.n_routed_experts if layer < CONFIG.n_layers else CONFIG.dspark_n_routed_experts


def right_values(folder: Path, native: bool) -> dict[tuple[int, int], list[Tensor]]:
    """Every expert as it should be handed out, from plain reads."""
    _, config, files = open_files(folder)
    found: dict[tuple[int, int], list[Tensor]] = {}
    for parameter in parameters(config):
        if ".experts." in parameter.name:
            index = int(parameter.name.split(".experts.")[1].split(".")[0])
            if native:
                value = pack_fp4(files.raw(parameter.name), files.raw(parameter.scale_name)).data
            else:
                value = files.dequantised(parameter, torch.float32)
            found.setdefault((parameter.layer, index), []).append(value)
    return found


def same(triple: Triple, expected: list[Tensor]) -> bool:
    parts = [part.data if isinstance(part, Packed) else part for part in triple]
    return all(torch.equal(part, wanted) for part, wanted in zip(parts, expected, strict=True))


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(library() is None, reason="no C compiler"))]
)
@pytest.mark.parametrize("seed", range(3))
def test_random_use(folder: Path, native: bool, seed: int) -> None:
    _, config, files = open_files(folder)
    numerics = Numerics(impl="cpu" if native else "ref")
    probe = ExpertStore(files, config, numerics, 1 << 30)
    one, expected = probe.nbytes((0, 0)), right_values(folder, native)
    flaky = random.Random(seed)

    def pread(descriptor: int, target: memoryview, offset: int) -> int:
        if flaky.random() < 0.02:
            raise OSError(5, "Input/output error")
        return os.preadv(descriptor, [target], offset)

    store = ExpertStore(files, config, numerics, 7 * one, reads=FileReads(pread=pread))
    assert store.native == native

    def work(own: int) -> tuple[int, int]:
        choice = random.Random(100 * seed + own)
        good = failed = 0
        for step in range(120):
            layer = step % LAYERS
            ids = sorted(choice.sample(range(count(layer)), choice.randint(1, count(layer))))
            try:
                for portion in store.banks[layer].portions(ids):
                    with portion as held:
                        assert 1 <= len(held) <= 3
                        for index, triple in held:
                            assert same(triple, expected[layer, index])
                            good += 1
            except ReadFailed:
                failed += 1
        return good, failed

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3), timeout=120))
    counters = store.counters()
    assert sum(good for good, _ in results) > 500
    assert sum(failed for _, failed in results) > 0
    assert counters.failures > 0
    assert counters.evictions > 100
    assert counters.peak_bytes <= 7 * one
    store.close()
    probe.close()
