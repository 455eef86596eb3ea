"""Where the browser for page tests is, and what a page must not do while one looks at it.

Owns finding Chromium and collecting complaints. Must not know what the page shows.
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WATCH = "addEventListener('securitypolicyviolation', e => console.error('POLICY', e.violatedDirective, e.blockedURI))"


def find_chromium() -> str | None:
    """The browser's path; None without one, or without the library that drives it."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Complaints:
    """Console errors, uncaught exceptions and policy violations of a page. `expected`: words of those that the test causes."""

    def __init__(self, page: Page, expected: tuple[str, ...] = ()) -> None:
        self.expected = expected
        self.found: list[str] = []
        page.add_init_script(WATCH)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.found.append(str(error)))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.found.append(message.text)

    @property
    def unexpected(self) -> list[str]:
        """What nobody reckoned with."""
        return [text for text in self.found if not any(word in text for word in self.expected)]
