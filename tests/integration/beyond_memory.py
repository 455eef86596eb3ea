"""Run as a program: continue a prompt with a model, under a limit on this process's private memory, and print what happened.

Also writes the synthetic checkpoints that this is tried on. The limit is RLIMIT_DATA: whatever the process allocates or maps
for itself counts, the kernel's page cache does not.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvist.checkpoint import build_model, fetch_counters
from kvist.checkpoint.save import write_checkpoint
from kvist.config import ModelConfig, replace
from kvist.engine.session import Sequence, Session
from kvist.inventory import Parameter, Storage
from kvist.model.initialise import start_value
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.quant import quantise_fp8_rows, quantise_fp8_weight


def many_experts(experts: int, width: int) -> ModelConfig:
    """The toy's topology (drafts and Engram too) with wide layers of many experts, which are nearly all of its bytes."""
    return replace(preset("tiny"), dim=width, moe_inter_dim=width, n_routed_experts=experts)


def write_random(config: ModelConfig, out: Path, shard_bytes: int) -> list[Path]:
    """A checkpoint of the released format: random experts as fast as the disk takes them, the rest as in `random_model`."""
    generator = torch.Generator().manual_seed(0)

    def planes(parameter: Parameter) -> Iterator[tuple[Tensor, ...]]:
        if parameter.storage is Storage.FP4:
            codes, scales = (spec.shape for spec in parameter.specs())
            # A usual E2M1 code is about 2; the exponent makes a row's length about 1.
            exponent = 126 - round(parameter.shape[1] ** 0.5).bit_length()
            yield (
                torch.randint(0, 256, codes, generator=generator, dtype=torch.uint8),
                torch.full(scales, exponent, dtype=torch.uint8),
            )
            return
        noise = torch.randn(parameter.shape, generator=generator)
        values = start_value(parameter.name, noise)
        if parameter.storage in (Storage.FP8, Storage.TABLE):
            yield (quantise_fp8_weight if parameter.storage is Storage.FP8 else quantise_fp8_rows)(values)
        else:
            yield (values.bfloat16() if parameter.storage is Storage.BF16 else values,)

    return write_checkpoint(config, planes, None, out, shard_bytes)


def private_bytes() -> int:
    """What counts against RLIMIT_DATA now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def peak_resident_bytes() -> int:
    """The most physical memory that this program has had; `ru_maxrss` would begin with what its parent held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(folder: str, dtype: str, budget: int, allowance: int, prompt: int) -> None:
    """Continue `prompt` tokens with `budget` bytes of experts (0: a resident model) and `allowance` private bytes beyond an
    idle process (0: no limit)."""
    threading.stack_size(1 << 18)
    torch.set_num_threads(1)
    torch.zeros(64, 64) @ torch.zeros(64, 64)  # what torch sets up on first use is not the model's
    idle, idle_peak = private_bytes(), peak_resident_bytes()
    if allowance:
        resource.setrlimit(resource.RLIMIT_DATA, (idle + allowance, resource.RLIM_INFINITY))
    numerics = Numerics(dtype=getattr(torch, dtype), impl="cpu" if dtype == "float32" else "ref")
    classes = torch.arange(256) % preset("tiny").engram_compressed_vocab_size
    try:
        model = build_model(
            folder, numerics=numerics, classes=classes, access="read", engram="read", expert_budget_bytes=budget or None
        )
        session = Session(model, chunk=64)
        sequence = Sequence(0, torch.arange(4, 4 + prompt))
        logits = session.prefill([sequence])
        for _ in range(8):
            sequence.append(int(logits.argmax()))
            logits = session.decode([sequence])
    except (MemoryError, RuntimeError) as error:
        print(json.dumps({"failed": str(error)}))
        return
    experts = fetch_counters(model).experts
    result = {
        "tokens": sequence.ids_T.tolist(),
        "sum": float(logits.double().sum()),
        "private": private_bytes() - idle,
        "peak_resident": peak_resident_bytes() - idle_peak,
        "read": experts.bytes_read if experts else 0,
        "peak_held": experts.peak_bytes if experts else 0,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
