"""A model whose experts stay in the files is the resident model, bit for bit: any budget, operators, dtype and storage.

Includes drafts, prompts in chunks (all experts of a layer at once) and Engram rows read one by one.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.checkpoint import ExpertStore, build_model, convert, fetch_counters, open_files, save_checkpoint
from kvist.config import ModelConfig
from kvist.engine.session import Sequence, Session
from kvist.inventory import parameters
from kvist.kernels.native import library
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.testing import bit_equal

CONFIG = preset("tiny")
CLASSES = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
ONE = 3 * (64 * 32 // 2 + 64 * 32 // 32)
"""Stored bytes of one expert: FP4 codes and scales of three matrices."""
NUMERICS = {
    "ref": Numerics(),
    "deterministic": Numerics(deterministic=True),
    "cpu": Numerics(impl="cpu"),
    "ref-bf16": Numerics(dtype=torch.bfloat16),
    "cpu-bf16": Numerics(dtype=torch.bfloat16, impl="cpu"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The toy in three shards, random weights."""
    out = tmp_path_factory.mktemp("model") / "toy"
    generator = torch.Generator().manual_seed(3)
    state = {
        p.name: torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if len(p.shape) > 1 else 0.3)
        for p in parameters(CONFIG)
    }
    payload = sum(parameter.nbytes for parameter in parameters(CONFIG))
    assert len(save_checkpoint(CONFIG, state, None, out, shard_bytes=payload // 2)) == 3
    return out


@pytest.fixture(scope="module")
def stored(folder, tmp_path_factory):
    """The same experts in another storage format."""

    @lru_cache(maxsize=4)
    def make(experts: str) -> Path:
        if experts == "fp4":
            return folder
        out = tmp_path_factory.mktemp(experts) / "toy"
        convert(folder, out, experts=experts)
        return out

    return make


def outputs(model, chunk: int = 7) -> list[Tensor]:
    """Logits of a prompt, of a few generated tokens and of drafts."""
    session = Session(model, chunk=chunk)
    ids = torch.randint(4, 256, (41,), generator=torch.Generator().manual_seed(0))
    sequence = Sequence(0, ids)
    logits = [session.prefill([sequence])]
    for _ in range(3):
        sequence.append(int(logits[-1].argmax()))
        logits.append(session.decode([sequence]))
    draft = session.draft([sequence], [int(logits[-1].argmax())])
    return [*logits, draft.logits_RBV, draft.confidence_RB]


@pytest.fixture(scope="module")
def resident(stored):
    """What the resident model gives, by numerics."""
    return lru_cache(maxsize=8)(lambda kind: outputs(build_model(stored("fp4"), numerics=NUMERICS[kind], classes=CLASSES)))


@pytest.mark.parametrize("kind", NUMERICS)
@pytest.mark.parametrize("experts", [1, 5, 1000])
def test_the_bits_of_the_resident_model(stored, resident, kind: str, experts: int) -> None:
    numerics = NUMERICS[kind]
    budget = 2 * experts * ONE  # packed panels of so small a matrix are padded
    banked = build_model(stored("fp4"), numerics=numerics, classes=CLASSES, expert_budget_bytes=budget, engram="read")
    for got, expected in zip(outputs(banked), resident(kind), strict=True):
        assert bit_equal(got, expected)
    counters = fetch_counters(banked).experts
    assert counters is not None
    assert counters.misses > 0
    assert counters.peak_bytes <= budget
    assert (counters.evictions == 0) == (experts == 1000)


@pytest.mark.parametrize("experts", ["fp8", "bf16"])
@pytest.mark.parametrize("kind", ["ref", "cpu", "ref-bf16"])
def test_other_storage_formats(stored, experts: str, kind: str) -> None:
    resident = build_model(stored(experts), numerics=NUMERICS[kind], classes=CLASSES)
    banked = build_model(stored(experts), numerics=NUMERICS[kind], classes=CLASSES, expert_budget_bytes=40_000)
    for got, expected in zip(outputs(banked), outputs(resident), strict=True):
        assert bit_equal(got, expected)


@pytest.mark.parametrize("access", ["mmap", "read"])
def test_ragged_batches_and_both_ways_of_reading(stored, access) -> None:
    def run(model) -> list[Tensor]:
        session = Session(model, chunk=5)
        generator = torch.Generator().manual_seed(1)
        sequences = [Sequence(slot, torch.randint(4, 256, (n,), generator=generator)) for slot, n in enumerate((3, 17, 30))]
        logits = [session.prefill(sequences)]
        for _ in range(3):
            for sequence, row in zip(sequences, logits[-1], strict=True):
                sequence.append(int(row.argmax()))
            logits.append(session.decode(sequences))
        return logits

    resident = run(build_model(stored("fp4"), classes=CLASSES, access=access))
    banked = run(build_model(stored("fp4"), classes=CLASSES, access=access, expert_budget_bytes=4 * ONE))
    assert all(bit_equal(got, expected) for got, expected in zip(banked, resident, strict=True))


def test_a_banked_model_holds_no_expert_and_no_table_of_its_own(stored) -> None:
    resident = build_model(stored("fp4"), classes=CLASSES)
    banked = build_model(stored("fp4"), classes=CLASSES, expert_budget_bytes=4 * ONE)
    missing = set(resident.state_dict()) - set(banked.state_dict())
    assert set(banked.state_dict()) < set(resident.state_dict())
    drafts = CONFIG.n_mtp_layers * CONFIG.dspark_n_routed_experts
    assert len(missing) == 3 * (CONFIG.n_layers * CONFIG.n_routed_experts + drafts)
    assert all(".experts." in name for name in missing)


def test_look_ahead_loads_what_the_next_layer_used_last_time(stored) -> None:
    """Two equal steps: with room for everything the second finds all of it; without look-ahead results are the same."""
    _, config, files = open_files(stored("fp4"))
    for look_ahead in (True, False):
        store = ExpertStore(files, config, Numerics(), 1000 * ONE, look_ahead=look_ahead)
        for _ in range(2):
            for layer in range(3):
                for portion in store.banks[layer].portions([1, 4 + layer]):
                    with portion as held:
                        assert [index for index, _ in held] == [1, 4 + layer]
        counters = store.counters()
        assert (counters.hits + counters.late, counters.misses) == (6, 6)
        store.close()
    small = ExpertStore(files, config, Numerics(), 4 * ONE)
    for _ in range(3):
        for layer in range(8):
            for portion in small.banks[layer].portions([0, 3]):
                with portion:
                    pass
    # Four experts of a pass of sixteen: least recently used alone would find none.
    assert small.counters().hits + small.counters().late > 20


def test_a_batch_that_wants_most_of_a_layer_streams_the_next_one(stored) -> None:
    _, config, files = open_files(stored("fp4"))
    store = ExpertStore(files, config, Numerics(), 1000 * ONE)
    for portion in store.banks[0].portions(list(range(8))):
        with portion:
            pass
    assert store.counters().ahead_loads == config.n_routed_experts


@pytest.mark.parametrize("kind", ["ref", "ref-bf16", "deterministic"])
def test_device_host_and_disk(stored, resident, kind: str) -> None:
    """Three tiers, the CPU standing for the device: the smaller cache in front of the larger one."""
    options = {"expert_budget_bytes": 40 * ONE, "device_expert_budget_bytes": 6 * ONE}
    model = build_model(stored("fp4"), numerics=NUMERICS[kind], classes=CLASSES, **options)
    for got, expected in zip(outputs(model), resident(kind), strict=True):
        assert bit_equal(got, expected)
    counters = fetch_counters(model)
    assert counters.experts is not None
    assert counters.device_experts is not None
    assert counters.device_experts.peak_bytes <= 6 * ONE
    assert counters.device_experts.bytes_read > counters.experts.bytes_read, "host memory held what the device let go"
    assert counters.experts.hits > 0


def test_a_device_budget_is_checked(stored) -> None:
    _, config, files = open_files(stored("fp4"))
    with pytest.raises(ValueError, match="device expert budget of 5 bytes holds no expert"):
        ExpertStore(files, config, Numerics(), 4 * ONE, device_budget_bytes=5)
    if library() is not None:
        with pytest.raises(ValueError, match="a device budget needs another device or impl"):
            ExpertStore(files, config, Numerics(impl="cpu"), 8 * ONE, device_budget_bytes=8 * ONE)


@pytest.mark.parametrize("budget", [0, 1, ONE - 1])
def test_a_budget_below_one_expert_is_refused(stored, budget: int) -> None:
    with pytest.raises(ValueError, match=f"expert budget of {budget:,} bytes holds no expert: the largest takes {ONE:,} bytes"):
        build_model(stored("fp4"), classes=CLASSES, expert_budget_bytes=budget)


def test_every_layer_needs_a_bank(stored) -> None:
    model = build_model(stored("fp4"), classes=CLASSES)
    with pytest.raises(ValueError, match=r"layers \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10\] have no expert bank"):
        model.attach_experts({0: model.layers[0].ffn.bank})


def test_the_bank_of_the_release_from_headers_alone() -> None:
    """15,744 experts of 18.8 MB: the store's sizes, without a byte of it."""
    release: ModelConfig = preset("v41-flash")
    store = ExpertStore(object(), release, Numerics(), 1 << 35)  # type: ignore[arg-type]
    assert len(store.experts) == 40 * 384 + 3 * 128
    assert store.nbytes((0, 0)) == 18_800_640
    assert sorted(store.banks) == list(range(43))
    store.close()
