"""Engram's token map of every golden model case, from its tokenizer alone. Knows no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from kvist.text import class_count, token_map

CASES = ("text-fp32", "text-bf16", "short-prompts", "dspark", "vision-two-images", "released-quirk")


@pytest.mark.golden_cases(*CASES)
def test_recorded_classes(golden_case: Path):
    with safe_open(golden_case / "expected.safetensors", framework="numpy") as file:
        recorded = file.get_tensor("token_map")
    classes = token_map(golden_case / "tokenizer.json")
    assert classes.dtype == recorded.dtype == np.int32
    assert np.array_equal(classes, recorded)
    assert class_count(classes) == len(np.unique(recorded))
