"""Preprocessing, vision tower and aligner against the tensors recorded from the published reference.

Pixels, grids, patches and span types must be equal; the tower and the aligner run in float32 under the relative L2
limits of the case (measured here on a CPU: 5.3e-7 and 6.1e-7).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvist.config import VisionConfig
from kvist.config_json import load_config
from kvist.images import ImagePlan, plan_image, preprocess
from kvist.model.vision import Aligner, VisionTower, embed_span

CaseDir = Callable[[str], Path]


def under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def grid_of(plan: ImagePlan) -> list[int]:
    return [plan.width, plan.height, plan.patch_rows, plan.patch_cols, plan.token_rows, plan.token_cols]


class Case:
    """The recorded case and its two modules, loaded through their released names."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config(folder / "config.json")
        self.limits = json.loads((folder / "case.json").read_text())["tolerances"]["all"]
        self.inputs = under(load_file(folder / "inputs.safetensors"), "r0/")
        self.expected = under(load_file(folder / "expected.safetensors"), "r0/")
        self.weights = load_file(folder / "model.safetensors")
        assert self.config.vision is not None
        self.vision: VisionConfig = self.config.vision
        self.tower = VisionTower(self.vision)
        self.tower.load_state_dict(under(self.weights, "vision."), strict=True)
        self.aligner = Aligner(self.vision, self.config.dim)
        self.aligner.load_state_dict(under(self.weights, "aligner."), strict=True)


@pytest.fixture(scope="module")
def case(case_dir: CaseDir) -> Case:
    return Case(case_dir("vision-two-images"))


@pytest.mark.parametrize("index", [0, 1])
def test_preprocessing_is_equal(case: Case, index: int) -> None:
    got = preprocess(case.inputs[f"image.{index}"].numpy(), case.vision)
    assert grid_of(got.plan) == case.expected[f"grid.{index}"].tolist()
    assert np.array_equal(got.resized, case.expected[f"resized.{index}"].numpy())
    assert torch.equal(torch.from_numpy(got.patches), case.expected[f"patches.{index}"].float())
    assert np.array_equal(got.span_types, case.expected[f"span_types.{index}"].numpy())


@pytest.mark.parametrize("index", [0, 1])
def test_tower_and_aligner(case: Case, index: int) -> None:
    _, _, rows, cols, token_rows, token_cols = case.expected[f"grid.{index}"].tolist()
    with torch.no_grad():
        features = case.tower(case.expected[f"patches.{index}"].float(), rows, cols)
        aligned = case.aligner(features, rows, cols)
    assert rel_l2(features, case.expected[f"vit.{index}"]) < case.limits["vit_max_rel_l2"]
    assert aligned.shape == (token_rows * token_cols, case.config.dim)
    assert rel_l2(aligned, case.expected[f"aligner.{index}"]) < case.limits["aligner_max_rel_l2"]


@pytest.mark.parametrize("index", [0, 1])
def test_span_rows_stand_where_the_recorded_types_say(case: Case, index: int) -> None:
    *_, token_rows, token_cols = case.expected[f"grid.{index}"].tolist()
    aligned = case.expected[f"aligner.{index}"]
    learned = [case.weights[f"image_{name}"].float() for name in ("start", "newline", "end")]
    span = embed_span(aligned, token_rows, token_cols, *learned)
    start = int(case.inputs["image_starts"][index])
    types = case.inputs["token_types"][start : start + len(span)]
    assert torch.equal(span[types == 0], learned[0][None])
    assert torch.equal(span[types == 1], aligned)
    assert torch.equal(span[types == 2], learned[1].expand(token_rows, -1))
    assert torch.equal(span[types == 3], learned[2][None])


def test_swapped_axes_would_be_seen(case: Case) -> None:
    """The limits have teeth: the same patches on the transposed grid miss them by orders of magnitude."""
    _, _, rows, cols, _, _ = case.expected["grid.0"].tolist()
    with torch.no_grad():
        features = case.tower(case.expected["patches.0"].float(), cols, rows)
    assert rel_l2(features, case.expected["vit.0"]) > 100 * case.limits["vit_max_rel_l2"]


def test_resize_plans_are_equal(case_dir: CaseDir) -> None:
    folder = case_dir("pure-functions")
    sizes = load_file(folder / "inputs.safetensors")["image/sizes"].tolist()
    grids = load_file(folder / "expected.safetensors")["image/grid"].tolist()
    names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
    parameters = json.loads((folder / "case.json").read_text())["parameters"]["image"]
    config = VisionConfig(
        num_hidden_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        intermediate_size=4,
        **{name: parameters[name] for name in names},
    )
    plans = [plan_image(width, height, config) for width, height in sizes]
    assert [[*grid_of(plan), plan.span_tokens] for plan in plans] == grids
