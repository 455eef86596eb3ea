"""The training loop: stages, schedule, steps over one or more devices, checkpoints, metrics.

Owns the order of a run and its state. Every stage is a function of progress (0 to 1), by steps or by seconds of training.
Must not know how a loss is computed. Facts 14.2.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvist.config import ModelConfig
from kvist.train.loss import Figures, Share, contribute
from kvist.train.network import Mode
from kvist.train.optimiser import Loads, Optimiser, clip
from kvist.train.sampling import Sampler
from kvist.train.shapes import Geometry
from kvist.train.weights import Weights, start_values, storages

TIER_NAMES = ("prose", "docs", "code", "synthetic")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that shapes a run. Lengths in tokens, fractions of the whole run, rates of the schedule's constant part."""

    steps: int = 1000
    seconds: float | None = None
    step_tokens: int = 65536
    micro_tokens: int = 65536
    short_length: int = 1024
    length: int = 4096
    long_length: int = 16384
    dense_until: float = 0.18
    quantise_from: float = 0.62
    long_from: float = 0.80
    rate: float = 3e-3
    muon_ratio: float = 2.0
    warmup_steps: int = 100
    decay_from: float = 0.60
    final: float = 0.05
    clip: float = 1.0
    bias_speed: float = 2e-3
    seed: int = 1
    log_every: int = 10

    def __post_init__(self) -> None:
        for item in fields(self):
            value, whole = getattr(self, item.name), str(item.type) == "int"
            if value is None and item.name == "seconds":
                continue
            kinds = int if whole else int | float
            least = 0 if item.name in ("seed", "warmup_steps") else 1
            if isinstance(value, bool) or not isinstance(value, kinds) or not (least if whole else 0) <= value <= 1 << 40:
                limit = f"an integer of at least {least}" if whole else "a number of at least 0"
                raise ValueError(f"recipe field {item.name} must be {limit}, got {value!r:.60}")

    def rate_at(self, progress: float, step: int) -> float:
        """Warm-up by steps, constant, then linearly down to `final`."""
        rising = self.rate * min(1.0, (step + 1) / max(1, self.warmup_steps))
        if progress < self.decay_from:
            return rising
        return rising * (1 - (1 - self.final) * (progress - self.decay_from) / (1 - self.decay_from))

    def stage_at(self, progress: float, dtype: torch.dtype) -> tuple[int, Mode]:
        """(sequence length, mode)."""
        length = self.short_length if progress < self.dense_until else self.length
        length = self.long_length if progress >= self.long_from else length
        mode = Mode(
            select=progress >= self.dense_until,
            quantise=progress >= self.quantise_from,
            sampled=max(2, min(length // 16, 256)),
            dtype=dtype,
        )
        return length, mode


@dataclass(kw_only=True)
class Team:
    """The processes of a run; a single one has no group."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def join(device: torch.device) -> Team:
        """The group that the launcher's environment describes."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Team(rank=int(os.environ.get("RANK", "0")), size=size)

    def add(self, tensors: list[Tensor]) -> None:
        """Sum tensors over all processes, in place, in one bucket."""
        if self.size == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def agree(self, value: float, device: torch.device) -> float:
        """Process 0's number."""
        if self.size == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(held, 0)
        return float(held)


@dataclass(kw_only=True)
class Run:
    """A run's state: leaves, optimiser, counters. `positions`: sequences taken so far at each length."""

    config: ModelConfig
    recipe: Recipe
    device: torch.device
    weights: Weights
    optimiser: Optimiser
    step: int = 0
    seconds: float = 0.0
    tokens: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIER_NAMES, 0.0))
    positions: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def start(config: ModelConfig, recipe: Recipe, device: torch.device, values: Weights | None = None) -> Run:
        """A fresh run, from given values or seeded start values."""
        weights = leaves(start_values(config, recipe.seed) if values is None else values, device, trained="layers.")
        return Run(
            config=config,
            recipe=recipe,
            device=device,
            weights=weights,
            optimiser=Optimiser(config, weights, muon_ratio=recipe.muon_ratio),
        )

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        if self.recipe.seconds is not None:
            return self.seconds / self.recipe.seconds
        return self.step / self.recipe.steps

    def save(self, file: Path) -> None:
        """Write everything, appearing as a whole."""
        state = {
            "weights": {name: w.detach() for name, w in self.weights.items()},
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "positions": self.positions,
        }
        partial = file.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(file)

    def load(self, file: Path) -> None:
        """Continue exactly where `save` stood. Raises ValueError for a damaged file or another configuration's."""
        state = _read_state(file, self.device)
        shapes = {name: tuple(value.shape) for name, value in state["weights"].items()}
        if shapes != {name: tuple(weight.shape) for name, weight in self.weights.items()}:
            raise ValueError(f"{file} belongs to another configuration; choose another --out, or the configuration that began it")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimiser.restore(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.tokens, self.positions = state["tokens"], state["positions"]


def _read_state(file: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        if "tried to allocate" in str(error).lower():
            raise  # too little memory, of a card or the host: nobody should delete a run for that
        raise ValueError(f"{file} is damaged: restore it, or delete it to begin again") from error
    wanted = ("weights", "optimiser", "step", "seconds", "tokens", "positions")
    if not isinstance(state, dict) or any(key not in state for key in wanted):
        raise ValueError(f"{file} is no state of a training run, which has {', '.join(wanted)}: move it away to begin again")
    return state


def leaves(weights: Mapping[str, Tensor], device: torch.device, *, trained: str) -> Weights:
    """Copies on the device; those of the trained part ("layers." backbone with its ends, "mtp." draft) require gradients."""
    out = {}
    for name, value in weights.items():
        mine = name.startswith("mtp.") == (trained == "mtp.") and not name.endswith(("gate.bias", "gate.bias_vl"))
        out[name] = value.detach().clone().to(device).requires_grad_(mine)
    return out


def train_step(
    run: Run, sampler: Sampler, team: Team, classes_V: Tensor | None, dtype: torch.dtype, geometry: Geometry | None
) -> tuple[Figures, Geometry, Tensor]:
    """One optimiser step; returns the step's figures, the geometry for reuse, and the gradient norm."""
    recipe = run.recipe
    length, mode = recipe.stage_at(run.progress, dtype)
    per_micro = max(1, recipe.micro_tokens // length)
    micros = max(1, recipe.step_tokens // (per_micro * length * team.size))
    if geometry is None or (geometry.batch, geometry.length) != (per_micro, length):
        geometry = Geometry(config=run.config, batch=per_micro, length=length, device=run.device)
    loads, figures = Loads(), []
    first = run.positions.get(length, 0)
    share = Share(count=float(micros * team.size * per_micro * length), parts=micros * team.size)
    storage = storages(run.config)
    for micro in range(micros):
        at = first + (micro * team.size + team.rank) * per_micro
        batch = sampler.batch(range(at, at + per_micro), length).to(run.device)
        chooser = torch.Generator().manual_seed(recipe.seed * 1000003 + run.step * 64 + micro)
        queries = torch.randperm(length, generator=chooser)[: mode.sampled].sort().values.to(run.device)
        figures.append(
            contribute(run.config, run.weights, storage, geometry, mode, batch, classes_V, share, loads, queries_n=queries)
        )
    run.positions[length] = first + micros * team.size * per_micro
    grads = [w.grad for w in run.weights.values() if w.grad is not None]
    team.add([*grads, *loads.counts.values()])
    norm = clip(run.weights, recipe.clip)
    run.optimiser.step(recipe.rate_at(run.progress, run.step))
    loads.update(run.weights, recipe.bias_speed)
    run.step += 1
    joined = Figures(
        by_tier=torch.stack([f.by_tier for f in figures]).sum(0),
        by_position=torch.stack([f.by_position for f in figures]).sum(0),
        index_loss=torch.stack([f.index_loss for f in figures]).mean(),
        recall=torch.stack([f.recall for f in figures]).mean(),
    )
    return joined, geometry, norm


def train(
    run: Run,
    sampler: Sampler,
    folder: Path,
    classes_V: Tensor | None,
    *,
    dtype: torch.dtype,
    stop_after: float | None = None,
    report: bool = True,
    save_every: float = 60.0,
) -> bool:
    """Run to the end, or until `stop_after` seconds of this call. True when the run is complete.

    Saves `state.pt` at the end, and with a log line whenever `save_every` seconds have passed: a run may die any time.
    """
    team = Team.join(run.device)
    began = last = saved = time.monotonic()
    base = run.seconds
    gathered: list[tuple[Figures, Tensor]] = []
    geometry = None
    while run.progress < 1.0 and (stop_after is None or team.agree(time.monotonic() - began, run.device) < stop_after):
        figures, geometry, norm = train_step(run, sampler, team, classes_V, dtype, geometry)
        gathered.append((figures, norm))
        if run.step % run.recipe.log_every == 0 or run.step <= 3:
            line = _line(run, gathered, team, geometry)
            now = time.monotonic()
            line |= {"tokens_per_second": round(line["tokens"] / (now - last)), "elapsed": round(run.seconds, 1)}
            gathered, last = [], now
            if team.rank == 0:
                _write(folder / "metrics.jsonl", line)
                if report:
                    print(_progress(line), flush=True)
                if now - saved >= save_every:
                    run.save(folder / "state.pt")
                    saved = now
        run.seconds = base + team.agree(time.monotonic() - began, run.device)
    if gathered:
        _line(run, gathered, team, geometry)
    if team.rank == 0:
        run.save(folder / "state.pt")
    return run.progress >= 1.0


def _line(run: Run, gathered: list[tuple[Figures, Tensor]], team: Team, geometry: Geometry | None) -> dict[str, Any]:
    by_tier = torch.stack([f.by_tier for f, _ in gathered]).sum(0)
    by_position = torch.stack([f.by_position for f, _ in gathered]).sum(0)
    team.add([by_tier, by_position])
    sums, counts = by_tier.cpu().tolist()
    for name, count in zip(TIER_NAMES, counts, strict=True):
        run.tokens[name] += count
    loss = {name: round(s / c, 4) for name, s, c in zip(TIER_NAMES, sums, counts, strict=True) if c}
    assert geometry is not None
    progress = run.progress
    return {
        "step": run.step,
        "progress": round(progress, 4),
        "length": geometry.length,
        "rate": run.recipe.rate_at(progress, run.step),
        "loss": round(sum(sums) / sum(counts), 4),
        "loss_by_tier": loss,
        "loss_by_position": [round(v, 4) for v in (by_position[0] / by_position[1]).tolist()],
        "index_loss": round(float(torch.stack([f.index_loss for f, _ in gathered]).mean()), 4),
        "recall": round(float(torch.stack([f.recall for f, _ in gathered]).mean()), 4),
        "gradient_norm": round(float(torch.stack([n for _, n in gathered]).mean()), 4),
        "tokens": sum(counts),
        "tokens_seen": sum(run.tokens.values()),
        "tokens_by_tier": dict(run.tokens),
    }


def _progress(line: Mapping[str, Any]) -> str:
    tiers = " ".join(f"{name} {value:.3f}" for name, value in line["loss_by_tier"].items())
    return (
        f"step {line['step']} {100 * line['progress']:.1f}% T={line['length']} loss {line['loss']:.4f} ({tiers}) "
        f"kl {line['index_loss']:.3f} recall {line['recall']:.3f} norm {line['gradient_norm']:.2f} "
        f"{line['tokens_per_second']} tok/s {line['tokens_seen'] / 1e6:.1f}M"
    )


def _write(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
