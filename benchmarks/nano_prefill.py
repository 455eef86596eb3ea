"""nano, prefill of 4K and 16K tokens on the CPU with the causal encoder-decoder split, and the peak memory of a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from torch import Tensor

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase
from benchmarks.nano_model import (
    gate,
    nano,
    on_one_thread,
    prefilled,
    product_rate,
    prompt,
    require_close,
    require_equal,
    weights_label,
)
from benchmarks.rows import ROOT
from kvist.engine.session import Sequence, Session
from kvist.plan.flops import FlopModel

# VmHWM is this process's own peak; `ru_maxrss` would begin with that of the process that started it.
PEAK = """
from pathlib import Path
from benchmarks.nano_model import prefilled
prefilled("cpu", {length})
status = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024)
"""


def _prefill(impl: str, quantise: bool) -> Tensor:
    return Session(nano(impl, quantise)).prefill([Sequence(0, prompt(700))])


def _check() -> None:
    require_equal(_prefill("cpu", False), _prefill("ref", False), "prefill of 700 tokens")
    require_close(_prefill("cpu", True), _prefill("ref", True), "prefill of 700 tokens")


def _peak(length: int) -> float:
    code = PEAK.format(length=length)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout) / 2**20


def _build(options: Options) -> Iterator[Case]:
    gate()
    lengths = (1024,) if options.quick else (4096, 16384)
    for length in lengths:
        flops = FlopModel(nano("cpu").config).prefill(length).total * length
        yield TimedCase(
            name=f"{length // 1024}K, {weights_label()}",
            variants={
                "cpu": lambda n=length: prefilled("cpu", n),  # type: ignore[misc]
                "ref, 1 thread": lambda n=length: on_one_thread(lambda: prefilled("ref", n)),  # type: ignore[misc]
            },
            subject="cpu",
            check=_check,
            work=length,
            unit="tokens/s",
            floor=length / (flops / product_rate()),
            flops=flops,
        )
    yield CountedCase(
        name=f"peak memory, {lengths[-1] // 1024}K, {weights_label()}",
        count=lambda: _peak(lengths[-1]),
        check=_check,
        unit="MiB",
        better="lower",
        peers={"allowed": 1024.0},
    )


BENCHMARK = Benchmark(
    name="nano-prefill",
    summary="nano on the CPU: prefill with CED in tokens a second at 4K and 16K, the product limit, peak memory",
    build=_build,
)
