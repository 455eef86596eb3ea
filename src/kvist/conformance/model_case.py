"""A model case from folder to checks: load it as the release is loaded, run every sequence, compare in three ways.

Owns the order of work. Must not know other kinds of cases. Goldens README, 'Comparing'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvist.checkpoint import CheckpointMismatch, build_model, token_classes
from kvist.config import load_config
from kvist.conformance.case import Case, limit
from kvist.conformance.check import Check, judged, quantile, row_cosine, row_max_abs, row_rel_l2
from kvist.conformance.end_to_end import end_to_end
from kvist.conformance.exact import exact_checks
from kvist.conformance.prompt import read_prompt
from kvist.conformance.recording import layer_by_layer, record
from kvist.conformance.results import RunResult
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer

LAYERWISE = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def model_checks(case: Case, *, impl: str, deterministic: bool) -> Iterator[Check]:
    """Every check of a model case. Raises the named errors of whatever cannot be loaded."""
    with torch.inference_mode():
        classes_V, problem = _own_classes(case)
        model = _load(case, classes_V, Numerics(dtype=case.torch_dtype, impl=impl, deterministic=deterministic))
        results = []
        for run in case.runs:
            prompt = read_prompt(case, run, model)
            recording = record(case, run, model, prompt)
            for index, image in enumerate(prompt.images):
                recording.add(f"vit.{index}", image.tower)
                recording.add(f"aligner.{index}", image.aligned)
            plan, image_id = model.plan, model.config.image_token_id
            results.append(
                RunResult(case=case, run=run, prompt=prompt, recording=recording, model_plan=plan, image_token_id=image_id)
            )
        if problem:
            yield judged("exact token_map", False, problem)
        yield from exact_checks(case, results, classes_V)
        yield from _layerwise(case, model, results)
        yield from end_to_end(case, results)


def _own_classes(case: Case) -> tuple[Tensor | None, str]:
    """Token classes from the case's tokenizer, or what is wrong with them; (None, "") for a model without Engram."""
    config = load_config(case.folder)
    if not config.engram_layer_ids:
        return None, ""
    try:
        return token_classes(case.folder, config), ""
    except CheckpointMismatch as error:
        return None, str(error)


def _load(case: Case, classes_V: Tensor | None, numerics: Numerics) -> Transformer:
    """The model, hashing with the recorded classes if there are any, so that one wrong map shows as one failure."""
    recorded = case.expected.get("token_map")
    classes = classes_V if recorded is None else recorded.long()
    return build_model(case.folder, numerics=numerics, classes=classes)


def _layerwise(case: Case, model: Transformer, results: Sequence[RunResult]) -> Iterator[Check]:
    """Errors of all blocks and Engrams of all layerwise runs, pooled, against each set of limits."""
    groups = [name for name in case.tolerances if name.startswith("layerwise_rel_l2")]
    runs = [result for result in results if result.run.layerwise]
    if not groups or not runs:
        return
    errors, gaps, cosines, names, mixes = [], [], [], [], 0.0
    for result in runs:
        for name, got, want in layer_by_layer(case, result.run, model, result.prompt):
            if name.startswith("pre_mix"):
                mixes = max(mixes, row_max_abs(got, want).max().item())
                continue
            errors.append(row_rel_l2(got, want))
            gaps.append(row_max_abs(got, want).max().item())
            cosines.append(row_cosine(got, want).min().item())
            names += [f"{result.run.name}/{name}"] * len(want)
    pooled = torch.cat(errors)
    worst = f"worst {names[int(pooled.argmax())]}"
    for group in groups:
        limits = {name: limit(value, f"{group}.{name}") for name, value in case.limits(group).items()}
        unknown = [name for name in limits if name not in LAYERWISE]
        values = {name: quantile(pooled, LAYERWISE[name]) for name in limits if name in LAYERWISE}
        ok = not unknown and all(value < limits[name] for name, value in values.items())
        text = ", ".join(f"{name} {value:.2g} < {limits[name]:g}" for name, value in values.items())
        text += f"; unknown: {', '.join(unknown)}" if unknown else ""
        yield judged(group.replace("_rel_l2", ""), ok, f"{text}; {worst}", max_abs=max(gaps), cosine=min(cosines))
    yield judged("layerwise collapse weights", None, f"{len(pooled)} outputs compared", max_abs=mixes)
