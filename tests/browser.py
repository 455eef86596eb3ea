"""Where the browser for page tests is, visits to pages, what a page must not do meanwhile, and what every visitor does.

Owns finding Chromium, profiles and complaints. Must not know what a test is about.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

    from kvist.server.served import Served
    from tests.server_fakes import Live, Script

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


class Visits:
    """Opens pages of servers. At the end no page may have complained, but for what a test reckons with."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.contexts: list[BrowserContext] = []
        self.complaints: list[Complaints] = []

    def open(
        self,
        live: Live,
        *,
        tokens: int | None = None,
        expected: tuple[str, ...] = (),
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
    ) -> Page:
        """A page in a profile of its own; `tokens`: the setting of new tokens at most, with a seed."""
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        context.set_default_timeout(60_000)
        self.contexts.append(context)
        page = context.new_page()
        if tokens is not None:
            page.add_init_script(f"localStorage.setItem('kvist.settings.1', '{{\"maxTokens\": {tokens}, \"seed\": 7}}')")
        self.complaints.append(Complaints(page, expected))
        page.goto(live.url)
        return page

    @contextmanager
    def serving(self, served: Served | Script, **settings: object) -> Iterator[Live]:
        """A server whose visitors leave before it ends."""
        from tests.server_fakes import serving

        with serving(served, **settings) as live:
            try:
                yield live
            finally:
                self.leave()

    def leave(self) -> None:
        """Close all pages."""
        while self.contexts:
            self.contexts.pop().close()


def mode(page: Page, name: str) -> None:
    page.wait_for_selector("#model b")
    page.locator(f"label:has-text('{name}')").first.click()


def idle(page: Page) -> None:
    """Wait until nothing is written any more."""
    page.wait_for_selector("#sheet:not([aria-busy])")


def counted(page: Page, selector: str, count: int) -> None:
    """Wait for so many elements, without evaluating a string, which the page's policy forbids."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(count, timeout=60_000)


def send(page: Page, text: str, reply: bool = True) -> None:
    page.fill("#composer-text", text)
    page.click("#send")
    if reply:
        idle(page)


def drop(page: Page, name: str, content: bytes, event: str = "drop") -> None:
    """Drop a file on the page, or paste it into the field."""
    page.evaluate(
        """([name, content, event]) => {
        const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
        const data = new DataTransfer(); data.items.add(new File([bytes], name, {type: 'image/png'}));
        const made = event === 'drop' ? new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})
          : new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
        document.getElementById('composer-text').dispatchEvent(made); }""",
        [name, base64.b64encode(content).decode(), event],
    )
