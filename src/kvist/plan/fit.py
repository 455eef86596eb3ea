"""What a machine makes of a configuration: where each class of weights lies, and the tokens a second its bytes allow.

Owns placement and the byte arithmetic of decode and prefill, formula by formula. Knows sizes only: no kernel is timed, compute
is not counted, so real speed is below. Must not know how a result is printed (render_fit.py). Sources: issue 3 item 9; the cache
that holds experts is least recently used (`checkpoint.bounded`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from kvist.config import LayerMode, ModelConfig
from kvist.inventory import DTYPE_BYTES, Parameter, Storage, parameters, part_of
from kvist.page_layout import PageLayout

GB = 10**9
HELD_BYTES = {"bfloat16": 2, "float32": 4}
HELD_FORMS = ("stored", *HELD_BYTES)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes in 10^9 bytes, rates in 10^9 bytes a second, `disk_kiops` in thousands of random 4 KiB reads a second.

    `link_gbps`: host to device. `reserve_gb`: host memory left to the program and the system. Raises ValueError for a rate
    that is not positive or a size below 0.
    """

    disk_gbps: float
    ram_gb: float
    gpu_gb: float = 0.0
    ram_gbps: float = 20.0
    gpu_gbps: float = 1000.0
    link_gbps: float = 25.0
    disk_kiops: float = 100.0
    reserve_gb: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            rate = field.name.endswith(("gbps", "kiops"))
            if not 0 <= value <= 1e9 or (rate and value == 0):
                least = "above 0" if rate else "0 or more"
                raise ValueError(f"{field.name} is {value}; give a number {least} and at most 1e9")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a configuration by what happens to them in decode.

    `dense`: kept whole and, but for `looked_up` and drafts and vision in it, read whole for every step; `dense_read`: that
    part. `expert`: one routed expert. Tables are looked up: `table_reads` reads a token of `table_row` bytes in all.
    """

    dense: int
    dense_read: int
    expert: int
    experts: int
    draft_experts: int
    tables: int
    table_reads: int
    table_row: int


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A share of the routed experts: `held` bytes there, `read` bytes a step from there, at `gbps`, taking `seconds`."""

    name: str
    share: float
    held: float
    read: float
    gbps: float

    @property
    def seconds(self) -> float:
        """Time a step spends on this tier's expert bytes."""
        return self.read / (self.gbps * GB)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answer. `lacking` > 0: bytes of memory short of what must be resident; then there are no tiers and no rates.

    `resident_in`: "GPU" or "RAM". Seconds are of one step of `streams` tokens. Rates are tokens a second of all streams: `low`
    if nothing overlaps, `high` if the slowest resource hides all others.
    """

    config: ModelConfig
    machine: Machine
    sizes: Sizes
    held: str
    context: int
    streams: int
    cache_bytes: int
    cache_read: float
    resident_in: str
    lacking: int
    distinct_experts: float
    tiers: tuple[Tier, ...] = ()
    tables_share: float = 0.0
    resident_s: float = 0.0
    table_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    chunk: int = 0
    prefill_low: float = 0.0


def fit(
    config: ModelConfig,
    machine: Machine,
    *,
    held: str = "bfloat16",
    context: int = 4096,
    streams: int = 1,
    chunk: int = 512,
) -> Fit:
    """Place `config` on `machine` and say what decode reads. `held`: dense weights as `stored`, in `bfloat16` or `float32`.

    Raises ValueError for an unknown form, a context beyond the model's, or counts below 1.
    """
    if held not in HELD_FORMS:
        raise ValueError(f"held is {held!r}; known: {', '.join(HELD_FORMS)}")
    for name, value, most in (("context", context, config.max_seq_len), ("streams", streams, 1 << 20), ("chunk", chunk, 1 << 20)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; it must lie in 1 .. {most}")
    sizes = sizes_of(config, held)
    cache = streams * cache_bytes(config, context)
    resident = sizes.dense + cache
    gpu, ram = round(machine.gpu_gb * GB), max(0, round((machine.ram_gb - machine.reserve_gb) * GB))
    on_gpu = resident <= gpu
    lacking = 0 if on_gpu else max(0, resident - ram)
    start = Fit(
        config=config,
        machine=machine,
        sizes=sizes,
        held=held,
        context=context,
        streams=streams,
        cache_bytes=cache,
        cache_read=streams * cache_read(config, context),
        resident_in="GPU" if on_gpu else "RAM",
        lacking=lacking,
        distinct_experts=distinct(config.n_routed_experts, config.n_activated_experts, streams),
        chunk=chunk,
    )
    if lacking:
        return start
    return _rates(start, gpu - resident if on_gpu else 0.0, ram if on_gpu else ram - resident)


def _rates(start: Fit, gpu_free: float, ram_free: float) -> Fit:
    machine, sizes, config = start.machine, start.sizes, start.config
    wanted = config.n_layers * start.distinct_experts * sizes.expert
    tiers, tables_left = tiers_of(sizes, machine, wanted, gpu_free, ram_free)
    tables_share = min(1.0, tables_left / sizes.tables) if sizes.tables else 1.0
    rate = machine.gpu_gbps if start.resident_in == "GPU" else machine.ram_gbps
    resident_s = (sizes.dense_read + start.cache_read) / (rate * GB)
    table_s = start.streams * sizes.table_reads * (1 - tables_share) / (machine.disk_kiops * 1000)
    parts = [resident_s, table_s, *(tier.seconds for tier in tiers)]
    # What shares a resource cannot overlap: expert bytes in the memory that also holds the dense weights.
    by_resource: dict[str, float] = {start.resident_in: resident_s}
    for tier in tiers:
        by_resource[tier.name] = by_resource.get(tier.name, 0.0) + tier.seconds
    by_resource["disk"] = by_resource.get("disk", 0.0) + table_s
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    values |= {
        "tiers": tiers,
        "tables_share": tables_share,
        "resident_s": resident_s,
        "table_s": table_s,
        "low": start.streams / sum(parts),
        "high": start.streams / max(by_resource.values()),
        "prefill_low": _prefill(start, tiers, resident_s),
    }
    return Fit(**values)


def tiers_of(sizes: Sizes, machine: Machine, wanted: float, gpu_free: float, ram_free: float) -> tuple[tuple[Tier, ...], float]:
    """GPU, RAM and disk shares of the experts when a step reads `wanted` bytes of them; bytes of RAM left for tables.

    Uniform routing through least-recently-used caches: a cache of C bytes finds C / (all experts) of what it is asked for,
    and nothing at all if C is less than one step reads, for then every expert is gone before its layer comes again.
    """
    everything = sizes.experts + sizes.draft_experts
    gpu = min(gpu_free, everything) if gpu_free >= wanted else 0.0
    ram = min(ram_free, everything - gpu)
    found = ram if ram >= min(wanted, everything - gpu) else 0.0
    shares = gpu / everything, found / everything
    with_gpu = machine.gpu_gb > 0
    rows = (
        ("GPU", shares[0], gpu, machine.gpu_gbps),
        ("RAM", shares[1], ram, machine.link_gbps if with_gpu else machine.ram_gbps),
        ("disk", max(0.0, 1 - sum(shares)), 0.0, machine.disk_gbps),
    )
    tiers = tuple(Tier(name=n, share=s, held=h, read=s * wanted, gbps=g) for n, s, h, g in rows if s or h)
    return tiers, ram_free - ram


def _prefill(start: Fit, tiers: tuple[Tier, ...], resident_s: float) -> float:
    """Prompt tokens a second by bytes alone: each chunk reads the encoder half's dense weights and the experts it chooses."""
    config = start.config
    chosen = distinct(config.n_routed_experts, config.n_activated_experts, start.chunk)
    layers = max(1, config.plan.decoder_start)
    wanted = layers * chosen * start.sizes.expert
    seconds = sum(tier.share * wanted / (tier.gbps * GB) for tier in tiers)
    return start.chunk / (seconds + resident_s * layers / config.n_layers)


def distinct(experts: int, active: int, tokens: float) -> float:
    """Expected different experts of a layer that `tokens` tokens choose, each `active` of `experts` uniformly."""
    return experts * (1 - (1 - active / experts) ** tokens)


@lru_cache(maxsize=16)
def sizes_of(config: ModelConfig, held: str) -> Sizes:
    """Bytes by class, dense weights in the form `held`."""
    sums = {"dense": 0, "dense_read": 0, "expert": 0, "experts": 0, "draft_experts": 0, "tables": 0}
    for parameter in parameters(config):
        if parameter.storage is Storage.TABLE:
            sums["tables"] += parameter.nbytes
        elif ".experts." in parameter.name:
            sums["experts" if parameter.layer < config.n_layers else "draft_experts"] += parameter.nbytes
            sums["expert"] += parameter.nbytes if parameter.name.startswith("layers.0.ffn.experts.0.") else 0
        else:
            sums["dense"] += held_bytes(parameter, held)
            sums["dense_read"] += _read_in_decode(config, parameter, held)
    row = config.engram_head_dim + config.engram_head_dim // 32
    rows = len(config.engram_layer_ids) * config.engram_columns if config.engram_layer_ids else 0
    return Sizes(**sums, table_reads=2 * rows, table_row=rows * row)


def held_bytes(parameter: Parameter, held: str) -> int:
    """Bytes of a dense parameter in memory; float32 ones of the file stay float32."""
    if held == "stored":
        return parameter.nbytes
    return parameter.count * (DTYPE_BYTES["F32"] if parameter.storage is Storage.F32 else HELD_BYTES[held])


def _read_in_decode(config: ModelConfig, parameter: Parameter, held: str) -> int:
    if part_of(parameter.kind) not in ("backbone", "engram") or parameter.layer >= config.n_layers:
        return 0
    if parameter.kind == "embedding":
        return held_bytes(parameter, held) // config.vocab_size
    return held_bytes(parameter, held)


def cache_bytes(config: ModelConfig, context: int) -> int:
    """Global rows of `context` tokens in whole pages, and the windows of all layers and drafts."""
    layout = PageLayout.of(config)
    windows = (config.n_layers + config.n_mtp_layers) * config.window_size * config.window_row_bytes
    return -(-context // layout.page_tokens) * layout.page_bytes + windows


def cache_read(config: ModelConfig, context: int) -> float:
    """Bytes of cache that one token reads with `context` tokens before it: windows, selected rows, scored index keys."""
    total = 0.0
    for spec in config.plan.layers:
        total += min(context, config.window_size) * config.window_row_bytes
        if not spec.ratio:
            continue
        rows = context // spec.ratio
        total += min(rows, config.index_topk) * config.main_row_bytes
        if spec.selects:
            pooled = spec.mode is LayerMode.REINDEX and spec.candidate_source is not None
            pool = config.candidate_topk_blocks * config.candidate_block_size
            total += (min(rows, pool) if pooled else rows) * config.key_row_bytes
    return total
