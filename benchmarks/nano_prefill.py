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
from benchmarks.nano_prefill import prefill
prefill("cpu", {length})
status = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024)
"""


def prefill(impl: str, length: int, *, quantise: bool = True) -> Tensor:
    """Logits [1,V] behind a prompt that runs as `kvist generate` runs it: on pages where native code takes them."""
    return Session(nano(impl, quantise)).alone(length).prefill([Sequence(0, prompt(length))])


def _check() -> None:
    require_equal(prefill("cpu", 700, quantise=False), prefill("ref", 700, quantise=False), "prefill of 700 tokens")
    require_close(prefill("cpu", 700), prefill("ref", 700), "prefill of 700 tokens")


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
                "cpu": lambda n=length: prefill("cpu", n),  # type: ignore[misc]
                "ref, 1 thread": lambda n=length: on_one_thread(lambda: prefill("ref", n)),  # type: ignore[misc]
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
