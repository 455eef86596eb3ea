"""The toy model that the equality chain runs on. Owns its construction; knows no test."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset


@lru_cache(maxsize=8)
def toy(seed: int, deterministic: bool, quantise: bool = True) -> Transformer:
    """`tiny` with random weights in float32. Deterministic with an odd seed: the native operators, else the reference's tiles."""
    impl = "cpu" if deterministic and seed % 2 else "ref"
    return random_model(preset("tiny"), Numerics(deterministic=deterministic, quantise=quantise, impl=impl), seed)


@pytest.fixture(params=[0, 1])
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def prompt(seed: int) -> torch.Tensor:
    """60 tokens, so that windows of 8, both group parities and pruned candidates all occur."""
    return torch.randint(4, 256, (60,), generator=torch.Generator().manual_seed(seed))
