"""The run as a command: backbone, draft stage, export, judgement and the dense comparison, each over one state folder.

Owns the wiring of files to functions. `run` is what `kvist train` calls; `python -m kvist.train.run` serves launchers.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.checkpoint.locate import shipped_folders
from kvist.config import ModelConfig
from kvist.config_json import load_config
from kvist.presets import PRESETS, preset
from kvist.text.token_map import token_map
from kvist.text.tokenizer import Tokenizer
from kvist.train.baseline import train_dense
from kvist.train.drafting import train_draft
from kvist.train.evaluate import Judge, judge_all
from kvist.train.export import checkpoint_values, export
from kvist.train.loop import Recipe, Run, Team, train
from kvist.train.sampling import Corpus, Mixture, Recall, Sampler, recall_from_tokenizer
from kvist.train.weights import storages

STAGES = ("train", "draft", "export", "evaluate", "baseline")


class TrainingError(ValueError):
    """A run that cannot start; the message names what is missing and the way out."""


def run(
    model: str,
    data: Path,
    out: Path,
    *,
    recipe: Recipe | None = None,
    mixture: Mixture | None = None,
    stages: tuple[str, ...] = ("train", "draft", "export", "evaluate"),
    tokenizer: Path | None = None,
    device: str = "auto",
    stop_after: float | None = None,
    draft_steps: int = 400,
    draft_seconds: float | None = None,
    baseline_tokens: float = 0.0,
    baseline_seconds: float = 0.0,
    limit: int = 1_200_000,
    weights: Path | None = None,
) -> dict[str, Any]:
    """Train `model` (a preset or a config.json) on the tokens under `data`; state, metrics and the checkpoint go to `out`.

    Continues from `out/state.pt`, else from the checkpoint `weights`, else starts afresh. Stages: train, draft, export
    (`out/model`), evaluate (`out/evaluation.json`), baseline (`out/dense.jsonl`). Raises TrainingError, ConfigError, ValueError.
    """
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise TrainingError(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    if draft_steps < 1 or (stop_after is not None and not stop_after >= 0):
        raise TrainingError(f"draft_steps {draft_steps} must be at least 1 and stop_after {stop_after} at least 0 seconds")
    config = preset(model) if model in PRESETS else load_config(model)
    place = _device(device)
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    file = _checked(tokenizer or _own_tokenizer(model))
    recipe, recall = recipe or Recipe(), recall_from_tokenizer(file)
    sampler = Sampler(Corpus(data, "train", config.vocab_size), mixture or Mixture(), recall, recipe.seed)
    held = _held_out(data, stages, config, recipe)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    if "baseline" in stages and held is not None:
        results["baseline"] = train_dense(
            config, recipe, sampler, out, place, held, inner=_inner(config), tokens=baseline_tokens, seconds=baseline_seconds,
            limit=limit,
        )  # fmt: skip
    if set(stages) <= {"baseline"}:
        return results
    classes = _classes(config, file, place)
    state = _state(config, recipe, place, out, weights)
    if not (finished := state.progress >= 1.0) and "train" in stages:
        finished = train(state, sampler, out, classes, dtype=dtype, stop_after=stop_after)
    results |= {"finished": finished, "step": state.step, "tokens": state.tokens}
    if "draft" in stages:
        results["draft"] = train_draft(
            state, sampler, out, classes, dtype=dtype, steps=draft_steps, seconds=draft_seconds, length=recipe.length,
            micro_tokens=recipe.micro_tokens, anchors=min(512, recipe.length // 8),
        )  # fmt: skip
        if Team.join(place).rank == 0:
            state.save(out / "state.pt")
    if Team.join(place).rank == 0:
        results |= _finish(config, state, held, out, file, stages, classes, dtype, recall, limit)
    return results


def _held_out(data: Path, stages: tuple[str, ...], config: ModelConfig, recipe: Recipe) -> Corpus | None:
    """What the stages that judge will read; looked at before anything is trained."""
    if not {"evaluate", "baseline"} & set(stages):
        return None
    held = Corpus(data, "heldout", config.vocab_size)
    for tier, ids in held.ids.items():
        if "evaluate" in stages and len(ids) < recipe.long_length + 2:
            raise TrainingError(
                f"held-out tier {tier} has {len(ids)} tokens, judging at {recipe.long_length} positions (long_length) needs two "
                "more than that; make long_length smaller, hold out more, or leave the stage evaluate out"
            )
    return held


def _finish(
    config: ModelConfig,
    state: Run,
    held: Corpus | None,
    out: Path,
    tokenizer: Path,
    stages: tuple[str, ...],
    classes: Tensor | None,
    dtype: torch.dtype,
    recall: Recall,
    limit: int,
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "export" in stages:
        files = export(config, state.weights, tokenizer, out / "model")
        results["files"] = {file.name: file.stat().st_size for file in files}
    if "evaluate" in stages and held is not None:
        judge = Judge(
            config=config, weights=state.weights, storage=storages(config), classes_V=classes, device=state.device, dtype=dtype,
            tokens=state.recipe.micro_tokens,
        )  # fmt: skip
        r = state.recipe
        results["evaluation"] = judge_all(
            judge, held, recall, out / "evaluation.json", length=r.length, long_length=r.long_length, limit=limit
        )
    return results


def _state(config: ModelConfig, recipe: Recipe, device: torch.device, out: Path, weights: Path | None) -> Run:
    file = out / "state.pt"
    given = weights is not None and not file.is_file()
    state = Run.start(config, recipe, device, checkpoint_values(config, weights) if given and weights else None)
    if file.is_file():
        state.load(file)
    return state


def _own_tokenizer(model: str) -> Path:
    """The tokenizer beside a shipped model of that name or a given config.json."""
    given = Path(model)
    folder = given.parent if given.is_file() else next((at / model for at in shipped_folders() if (at / model).is_dir()), given)
    return folder / "tokenizer.json"


def _checked(file: Path) -> Path:
    """The tokenizer file; a missing or unusable one is named before anything is made."""
    if not file.is_file():
        raise TrainingError(f"no tokenizer at {file}; name one with --tokenizer")
    Tokenizer(file)
    return file


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise TrainingError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
            raise TrainingError(f"no device {name!r} here ({torch.cuda.device_count()} GPUs seen); give auto or cpu")
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _classes(config: ModelConfig, tokenizer: Path, device: torch.device) -> Tensor | None:
    if not config.engram_layer_ids:
        return None
    classes = torch.tensor(token_map(tokenizer), dtype=torch.int64)
    found = int(classes.max()) + 1
    if found > config.engram_compressed_vocab_size:
        raise TrainingError(
            f"{tokenizer} gives {found} token classes, engram_compressed_vocab_size is {config.engram_compressed_vocab_size}; "
            f"set it to {found}"
        )
    return classes.to(device)


def _inner(config: ModelConfig) -> int:
    """SwiGLU width that gives the dense model the active size of the main one: K routed experts and the shared one, and
    what attention, streams and indexers cost beyond four square matrices a layer, rounded to a multiple of 32."""
    return config.moe_inter_dim * (config.n_activated_experts + config.n_shared_experts) + 96


def main() -> None:
    """Parse options of `python -m kvist.train.run` and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="train,draft,export,evaluate")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--weights", type=Path, help="a checkpoint to start from")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--recipe", default="{}", help="JSON of recipe fields")
    parser.add_argument("--mixture", default="{}", help="JSON of mixture fields")
    for name in ("stop-after", "draft-seconds"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--draft-steps", type=int, default=400)
    parser.add_argument("--baseline-tokens", type=float, default=0.0)
    parser.add_argument("--baseline-seconds", type=float, default=0.0)
    parser.add_argument("--limit", type=int, default=1_200_000)
    a = parser.parse_args()
    result = run(
        a.model, a.data, a.out, recipe=replace(Recipe(), **json.loads(a.recipe)),
        mixture=replace(Mixture(), **json.loads(a.mixture)),
        stages=tuple(a.stages.split(",")), tokenizer=a.tokenizer, device=a.device, stop_after=a.stop_after,
        draft_steps=a.draft_steps, draft_seconds=a.draft_seconds, baseline_tokens=a.baseline_tokens,
        baseline_seconds=a.baseline_seconds, limit=a.limit, weights=a.weights,
    )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
