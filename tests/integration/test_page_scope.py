"""The page over a real engine in headless Chromium: figures of a request, the microscope's drawings, pictures, legibility.

Owns what a person sees of a model's inside. A small random model with vision stands behind the routes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvist.engine.anatomy import anatomy
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.launch import image_reader
from kvist.engine.microscope import Microscope
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.server.served import Served
from tests.browser import Visits, counted, drop, mode, send
from tests.integration.test_server_images import IMAGE_ID, VISION, png
from tests.server_fakes import END_ID, TOKENIZER, Live, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

LAYERS = len(preset("tiny").plan.layers)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Live]:
    """A real engine: random weights, a vision tower, the microscope."""
    config = replace(preset("tiny"), vision=VISION, image_token_id=IMAGE_ID, vocab_size=len(TOKENIZER))
    model = random_model(config, Numerics(deterministic=True), 0)
    engine = AsyncEngine(Engine(model, EngineConfig(pages=64, max_running=2, replay="exact"), tokenizer=TOKENIZER))
    served = Served(
        name="tiny-vision",
        engine=engine,
        tokenizer=TOKENIZER,
        context=engine.engine.plan.context,
        vocab_size=config.vocab_size,
        bos_id=config.bos_token_id,
        eos_id=END_ID,
        created=0,
        image_token_id=IMAGE_ID,
        read_image=image_reader(model),
        anatomy=anatomy(engine.engine),
        microscope=Microscope(model, replay="exact"),
    )
    with serving(served) as server:
        yield server


def looked(page: Page, number: int) -> None:
    """Choose a token of the last reply and wait for the drawings."""
    page.locator(".piece").nth(number).click()
    page.wait_for_selector(".drawings")


def drawn_pixels(page: Page) -> int:
    """Colours in the map's canvas: a blank one has one."""
    colours: int = page.evaluate(
        """() => { const map = document.querySelector('.map canvas');
        const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data; const seen = new Set();
        for (let at = 0; at < data.length; at += 4) seen.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
        return seen.size; }"""
    )
    return colours


def test_pictures_by_file_paste_and_drop(visits: Visits, tiny: Live) -> None:
    """Three pictures with hostile names are previewed, one is taken away again; the model sees two."""
    page = visits.open(tiny, tokens=6)
    page.wait_for_selector("#model b")
    assert page.is_enabled("#attach")
    name = "<img src=x onerror=hit=1>.png"
    page.set_input_files("#file", [{"name": name, "mimeType": "image/png", "buffer": png(1)}])
    drop(page, "dropped.png", png(2))
    drop(page, "pasted.png", png(3), "paste")
    counted(page, "#images figure", 3)
    assert page.locator("#images figcaption").first.inner_text() == name
    page.get_by_role("button", name="Remove dropped.png").click()
    page.click("#sampling")
    page.select_option("#effort", "none")
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "see")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    with_pictures = int(re.search(r"(\d+) prompt tokens", page.inner_text(".end"))[1])  # type: ignore[index]
    assert page.locator(".message .pictures img").count() == 2
    page.click("#new-text")
    send(page, "see")
    without = int(re.search(r"(\d+) prompt tokens", page.inner_text(".end"))[1])  # type: ignore[index]
    assert with_pictures >= without + 4
    drop(page, "broken.png", b"no image at all")
    assert page.evaluate("window.hit") is None


def test_figures_of_a_request(visits: Visits, tiny: Live) -> None:
    page = visits.open(tiny, tokens=6)
    mode(page, "Continue a text")
    send(page, "The river rises in the hills. " * 6)
    page.locator(".state", has_text="finished").wait_for()
    facts = page.inner_text(".facts")
    for word in ("tokens/s", "Prompt", "computed", "encoder", "decoder", "main rows"):
        assert word in facts, facts
    page.click("text=Write again")
    page.locator(".facts", has_text=re.compile("[1-9][0-9]* cached")).wait_for()


def test_the_microscope_draws(visits: Visits, tiny: Live) -> None:
    """A token chosen by keyboard; map, bars, text and table agree; zoom and cursor work without a mouse."""
    page = visits.open(tiny, tokens=6)
    mode(page, "Continue a text")
    send(page, "The river rises in the hills and the town stands on its bank. " * 4)
    page.focus(".tokens")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector(".drawings")
    assert "token 3," in page.inner_text(".chosen-token")
    assert page.locator(".names:not(.again) .lane-name").count() == LAYERS
    assert drawn_pixels(page) > 8
    page.focus(".map")
    page.keyboard.press("ArrowUp")
    first = page.inner_text(".readout")
    assert first.startswith(f"Layer {LAYERS - 2}")
    assert page.input_value("#shade-layer") == str(LAYERS - 2)
    for key in ("PageUp", "+", "+", "0", "Home", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text(".readout") != first
    page.keyboard.press("Enter")
    page.wait_for_selector(".word.found")
    page.select_option("#shade-layer", str(LAYERS - 1))
    assert page.locator(".word.read").count() > 0
    page.locator(".word.read").first.hover()
    page.click("text=Numbers as a table")
    page.wait_for_selector("table")
    rows = page.locator("table tbody tr")
    assert rows.count() == LAYERS
    for row in rows.all():
        window, sparse, sink = (float(text.strip("<%")) for text in row.locator("td").all_inner_texts()[2:5])
        assert window + sparse + sink == pytest.approx(100, abs=1.5)
    page.click("[aria-label='Token after']")
    page.locator(".chosen-token", has_text="token 4,").wait_for()
    assert page.locator(".piece.chosen").get_attribute("data-token") == "3"


SAME = """async () => { const { visible } = await import('/page/figures.js');
  const [piece, shown] = ['.piece.chosen', '.chosen-token q'].map((one) => document.querySelector(one).textContent);
  return [visible(piece), shown]; }"""


def test_tokens_are_numbered_as_the_engine_numbers_them(visits: Visits, tiny: Live) -> None:
    """Reasoning, marks and pieces of characters included: what the microscope says of a token is what was clicked."""
    page = visits.open(tiny, tokens=24)
    page.wait_for_selector("#model b")
    send(page, "hello")
    pieces = page.locator(".piece")
    whole = [at for at, text in enumerate(pieces.all_text_contents()) if "\ufffd" not in text]
    for at in (whole[0], whole[len(whole) // 2], whole[-1]):
        pieces.nth(at).click()
        number = int(pieces.nth(at).get_attribute("data-token") or "") + 1
        page.locator(".chosen-token", has_text=f"token {number},").wait_for()
        clicked, shown = page.evaluate(SAME)
        if "\ufffd" not in shown:
            assert clicked == shown
    assert len(whole) >= 3


def test_the_microscope_waits_when_it_must(visits: Visits, tiny: Live) -> None:
    """A 429 is obeyed; a request that the server forgot is said to be so."""
    page = visits.open(tiny, tokens=6, expected=("429", "404"))
    mode(page, "Continue a text")
    send(page, "abc")
    tries: list[int] = []

    def answer(route: object) -> None:
        tries.append(1)
        if len(tries) > 1:
            route.continue_()  # type: ignore[attr-defined]
            return
        body = {"error": {"message": "too many", "code": "too_many_requests"}}
        route.fulfill(status=429, headers={"retry-after": "1"}, json=body)  # type: ignore[attr-defined]

    page.route("**/kvist/microscope", answer)
    page.locator(".piece").first.click()
    page.locator(".waiting", has_text="Again in 1 s").wait_for()
    page.wait_for_selector(".drawings")
    assert len(tries) == 2
    page.evaluate("""() => { const all = JSON.parse(localStorage.getItem('kvist.history.1'));
        all[0].turns[1].request = 'page-unknown'; localStorage.setItem('kvist.history.1', JSON.stringify(all)); }""")
    page.reload()
    page.click("#open-history")
    page.get_by_role("button", name="abc", exact=True).click()
    page.locator(".piece").first.click()
    page.locator(".waiting", has_text="no longer keeps this request").wait_for()


CONTRAST = """() => {
  const pen = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return Array.from(pen.getImageData(0, 0, 1, 1).data); };
  const linear = (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const light = (colour) => colour.slice(0, 3).map((one) => linear(one / 255))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => { const layers = [];
    for (let one = node; one; one = one.parentElement) { layers.push(rgba(getComputedStyle(one).backgroundColor));
      if (layers.at(-1)[3] === 255) break; }
    return layers.reverse().reduce((below, [r, g, b, a]) => [r, g, b].map((one, at) => one * a / 255 + below[at] * (1 - a / 255)),
      [255, 255, 255]); };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement; const box = node.getBoundingClientRect();
    if (!text.textContent.trim() || box.width < 2 || node.closest(':disabled, .unseen, .skip, option, canvas')) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${ratio.toFixed(2)} ${text.textContent.slice(0, 20)}`);
  }
  return [...new Set(poor)];
}"""

NAMELESS = """() => [...document.querySelectorAll('button, input, select, textarea, [tabindex="0"], a')].filter((node) =>
  node.offsetParent && !node.closest('[aria-hidden]') && !node.getAttribute('aria-label') && !node.labels?.length &&
  !node.textContent.trim()).map((node) => node.outerHTML.slice(0, 90))"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1024, True), (360, False), (360, True)])
def test_legible_at_every_width_in_both_themes(visits: Visits, tiny: Live, width: int, dark: bool) -> None:
    """Text has a contrast of 4.5 at least, every control a name, and nothing is wider than the screen."""
    page = visits.open(tiny, tokens=6, width=width, height=740, dark=dark)
    mode(page, "Continue a text")
    send(page, "The river rises in the hills. " * 8)
    too_wide = "document.documentElement.scrollWidth > innerWidth || document.getElementById('scope').scrollWidth > innerWidth"
    for look in (lambda: None, lambda: looked(page, 5), lambda: page.click("#open-settings")):
        look()
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(NAMELESS) == []
        assert not page.evaluate(too_wide)
    page.keyboard.press("Escape")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    if width == 360:
        assert page.is_hidden("#composer-text"), "the microscope has the narrow screen for itself"
        page.click("#show-writing")
        assert page.is_visible("#composer-text")
