"""`kvist bench v41-flash-slim`: released widths with 128 experts a layer, random weights, on one card.

Owns which cases there are, in which order they are measured, what fits, which are done, and the report; the parts are measured
by `slim_*.py` on the runner of `kvist.engine.card`. Every figure carries the words of `LABEL`: it is a proxy, and stands beside
no published figure without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console

from benchmarks.cases import Better
from benchmarks.gpu_timing import BF16_FLOPS_PER_S, HBM_BYTES_PER_S
from benchmarks.rows import RESULTS, Machine, Row, append, load, make_row
from benchmarks.slim_models import BENCH, label_of, measured, pass_floor_ms
from kvist.config import ModelConfig
from kvist.engine.card import cost
from kvist.page_layout import PageLayout
from kvist.plan.flops import FlopModel
from kvist.presets import preset

LABEL = label_of(preset(BENCH))
CONTEXTS = (8192, 131072, 524288, 1048576)
BATCHES = (1, 4, 16, 64)
PARTS = ("decode", "verify", "speculation", "prefill", "replay", "restore")
FEW_CONTEXTS = 8
"""Distinct contexts of a batch whose own ones would not fit; the requests share them, and the case says so."""
HITS, SUFFIXES = 8, (16, 512, 1024)
THROUGH = "from host memory through the engine to the first token"
PLACES = ("from host memory", "to host memory", "from disk", THROUGH)
SPARE_BYTES = 4e9
"""Device memory left to libraries, graphs and what a step makes."""
CHUNK = 16384
"""Rows of a pass, if nothing else is asked for: 41 us a row in the midst of 128K tokens, 43 with 8,192 and 44 with 4,096."""
WARM_STEPS, TIMED_STEPS = 4, 48
ACCEPTANCE = 3.5
"""Tokens a cycle of speculation where acceptance is simulated."""
FIRST = (
    ("decode", 1, 131072), ("decode", 16, 131072), ("decode", 64, 131072), ("decode", 1, 8192), ("decode", 1, 1048576),
    ("prefill", 1, 131072), ("restore", 1, 131072), ("replay", HITS, 131072), ("speculation", 1, 131072),
    ("speculation", 16, 131072), ("speculation", 64, 131072), ("speculation", 4, 131072), ("prefill", 1, 1048576),
    ("verify", 1, 131072), ("verify", 16, 131072), ("verify", 64, 131072), ("verify", 4, 131072),
)  # fmt: skip
"""What `--all` measures first, should the time end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement; `distinct` contexts of the batch have pages of their own. `suffix`: new tokens behind a hit of `context`
    tokens (replay); `place`: one of `PLACES` (restore)."""

    batch: int
    context: int
    distinct: int
    part: str = "decode"
    suffix: int = 0
    place: str = ""
    label: str = LABEL

    @property
    def name(self) -> str:
        """The case as rows name it."""
        if self.part == "restore":
            return f"pages of {self.context:,} tokens {self.place}; {self.label}"
        if self.part == "replay":
            return f"replay, {self.batch} hits of {self.context:,} tokens + {self.suffix:,} new ones; {self.label}"
        shared = "" if self.distinct == self.batch else f" ({self.distinct} distinct contexts shared by the rows)"
        simulated = f", {ACCEPTANCE} tokens a cycle simulated" if self.part == "speculation" else ""
        return f"{self.part}, {self.batch} x {self.context:,} tokens{shared}{simulated}; {self.label}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a command asked for; `None`: the default list (8K and 128K, batch 1), `every`: all contexts and batches; `only`: parts
    with commas between them; `experts`, `layers`: another model (`slim_models.py`)."""

    only: str | None = None
    context: int | None = None
    batch: int | None = None
    every: bool = False
    budget_minutes: float = 8.5
    engram_gb: float | None = None
    again: bool = False
    chunk: int | None = None
    experts: int | None = None
    layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case's value, in milliseconds or as `unit` says; `text` is the report's line."""

    value: float
    text: str
    floor: float | None = None
    unit: str = "ms"
    better: Better = "lower"
    peers: dict[str, float] = field(default_factory=dict)


def needed_bytes(config: ModelConfig, case: Case) -> float:
    """Device memory of a case."""
    weights, context = cost.weight_bytes(config) + cost.draft_bytes(config), case.context + case.suffix
    passes = 0.0
    if case.part in ("prefill", "replay", "restore"):
        # as many rows as a replay of all hits has, or a chunk
        passes = cost.pass_bytes(config, max(CHUNK, case.batch * (config.window_size + case.suffix)))
    return weights + cost.state_bytes(config, case.batch, context, case.distinct) + passes + SPARE_BYTES


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Operations of a prompt with the causal encoder-decoder split."""
    return tokens * FlopModel(config).prefill(tokens).total


def cases_of(config: ModelConfig, wanted: Wanted, device_bytes: float) -> list[Case]:
    """The cases in order. Raises ValueError for a part that there is not, or sizes out of range."""
    parts = tuple(wanted.only.split(",")) if wanted.only is not None else PARTS if wanted.every else ("decode",)
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"there is no part {part!r}; parts: {', '.join(PARTS)}")
    if not config.n_mtp_layers and (needless := {"verify", "speculation"} & set(parts)):
        raise ValueError(f"{', '.join(sorted(needless))}: fewer layers leave no draft blocks; ask for all or for other parts")
    if wanted.context is not None:
        least = 2 * (WARM_STEPS + TIMED_STEPS)
        if not least <= wanted.context <= config.max_seq_len:
            raise ValueError(f"--context is {wanted.context}; from {least} to {config.max_seq_len} tokens")
    if wanted.batch is not None and not 1 <= wanted.batch <= BATCHES[-1]:
        raise ValueError(f"--batch is {wanted.batch}; from 1 to {BATCHES[-1]} requests")
    if wanted.chunk is not None and not 128 <= wanted.chunk <= 1 << 15:
        raise ValueError(f"--chunk is {wanted.chunk}; from 128 to {1 << 15} rows")
    found = [_fitted(config, case, device_bytes) for part in parts for case in _of_part(part, config, wanted)]
    return sorted(found, key=_rank) if wanted.every else found


def _of_part(part: str, config: ModelConfig, wanted: Wanted) -> Iterator[Case]:
    contexts: tuple[int, ...] = CONTEXTS if wanted.every else (8192, 131072)
    batches: tuple[int, ...] = BATCHES if wanted.every else (1,)
    contexts = contexts if wanted.context is None else (wanted.context,)
    batches = batches if wanted.batch is None else (wanted.batch,)
    base = Case(batch=1, context=contexts[0], distinct=1, part=part, label=label_of(config))
    if part == "prefill":
        yield from (replace(base, context=context) for context in contexts)
    elif part == "replay":
        hit = wanted.context or 131072
        for suffix in SUFFIXES:
            # A whole prompt may be no longer than the model's context.
            yield replace(base, batch=HITS, distinct=HITS, context=min(hit, config.max_seq_len - suffix), suffix=suffix)
    elif part == "restore":
        yield from (replace(base, context=wanted.context or 131072, place=place) for place in PLACES)
    else:
        yield from (replace(base, batch=n, distinct=n, context=context) for n in batches for context in contexts)


def _fitted(config: ModelConfig, case: Case, device_bytes: float) -> Case:
    if needed_bytes(config, case) > device_bytes and case.batch > FEW_CONTEXTS:
        return replace(case, distinct=FEW_CONTEXTS)
    return case


def _rank(case: Case) -> tuple[int, int]:
    key = (case.part, case.batch, case.context)
    return (FIRST.index(key), 0) if key in FIRST else (len(FIRST), PARTS.index(case.part))


def run(wanted: Wanted, command: str, console: Console) -> list[Row]:
    """Check, measure what is not measured yet at this commit, keep the rows. Raises GpuUnavailable, ValueError, WrongResult."""
    import torch

    from kvist.kernels.device import GpuUnavailable, interpreted, require_gpu

    config = measured(wanted.experts, wanted.layers)
    need = needed_bytes(config, Case(batch=1, context=CONTEXTS[0], distinct=1))
    cases_of(config, wanted, need)
    where = f"{BENCH} needs one CUDA card of compute capability 9.0 or newer with {need / 1e9:.0f} GB of memory"
    if interpreted():
        raise GpuUnavailable(f"{where}; TRITON_INTERPRET=1 runs kernels without one, which measures nothing")
    try:
        require_gpu()
    except GpuUnavailable as error:
        raise GpuUnavailable(f"{where}: {error.missing}", f"`kvist plan {BENCH}` runs anywhere") from error
    torch.cuda.set_device(0)
    free, _ = torch.cuda.mem_get_info()
    cases = cases_of(config, wanted, free)
    _show_plan(config, cases, free, console)
    machine = Machine.here()
    done = set() if wanted.again else _done(machine)
    todo = [case for case in cases if needed_bytes(config, case) <= free and case.name not in done]
    for case in cases:
        if case.name in done:
            console.print(f"measured at this commit already: {case.name}", highlight=False)
    if not todo:
        return []
    stop = time.monotonic() + 60 * wanted.budget_minutes
    rows = []
    for row in _measure(config, todo, wanted, stop, machine, command, console):
        append([row], machine.key)
        rows.append(row)
    left = len(todo) - len(rows)
    if left:
        console.print(
            f"{left} cases left when the budget of {wanted.budget_minutes} minutes ended; the same command goes on there"
        )
    return rows


def _done(machine: Machine) -> set[str]:
    """Cases that this commit has been measured with on such a card; a changed tree, or one without history, never was."""
    if machine.commit.endswith(("-dirty", "unknown")) or not RESULTS.exists():
        return set()
    return {row.case for key, row in load() if key == machine.key and row.bench == BENCH and row.commit == machine.commit}


def _show_plan(config: ModelConfig, cases: list[Case], free: float, console: Console) -> None:
    console.print(f"{BENCH}: {label_of(config)}; {free / 1e9:.1f} GB of device memory free", highlight=False)
    for case in cases:
        need = needed_bytes(config, case)
        fits = "" if need <= free else ", DOES NOT FIT"
        console.print(
            f"  {case.name}: {_expected(config, case)}; holds {need / 1e9:.1f} GB{fits}", highlight=False, soft_wrap=True
        )


def _expected(config: ModelConfig, case: Case) -> str:
    """What a case must move or compute at least."""
    if case.part == "prefill":
        flops = prefill_flops(config, case.context)
        return f"{flops / 1e12:,.0f} TFLOP, floor {1e3 * flops / BF16_FLOPS_PER_S:,.0f} ms"
    if case.part == "replay":
        replayed, resumed = cost.replay_rows(config, case.batch, case.suffix)
        floors = [pass_floor_ms(config, rows) for rows in (replayed, resumed)]
        return (
            f"rows of both halves {replayed}, with stored windows {resumed}; floors {floors[0]:.1f} and {floors[1]:.1f} ms: "
            f"{floors[0] / floors[1]:.2f}x"
        )
    if case.part == "restore":
        layout = PageLayout.of(config)
        return f"{-(-case.context // layout.page_tokens) * layout.page_bytes / 1e6:.0f} MB"
    moved = cost.step_bytes(config, case.batch, case.context)
    return (
        f"{moved / 1e9:.2f} GB a plain step, floor {1e3 * moved / HBM_BYTES_PER_S:.2f} ms "
        f"({case.batch * HBM_BYTES_PER_S / moved:,.0f} tokens/s)"
    )


def _measure(
    config: ModelConfig, cases: list[Case], wanted: Wanted, stop: float, machine: Machine, command: str, console: Console
) -> Iterator[Row]:
    """Rows as they are measured, until the budget ends."""
    from benchmarks.slim_parts import Bench

    start = time.monotonic()

    def said(what: str) -> None:
        console.print(f"[{time.monotonic() - start:6.1f} s] {what}", highlight=False, markup=False, soft_wrap=True)

    bench = Bench(config, {case.part for case in cases}, wanted, said)
    for case in cases:
        if time.monotonic() > stop:
            return
        found = bench.measure(case)
        said(f"{case.name}: {found.text} ({case.label})")
        yield make_row(
            machine, BENCH, case.name, found.value, found.unit, found.better, floor=found.floor, peers=found.peers,
            command=command,
        )  # fmt: skip
