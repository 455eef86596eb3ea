"""A model case from folder to checks: load it as the release is loaded, run every sequence, compare in three ways.

Owns the order of work. Must not know other kinds of cases. Goldens README, 'Comparing'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvist.checkpoint import build_model
from kvist.conformance.case import Case, Run, limit
from kvist.conformance.check import Check, judged, quantile, row_cosine, row_max_abs, row_rel_l2
from kvist.conformance.end_to_end import end_to_end
from kvist.conformance.errors import CaseError
from kvist.conformance.exact import exact_checks
from kvist.conformance.prompt import read_prompt
from kvist.conformance.recording import layer_by_layer, record
from kvist.conformance.results import RunResult
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer

GROUPS = ("exact", "strict", "all")
LAYERWISE = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@torch.inference_mode()
def model_checks(case: Case, *, impl: str, deterministic: bool, device: torch.device | str = "cpu") -> list[Check]:
    """Every check of a model case, its model on `device`. Raises the named errors of whatever cannot be loaded."""
    _known_groups(case)
    numerics = Numerics(dtype=case.torch_dtype, impl=impl, deterministic=deterministic)
    numerics.check_device(torch.device(device))
    with one_thread():
        return _all_checks(case, numerics, device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Case models are too small to share out: on busy cores, waiting for a second thread took 20 times the work itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _all_checks(case: Case, numerics: Numerics, device: torch.device | str) -> list[Check]:
    recorded_V = case.expected.get("token_map")
    # Hashing with the recorded classes, if there are any: one wrong map then shows as one failure.
    classes_V = None if recorded_V is None else recorded_V.long()
    model = build_model(case.folder, numerics=numerics, classes=classes_V, device=device)
    results = [_run(case, run, model) for run in case.runs]
    return [*exact_checks(case, results), *_layerwise(case, model, results), *end_to_end(case, results)]


def _run(case: Case, run: Run, model: Transformer) -> RunResult:
    prompt = read_prompt(case, run, model)
    recording = record(case, run, model, prompt)
    for index, image in enumerate(prompt.images):
        recording.add(f"vit.{index}", image.tower)
        recording.add(f"aligner.{index}", image.aligned)
    return RunResult(
        case=case,
        run=run,
        prompt=prompt,
        recording=recording,
        model_plan=model.plan,
        image_token_id=model.config.image_token_id,
    )


def _known_groups(case: Case) -> None:
    unknown = [name for name in case.tolerances if name not in GROUPS and not name.startswith("layerwise_rel_l2")]
    if unknown:
        raise CaseError(
            f"{case.folder / 'case.json'}: tolerances has unknown groups {', '.join(unknown)}; known: {', '.join(GROUPS)}, "
            "layerwise_rel_l2*"
        )


def _layerwise(case: Case, model: Transformer, results: Sequence[RunResult]) -> Iterator[Check]:
    """Errors of all blocks and Engrams of all layerwise runs, pooled, against each set of limits."""
    groups = [name for name in case.tolerances if name.startswith("layerwise_rel_l2")]
    runs = [result for result in results if result.run.layerwise]
    if not runs:
        yield from (judged(group.replace("_rel_l2", ""), None, "the case has no layerwise run") for group in groups)
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
