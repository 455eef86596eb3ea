"""Settings for every test: one torch thread a process, since the suite itself runs in two processes on two cores; and whether
there is a browser for the tests that are marked so."""

from __future__ import annotations

import pytest
import torch

from tests.browser import find_chromium

torch.set_num_threads(1)

CHROMIUM = find_chromium()


def pytest_report_header() -> str:
    """Which browser runs the tests of the page, or that none does."""
    if CHROMIUM is None:
        return "browser: none (needs Chromium and playwright); tests marked browser are deselected"
    return f"browser: {CHROMIUM}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a browser where there is none."""
    if CHROMIUM is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
