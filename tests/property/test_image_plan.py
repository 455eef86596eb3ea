"""VIS-02 as a property: the planner's count, the placeholder span and the features agree for every size and rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from kvist.config import VisionConfig
from kvist.images import ImagePlan, plan_image, preprocess, span_types
from kvist.images.patches import PAD_GREY, resize_and_pad
from kvist.model.vision import merge_patches

RELEASED = VisionConfig(num_hidden_layers=32, hidden_size=1024, num_attention_heads=16, intermediate_size=2816)


def check_plan(plan: ImagePlan, config: VisionConfig) -> None:
    assert (plan.width, plan.height) == (plan.patch_cols * config.patch_size, plan.patch_rows * config.patch_size)
    assert plan.patch_rows >= 1
    assert plan.patch_cols >= 1
    types = span_types(plan)
    assert len(types) == plan.span_tokens <= config.max_image_tokens
    assert (types == 1).sum() == plan.image_tokens
    assert (types == 2).sum() == plan.token_rows
    assert (types[0], types[-1]) == (0, 3)
    # one number a patch is enough to count the rows that the aligner would read
    features = torch.zeros(plan.patch_rows * plan.patch_cols, 1)
    assert len(merge_patches(features, plan.patch_rows, plan.patch_cols, config.downsample_ratio)) == plan.image_tokens


def test_vis02_random_sizes_of_the_release() -> None:
    draw = random.Random(2)
    for _ in range(200):
        check_plan(plan_image(draw.randint(1, 5000), draw.randint(1, 5000), RELEASED), RELEASED)


@given(width=st.integers(1, 200_000), height=st.integers(1, 200_000))
@example(width=200_000, height=1)
@example(width=1, height=200_000)
@example(width=42882, height=42)
@settings(max_examples=200, deadline=None)
def test_any_size_has_a_plan_within_the_limit(width: int, height: int) -> None:
    check_plan(plan_image(width, height, RELEASED), RELEASED)


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    patch_size=st.integers(1, 20),
    downsample_ratio=st.integers(1, 5),
    max_image_tokens=st.integers(4, 1200),
    min_pixels=st.integers(0, 100_000),
)
@settings(max_examples=300, deadline=None)
def test_any_configuration_has_a_plan_within_the_limit(
    width: int, height: int, patch_size: int, downsample_ratio: int, max_image_tokens: int, min_pixels: int
) -> None:
    config = VisionConfig(
        num_hidden_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        intermediate_size=4,
        patch_size=patch_size,
        downsample_ratio=downsample_ratio,
        max_image_tokens=max_image_tokens,
        min_pixels=min_pixels,
    )
    check_plan(plan_image(width, height, config), config)


@given(width=st.integers(1, 120), height=st.integers(1, 120), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_pictures_yield_what_was_planned(width: int, height: int, seed: int) -> None:
    config = VisionConfig(
        num_hidden_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        intermediate_size=4,
        max_image_tokens=24,
        min_pixels=3000,
    )
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    got = preprocess(image, config)
    assert got.plan == plan_image(width, height, config)
    assert got.resized.shape == (got.plan.height, got.plan.width, 3)
    assert got.patches.shape == (got.plan.patch_rows * got.plan.patch_cols, 588)
    assert len(got.span_types) == got.plan.span_tokens


@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    target=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_resizing_equals_the_library_padding(size: tuple[int, int], target: tuple[int, int], seed: int) -> None:
    """Sides up to 90:1 into sides of at least 14 pixels; where a side would vanish the library leaves grey only."""
    image = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    width, height = target[0] * 14, target[1] * 14
    got = resize_and_pad(image, width, height)
    inner = min(round(size[0] / size[1] * height), round(size[1] / size[0] * width))
    if inner == 0:
        assert not (got == np.array(PAD_GREY)).all()
    else:
        want = ImageOps.pad(Image.fromarray(image), (width, height), color=PAD_GREY)
        assert np.array_equal(got, np.asarray(want))


@pytest.mark.parametrize("seed", range(3))
def test_hashes_differ_exactly_where_pictures_do(seed: int) -> None:
    config = VisionConfig(num_hidden_layers=1, hidden_size=4, num_attention_heads=1, intermediate_size=4, min_pixels=0)
    draw = np.random.default_rng(seed)
    base = draw.integers(0, 256, (14, 14, 3), dtype=np.uint8)
    by_picture: dict[bytes, str] = {}
    for _ in range(300):
        variant = base.copy()
        variant[tuple(draw.integers(0, (14, 14, 3)))] ^= np.uint8(draw.integers(0, 2))
        value = preprocess(variant, config).content_hash
        assert by_picture.setdefault(variant.tobytes(), value) == value
    assert len(by_picture) > 50
    assert len(set(by_picture.values())) == len(by_picture)
