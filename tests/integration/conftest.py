"""The browser that tests of the page share, one a module, and visits that end without a complaint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import Visits, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; only tests marked browser may ask for it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        found = library.chromium.launch(executable_path=find_chromium())
        yield found
        found.close()


@pytest.fixture
def visits(browser: Browser) -> Iterator[Visits]:
    """Visits; a test fails if a page complained without having been expected to."""
    made = Visits(browser)
    yield made
    made.leave()
    assert [text for one in made.complaints for text in one.unexpected] == []
