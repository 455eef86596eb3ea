"""The list of benchmarks: each name, and the module under `benchmarks/` whose `BENCHMARK` describes it.

Modules are imported only when their benchmark is run, so that a broken or GPU-only one does not stop the others.
To add one: write `benchmarks/<module>.py` with `BENCHMARK = Benchmark(...)` and a line here.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.cases import Benchmark

MODULES: dict[str, str] = {
    "nano-decode-b1": "nano_decode",
    "nano-decode-b16": "nano_batch",
    "nano-prefill": "nano_prefill",
    "cpu-operators": "cpu_operators",
    "nano-quality": "nano_quality",
    "prefix-lookup": "prefix_lookup",
    "page-bookkeeping": "page_bookkeeping",
    "page-store": "page_store",
    "sampler-step": "sampler_step",
    "step-cost": "step_cost",
    "engine": "engine_speed",
    "engine-modes": "engine_modes",
    "replay-cost": "replay_cost",
    "restore-cost": "restore_cost",
    "agent": "agent_trace",
    "server-load": "server_load",
    "replay": "replay_quality",
    "gpu-greedy": "gpu_greedy",
    "gpu-experts": "gpu_experts",
    "gpu-expert-cuts": "gpu_expert_cuts",
    "gpu-linear": "gpu_linear",
    "gpu-row": "gpu_row",
    "gpu-streams": "gpu_streams",
    "gpu-attention": "gpu_attention",
    "gpu-attention-cuts": "gpu_attention_cuts",
    "gpu-select": "gpu_select",
    "gpu-select-cuts": "gpu_select_cuts",
}


def find(name: str) -> Benchmark:
    """The benchmark of that name. Raises `ValueError` that lists the known names."""
    if name not in MODULES:
        known = ", ".join(sorted(MODULES)) or "none yet"
        raise ValueError(f"no benchmark named {name!r}; known: {known}")
    benchmark = import_module(f"benchmarks.{MODULES[name]}").BENCHMARK
    if not isinstance(benchmark, Benchmark) or benchmark.name != name:
        raise ValueError(f"benchmarks/{MODULES[name]}.py must define BENCHMARK with the name {name!r}")
    return benchmark
