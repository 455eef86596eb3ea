"""The loop of the draft stage: steps of `draft.py` over fresh sequences, in place of the draft part of a run's weights.

Owns its optimiser and schedule. Must not know the block pass. Bug case TRN-03: the loss is a mean, so parts are averaged.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.train.draft import backbone, draft_loss
from kvist.train.loop import Run, Team, leaves
from kvist.train.network import Mode
from kvist.train.optimiser import Loads, Optimiser, clip
from kvist.train.sampling import Sampler
from kvist.train.shapes import Geometry
from kvist.train.weights import storages, working_weights

FIRST_SEQUENCE = 1 << 24
"""Sequence numbers of the draft stage start here: another order of the same data."""


def train_draft(
    run: Run,
    sampler: Sampler,
    folder: Path,
    classes_V: Tensor | None,
    *,
    dtype: torch.dtype,
    steps: int,
    seconds: float | None = None,
    length: int,
    micro_tokens: int,
    anchors: int,
    rate: float = 3e-3,
) -> dict[str, Any]:
    """Train the draft blocks; their values replace those in `run.weights`. Returns the last figures."""
    team, config = Team.join(run.device), run.config
    mode = Mode(select=True, quantise=True, dtype=dtype)
    draft = leaves(run.weights, run.device, trained="mtp.")
    mine = {name: w for name, w in draft.items() if name.startswith("mtp.")}
    optimiser, storage = Optimiser(config, mine, muon_ratio=run.recipe.muon_ratio), storages(config)
    geometry = Geometry(config=config, batch=max(1, micro_tokens // length), length=length, device=run.device)
    began, line = time.monotonic(), dict[str, Any]()
    # The backbone's leaves keep requiring gradients, so that the graphs compiled in training serve here too.
    whole = working_weights({n: w for n, w in run.weights.items() if n not in mine}, storage, dtype, quantise=True)
    whole = {name: w.detach().requires_grad_(w.requires_grad) for name, w in whole.items()}
    step = 0
    while step < steps:
        elapsed = team.agree(time.monotonic() - began, run.device)
        progress = step / steps if seconds is None else elapsed / seconds
        if progress >= 1:
            break
        first = FIRST_SEQUENCE + (step * team.size + team.rank) * geometry.batch
        batch = sampler.batch(range(first, first + geometry.batch), length).to(run.device)
        frozen = backbone(config, whole, geometry, mode, batch, classes_V)
        chooser = torch.Generator().manual_seed(run.recipe.seed * 7919 + step * team.size + team.rank)
        places = torch.randperm(length - config.dspark_block_size - 2, generator=chooser)[:anchors].sort().values
        used = working_weights(mine, {n: storage[n] for n in mine}, dtype, quantise=True)
        used |= {name: whole[name] for name in ("embed.weight", "head.weight")}
        loads = Loads()
        loss, figures = draft_loss(config, used, geometry, mode, batch, frozen, places.to(run.device), loads)
        (loss / team.size).backward()
        grads = [w.grad for w in mine.values() if w.grad is not None]
        team.add([*grads, *loads.counts.values()])
        clip(mine, run.recipe.clip)
        optimiser.step(rate * min(1.0, (step + 1) / 20, (1 - progress) / 0.5 + 0.02))
        loads.update(mine, run.recipe.bias_speed)
        step += 1
        if step % run.recipe.log_every == 0 or progress >= 1 or step <= 2:
            line = {"draft_step": step, "loss": round(float(loss.detach()), 4), "seconds": round(elapsed, 1)}
            line |= {name: [round(v, 4) for v in value.flatten().tolist()] for name, value in figures.items()}
            if team.rank == 0:
                with (folder / "draft.jsonl").open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps(line) + "\n")
                print(line, flush=True)
    with torch.no_grad():
        for name, value in mine.items():
            run.weights[name].copy_(value)
    return line
