"""`kvist plan --fit`: placement and byte arithmetic against sums done by hand, limits, and what is printed."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from kvist.checkpoint import ExpertStore
from kvist.checkpoint.bounded import BoundedCache
from kvist.config import replace
from kvist.model.numerics import Numerics
from kvist.plan import Fit, Machine, fit, print_fit, report
from kvist.plan.fit import GB, Sizes, cache_bytes, cache_read, distinct, sizes_of, tiers_of
from kvist.presets import PRESETS, preset

RELEASE = preset("v41-flash")
EXPERT = 3 * 5120 * 2304 // 2 + 3 * 5120 * 2304 // 32
TOKEN = 40 * 6 * EXPERT


def printed(result: Fit) -> str:
    target = io.StringIO()
    print_fit(result, Console(file=target, width=170))
    return target.getvalue()


def tiers(result: Fit) -> dict[str, float]:
    return {tier.name: tier.share for tier in result.tiers}


def test_sizes_of_the_release() -> None:
    """Every stored byte is in one class; what a token reads is the published inventory's 13.0 GB."""
    sizes = sizes_of(RELEASE, "stored")
    assert sizes.expert == EXPERT == 18_800_640
    assert sizes.experts == 40 * 384 * EXPERT
    assert sizes.draft_experts == 3 * 128 * EXPERT
    assert sizes.dense + sizes.experts + sizes.draft_experts + sizes.tables == report(RELEASE).nbytes
    assert sizes.dense_read + TOKEN == pytest.approx(13.03e9, rel=2e-3)
    assert (sizes.table_reads, sizes.table_row) == (2 * 48, 48 * 264)


@pytest.mark.parametrize("name", PRESETS)
def test_dense_forms(name: str) -> None:
    stored, half, full = (sizes_of(preset(name), held) for held in ("stored", "bfloat16", "float32"))
    assert stored.dense < half.dense < full.dense
    assert full.dense < 2 * half.dense, "float32 parameters do not grow"
    assert stored.experts == half.experts == full.experts


def test_expert_size_is_the_stores() -> None:
    store = ExpertStore(object(), RELEASE, Numerics(), 1 << 35)  # type: ignore[arg-type]
    assert store.nbytes((7, 3)) == EXPERT
    store.close()


def test_everything_from_disk() -> None:
    """Dense weights fit, not one token's experts: every expert comes from the disk."""
    machine = Machine(disk_gbps=2, ram_gb=22, ram_gbps=26, disk_kiops=50)
    result = fit(RELEASE, machine, held="bfloat16", context=8192)
    dense = sizes_of(RELEASE, "bfloat16")
    assert result.resident_in == "RAM"
    assert tiers(result).get("RAM", 0.0) == 0.0
    assert tiers(result)["disk"] == 1.0
    resident_s = (dense.dense_read + cache_read(RELEASE, 8192)) / 26e9
    disk_s, table_s = TOKEN / 2e9, 96 / 50e3
    assert result.low == pytest.approx(1 / (resident_s + disk_s + table_s))
    assert result.high == pytest.approx(1 / max(resident_s, disk_s + table_s))


def test_a_cache_finds_its_share_if_it_holds_a_token() -> None:
    """Free RAM of 100 GB finds 100 / 296 of what is asked; of less than one token's experts nothing."""
    dense = sizes_of(RELEASE, "stored").dense + cache_bytes(RELEASE, 4096)
    everything = (40 * 384 + 3 * 128) * EXPERT
    for free, share in ((100e9, 100e9 / everything), (TOKEN + 10, (TOKEN + 10) / everything), (TOKEN - 10, 0.0)):
        machine = Machine(disk_gbps=4, ram_gb=(dense + free) / GB + 1, ram_gbps=100)
        result = fit(RELEASE, machine, held="stored")
        assert tiers(result)["RAM"] == pytest.approx(share)
        assert tiers(result)["disk"] == pytest.approx(1 - share)
        assert sum(tier.read for tier in result.tiers) == pytest.approx(TOKEN)


@pytest.mark.parametrize("held", [8, 100, 250])
def test_the_assumed_hits_are_those_of_the_cache(held: int) -> None:
    """The cache that serves experts, under uniform routing: 8 layers of 48 experts, 2 a token, room for some."""
    layers, experts, active = 8, 48, 2
    cache: BoundedCache[tuple[int, int], int] = BoundedCache(lambda key: 0, lambda key: 10, 10 * held, name="uniform")
    choice = random.Random(held)
    for step in range(360):
        if step == 60:
            warm = cache.counters()
        for layer in range(layers):
            with cache.hold([(layer, index) for index in choice.sample(range(experts), active)]):
                pass
    counters = cache.counters()
    found = (counters.hits - warm.hits) / (300 * layers * active)
    sizes = Sizes(
        dense=0, dense_read=0, expert=10, experts=10 * layers * experts, draft_experts=0, tables=0, table_reads=0, table_row=0
    )
    tiers, _ = tiers_of(sizes, Machine(disk_gbps=1, ram_gb=1), 10 * layers * active, 0, 10 * held)
    assert next(tier.share for tier in tiers if tier.name == "RAM") == pytest.approx(found, abs=0.02)
    cache.close()


def test_three_tiers() -> None:
    """24 GB of GPU: dense weights and some experts there, RAM's over the link, the rest from the disk."""
    machine = Machine(disk_gbps=7, ram_gb=128, gpu_gb=24, gpu_gbps=1000, link_gbps=25)
    result = fit(RELEASE, machine, held="stored")
    sizes = sizes_of(RELEASE, "stored")
    everything = sizes.experts + sizes.draft_experts
    gpu = 24e9 - sizes.dense - cache_bytes(RELEASE, 4096)
    shares = gpu / everything, 127e9 / everything
    assert result.resident_in == "GPU"
    assert tiers(result) == pytest.approx({"GPU": shares[0], "RAM": shares[1], "disk": 1 - sum(shares)})
    seconds = {
        "GPU": (sizes.dense_read + cache_read(RELEASE, 4096) + shares[0] * TOKEN) / 1e12,
        "RAM": shares[1] * TOKEN / 25e9,
        "disk": (1 - sum(shares)) * TOKEN / 7e9 + 96 / 100e3,
    }
    assert result.low == pytest.approx(1 / sum(seconds.values()))
    assert result.high == pytest.approx(1 / max(seconds.values()))


def test_memory_beyond_the_experts_holds_tables() -> None:
    sizes = sizes_of(RELEASE, "stored")
    everything = sizes.experts + sizes.draft_experts
    rest = sizes.tables // 4
    machine = Machine(disk_gbps=7, ram_gb=(sizes.dense + cache_bytes(RELEASE, 4096) + everything + rest) / GB + 1)
    result = fit(RELEASE, machine, held="stored")
    assert tiers(result) == {"RAM": 1.0}
    assert result.tables_share == pytest.approx(0.25)
    assert result.table_s == pytest.approx(0.75 * 96 / 100e3)
    assert fit(RELEASE, replace_machine(machine, ram_gb=1000), held="stored").table_s == 0.0


def replace_machine(machine: Machine, **changes: float) -> Machine:
    values = {name: getattr(machine, name) for name in Machine.__dataclass_fields__}
    return Machine(**{**values, **changes})


@pytest.mark.parametrize("field", ["disk_gbps", "ram_gb", "gpu_gb", "ram_gbps", "gpu_gbps", "link_gbps", "disk_kiops"])
def test_a_better_machine_is_never_slower(field: str) -> None:
    machine = Machine(disk_gbps=2, ram_gb=40, gpu_gb=16, ram_gbps=50)
    before = fit(RELEASE, machine, held="stored")
    after = fit(RELEASE, replace_machine(machine, **{field: 2 * getattr(machine, field)}), held="stored")
    assert after.low >= before.low
    assert after.prefill_low >= before.prefill_low


def test_distinct_experts() -> None:
    assert distinct(384, 6, 1) == pytest.approx(6)
    assert distinct(384, 6, 16) == pytest.approx(85.5, abs=0.05)
    assert distinct(384, 6, 64) == pytest.approx(244, abs=0.5)
    assert distinct(8, 8, 5) == 8


def test_streams_share_dense_weights() -> None:
    """16 streams read the dense weights once and 85.5 experts a layer: more tokens a second, fewer than 16 times as many."""
    machine = Machine(disk_gbps=7, ram_gb=400, ram_gbps=100)
    one, many = fit(RELEASE, machine, held="stored"), fit(RELEASE, machine, held="stored", streams=16)
    assert many.distinct_experts == pytest.approx(85.5, abs=0.05)
    assert one.low < many.low < 16 * one.low
    assert many.cache_bytes == 16 * one.cache_bytes


def test_prefill_reads_the_encoder_half() -> None:
    machine = Machine(disk_gbps=7, ram_gb=400, ram_gbps=100)
    result = fit(RELEASE, machine, held="stored", chunk=512)
    experts = 20 * distinct(384, 6, 512) * EXPERT
    assert experts == pytest.approx(144.4e9, rel=1e-3)
    assert result.prefill_low == pytest.approx(512 / (experts / 100e9 + result.resident_s / 2), rel=1e-9)


def test_what_does_not_fit_says_how_much_is_lacking() -> None:
    result = fit(RELEASE, Machine(disk_gbps=2, ram_gb=8))
    need = sizes_of(RELEASE, "bfloat16").dense + cache_bytes(RELEASE, 4096)
    assert result.lacking == need - 7e9
    assert result.low == result.high == 0
    text = printed(result)
    assert "does not fit" in text
    assert "11.93 GB more RAM would" in text
    enough = Machine(disk_gbps=2, ram_gb=8 + result.lacking / GB)
    assert fit(RELEASE, enough).lacking == 0


def test_cache_bytes_follow_the_page_layout() -> None:
    windows = 43 * 128 * 528
    assert cache_bytes(RELEASE, 1) == 113_920 + windows
    assert cache_bytes(RELEASE, 128 * 10) == 1_139_200 + windows
    assert cache_bytes(RELEASE, 128 * 10 + 1) == 11 * 113_920 + windows


def test_cache_read_at_one_million_tokens() -> None:
    """40 windows, 38 selections of 512 rows, three scans of n/2 keys, one of n, four of the candidate pool."""
    n = 1 << 20
    expected = 40 * 128 * 528 + 38 * 512 * 288 + (3 * n // 2 + n + 4 * 16384) * 68
    assert cache_read(RELEASE, n) == expected
    assert expected == pytest.approx(0.19e9, rel=0.03)


@pytest.mark.parametrize("name", PRESETS)
def test_prints_for_every_preset(name: str) -> None:
    text = printed(fit(preset(name), Machine(disk_gbps=7, ram_gb=64), context=256))
    for words in ("Classes", "One decode step", "nothing overlaps", "all overlaps", "uniform routing", "compute is not counted"):
        assert words in text
    if name == "v41-flash":
        for words in ("384 (1 - (1 - 6/384)^1) = 6", "40 x 6 x 18,800,640 = 4.512 GB", "share found in a cache of C bytes"):
            assert words in text


def test_a_model_without_tables_or_drafts() -> None:
    config = replace(
        preset("tiny"),
        engram_layer_ids=(),
        engram_num_embeddings=(),
        n_mtp_layers=0,
        compress_ratios=preset("tiny").compress_ratios[:8],
        dspark_target_layer_ids=(),
    )
    result = fit(config, Machine(disk_gbps=1, ram_gb=2), context=64)
    assert result.table_s == 0.0
    assert "Engram" not in printed(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disk_gbps": 0.0}, "disk_gbps is 0.0; give a number above 0"),
        ({"disk_gbps": -1.0}, "disk_gbps is -1.0"),
        ({"ram_gb": -0.5}, "ram_gb is -0.5; give a number 0 or more"),
        ({"gpu_gb": float("nan")}, "gpu_gb is nan"),
        ({"ram_gbps": float("inf")}, "ram_gbps is inf"),
    ],
)
def test_machines_that_cannot_be(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(**{"disk_gbps": 1.0, "ram_gb": 1.0, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held": "fp8"}, "held is 'fp8'; known: stored, bfloat16, float32"),
        ({"context": 0}, r"context is 0; it must lie in 1 \.\. 1048576"),
        ({"context": 1 << 21}, "context is 2097152"),
        ({"streams": 0}, "streams is 0"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_wishes_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(RELEASE, Machine(disk_gbps=1, ram_gb=64), **options)  # type: ignore[arg-type]
