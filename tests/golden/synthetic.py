"""Builds golden cases of other shapes than the recorded ones: a random model, saved as a checkpoint, run, and written down.

Such a case proves nothing about the numbers (they are our own); it shows that the runner takes what it has never seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvist.checkpoint import build_model, save_checkpoint
from kvist.config import ModelConfig
from kvist.conformance.case import DTYPES, Case, Run
from kvist.conformance.model_case import one_thread
from kvist.conformance.prompt import read_prompt
from kvist.conformance.recording import PER_PROMPT, record
from kvist.images import plan_image, span_types
from kvist.model.block import Block
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics

LIMITS = {
    "exact": ["token_map", "engram_rows", "grid", "span_types", "resized (same resampling library)"],
    "strict": {
        "logits_abs": 1e-4,
        "min_fraction_of_positions": 0.7,
        "selections": "identical",
        "residual_rel_l2": 1e-4,
        "latent_rel_l2": 1e-4,
        "draft_logits_abs": 1e-4,
        "draft_confidence_abs": 1e-4,
    },
    "layerwise_rel_l2": {"median": 1e-6, "p90": 2e-6, "p99": 4e-6},
    "all": {
        "logits_max_abs": 1.0,
        "logits_median_abs": 0.5,
        "logits_min_cosine": 0.99,
        "argmax_min_agreement": 0.9,
        "topk_ids_min_agreement": 0.9,
        "candidate_ids_min_agreement": 0.9,
        "expert_ids_min_agreement": 0.9,
        "residual_max_rel_l2": 0.1,
        "latent_max_rel_l2": 0.1,
        "main_kv_max_rel_l2": 0.1,
        "index_key_max_rel_l2": 0.1,
        "draft_base_logits_max_abs": 1.0,
        "draft_confidence_max_abs": 1.0,
        "draft_token_min_agreement": 0.9,
        "draft_window_kv_max_rel_l2": 0.1,
        "vit_max_rel_l2": 1e-4,
        "aligner_max_rel_l2": 1e-4,
    },
}


def build_case(
    folder: Path,
    tokenizer: Path,
    config: ModelConfig,
    runs: Sequence[Run],
    *,
    dtype: str = "float32",
    semantics: str = "fixed",
    seed: int = 0,
    shard_bytes: int = 1 << 30,
    images: Sequence[Tensor] = (),
    keep: Callable[[str], bool] = lambda name: True,
    logits_every: int = 1,
) -> Path:
    """Write a whole case. `keep` drops recorded tensors by name; `logits_every` and streams thin out the positions."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    with one_thread():
        return _build(folder, tokenizer, config, runs, dtype, semantics, seed, shard_bytes, images, keep, logits_every)


def _build(
    folder: Path,
    tokenizer: Path,
    config: ModelConfig,
    runs: Sequence[Run],
    dtype: str,
    semantics: str,
    seed: int,
    shard_bytes: int,
    images: Sequence[Tensor],
    keep: Callable[[str], bool],
    logits_every: int,
) -> Path:
    save_random_model(folder, tokenizer, config, seed, shard_bytes)
    inputs: dict[str, Tensor] = {}
    for run in runs:
        inputs |= {f"{run.name}/{name}": tensor for name, tensor in run_inputs(config, run, images).items()}
    meta = {
        "format": 1,
        "name": folder.name,
        "kind": "model",
        "dtype": dtype,
        "semantics": semantics,
        "seed": seed,
        "runs": [vars(run) for run in runs],
        "tolerances": LIMITS if dtype == "float32" else {k: v for k, v in LIMITS.items() if k != "strict"},
    }
    (folder / "case.json").write_text(json.dumps(meta))
    expected = recorded(folder, config, runs, dtype, semantics, inputs, logits_every)
    save_file(inputs, folder / "inputs.safetensors")
    save_file({name: t.contiguous() for name, t in expected.items() if keep(name)}, folder / "expected.safetensors")
    return folder


def save_random_model(folder: Path, tokenizer: Path, config: ModelConfig, seed: int, shard_bytes: int) -> None:
    model = random_model(config, Numerics(), seed=seed)
    state: dict[str, Tensor] = dict(model.state_dict())
    for layer in config.engram_layer_ids:
        block = model.layers[layer]
        assert isinstance(block, Block)
        state[f"layers.{layer}.engram.embed.weight"] = block.engram.reader.values_RX
    save_checkpoint(config, state, tokenizer, folder, shard_bytes=shard_bytes)


def run_inputs(config: ModelConfig, run: Run, images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Random ids; the first `run.images` pictures, each after one text token."""
    ids = torch.randint(11, 500, (run.length,), dtype=torch.int32)
    tensors: dict[str, Tensor] = {"decode_ids": ids[run.prompt_len :].clone()} if run.decode_steps else {}
    if run.images:
        types, starts, at = torch.full((run.prompt_len,), -1, dtype=torch.int32), [], 1
        for index, pixels in enumerate(images[: run.images]):
            span = torch.from_numpy(span_types(plan_image(pixels.shape[1], pixels.shape[0], config.vision)))
            types[at : at + len(span)] = span
            ids[at : at + len(span)] = config.image_token_id
            tensors[f"image.{index}"] = pixels
            starts.append(at)
            at += len(span) + 1
        tensors |= {"token_types": types, "image_starts": torch.tensor(starts, dtype=torch.int32)}
    if run.drafts:
        positions = torch.arange(run.prompt_len - 1, run.length, dtype=torch.int32)
        tensors["draft_positions"] = positions
        tensors["draft_first_ids"] = torch.randint(11, 500, (len(positions),), dtype=torch.int32)
    return tensors | {"input_ids": ids[: run.prompt_len].clone()}


def recorded(
    folder: Path,
    config: ModelConfig,
    runs: Sequence[Run],
    dtype: str,
    semantics: str,
    inputs: Mapping[str, Tensor],
    logits_every: int,
) -> dict[str, Tensor]:
    model = build_model(folder, numerics=Numerics(dtype=DTYPES[dtype], impl="wide"))
    case = Case(
        folder=folder,
        name=folder.name,
        kind="model",
        dtype=dtype,
        semantics=semantics,
        runs=tuple(runs),
        tolerances={},
        parameters={},
        inputs=inputs,
        expected={},
    )
    expected: dict[str, Tensor] = {}
    if model.token_classes_V is not None:
        expected["token_map"] = model.token_classes_V.int()
    with torch.inference_mode():
        for run in runs:
            prompt = read_prompt(case, run, model)
            parts = record(case, run, model, prompt)
            named = {name: parts.get(name) for name in parts.parts}
            for index, image in enumerate(prompt.images):
                named |= {f"vit.{index}": image.tower, f"aligner.{index}": image.aligned}
                named[f"grid.{index}"] = torch.tensor(image.grid, dtype=torch.int32)
                named[f"span_types.{index}"] = torch.from_numpy(image.processed.span_types)
                named[f"resized.{index}"] = torch.from_numpy(image.processed.resized)
                named[f"patches.{index}"] = torch.from_numpy(image.processed.patches).bfloat16()
            if prompt.engram_LTX is not None:
                named["engram_rows"] = prompt.engram_LTX.permute(1, 0, 2).int()
            named |= thinned(named, run, logits_every)
            expected |= {f"{run.name}/{name}": _stored(tensor) for name, tensor in named.items()}
    return expected


def thinned(named: Mapping[str, Tensor], run: Run, every: int) -> dict[str, Tensor]:
    """Logits of every n-th position; streams too, unless the run is layerwise."""
    at = torch.arange(every - 1, run.length, every)
    out = {"logits": named["logits"][at], "logit_positions": at.int()}
    if not run.layerwise:
        rows = at[at < run.prompt_len]
        out["residual_positions"] = rows.int()
        out |= {name: t[rows] for name, t in named.items() if name.split(".")[0] in PER_PROMPT}
    return out


def _stored(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.int64, torch.int32):
        return tensor.int().clone()
    return tensor.clone() if tensor.dtype in (torch.uint8,) else tensor.float().clone()


def edit_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a safetensors file after a change in place."""
    tensors = dict(load_file(file))
    change(tensors)
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def edit_json(file: Path, change: Callable[[dict], None]) -> None:
    """Rewrite a JSON file after a change in place."""
    data = json.loads(file.read_text())
    change(data)
    file.unlink()
    file.write_text(json.dumps(data))
