"""The page in headless Chromium: texts and chats stream, stop, edit, pictures, the microscope, what hostile words may not do.

Owns what a person does and sees. Exact words come from a scripted engine, figures and drawings from a small random model with
vision behind the same routes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvist.engine.anatomy import anatomy
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.launch import image_reader
from kvist.engine.microscope import Microscope
from kvist.engine.request import Request
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset
from kvist.server.served import Served
from kvist.text.marks import DSML
from tests.browser import Complaints, find_chromium
from tests.integration.test_server_images import IMAGE_ID, VISION, png
from tests.server_fakes import END_ID, TOKENIZER, Live, Pause, Script, says, scripted, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

KEY = "kv-page-key-0123456789"
HOSTILE = "<img src=x onerror=\"window.hit=1\"><script>window.hit=1</script><b onclick='hit=1'>"
CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="<i>name">\n<{DSML} parameter name="p" string="true">{HOSTILE}</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
SLOWLY = [step for word in range(200) for step in (f"word{word} ", Pause(0.02))]
LAYERS = len(preset("tiny").plan.layers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        found = library.chromium.launch(executable_path=find_chromium())
        yield found
        found.close()


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
        """A page in a profile of its own; `tokens`: the setting of new tokens at most."""
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        context.set_default_timeout(60_000)
        self.contexts.append(context)
        page = context.new_page()
        if tokens is not None:
            page.add_init_script(f"localStorage.setItem('kvist.settings.1', '{{\"maxTokens\": {tokens}}}')")
        self.complaints.append(Complaints(page, expected))
        page.goto(live.url)
        return page

    @contextmanager
    def serving(self, served: Served | Script, **settings: object) -> Iterator[Live]:
        """A server whose visitors leave before it ends."""
        with serving(served, **settings) as live:
            try:
                yield live
            finally:
                self.leave()

    def leave(self) -> None:
        """Close all pages."""
        while self.contexts:
            self.contexts.pop().close()


@pytest.fixture
def visits(browser: Browser) -> Iterator[Visits]:
    made = Visits(browser)
    yield made
    made.leave()
    assert [text for one in made.complaints for text in one.unexpected] == []


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


def base_model(*steps: object) -> Served:
    """A scripted base model, with which the page begins a text."""
    return replace(scripted(says(*steps)), base=True)  # type: ignore[arg-type]


def mode(page: Page, name: str) -> None:
    page.wait_for_selector("#model b")
    page.locator(f"label:has-text('{name}')").first.click()


def idle(page: Page) -> None:
    """Wait until nothing is written any more."""
    page.wait_for_selector("#sheet:not([aria-busy])")


def send(page: Page, text: str, reply: bool = True) -> None:
    page.fill("#composer-text", text)
    page.click("#send")
    if reply:
        idle(page)


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


def test_a_text_streams_and_goes_on(visits: Visits) -> None:
    """A base model's page begins with a text; what was written is one prompt with what is added."""
    with visits.serving(base_model("a dark night", Pause(0.4), " and cold.")) as live:
        page = visits.open(live)
        assert page.locator("input[name=mode]:checked").get_attribute("value") == "text"
        page.fill("#composer-text", "It was ")
        page.keyboard.press("Control+Enter")
        page.locator(".reply", has_text="a dark night").wait_for()
        assert "cold" not in page.inner_text(".flow"), "it is shown as it comes"
        idle(page)
        assert page.inner_text(".flow") == "It was a dark night and cold."
        assert "".join(page.locator(".piece").all_inner_texts()) == "a dark night and cold."
        send(page, " Then ")
        assert live.engine.requests[1].prompt == [0, *TOKENIZER.encode("It was a dark night and cold. Then ")]
        page.click("text=Write again")
        idle(page)
        assert live.engine.requests[2].prompt == live.engine.requests[1].prompt
        page.click("text=Edit text")
        page.fill(".edited", "Another")
        page.click("text=Send again")
        page.locator(".reply").wait_for()
        assert live.engine.requests[3].prompt == [0, *TOKENIZER.encode("Another")]


def test_chat_sends_the_conversation_and_edits_it(visits: Visits) -> None:
    with visits.serving(says("thinking hard</think>Hello <｜User｜>", " you")) as live:
        page = visits.open(live)
        send(page, "first")
        assert page.locator(".message.model .reply > .tokens").inner_text().startswith("Hello")
        assert page.locator(".reasoning .tokens").text_content() == "thinking hard"
        send(page, "second")
        prompt = TOKENIZER.decode(live.engine.requests[1].prompt)
        assert prompt.index("first") < prompt.index("Hello") < prompt.index("second")
        page.locator(".message.person").first.get_by_role("button", name="Edit").click()
        page.fill(".edited", "changed")
        page.keyboard.press("Control+Enter")
        page.wait_for_function("document.querySelectorAll('.message').length === 2")
        idle(page)
        prompt = TOKENIZER.decode(live.engine.requests[2].prompt)
        assert "changed" in prompt
        assert "second" not in prompt
        assert "first" not in prompt


@pytest.mark.parametrize("by_key", [False, True])
def test_stop(visits: Visits, by_key: bool) -> None:
    """What was written stays, the engine's request ends."""
    with visits.serving(base_model(*SLOWLY)) as live:
        page = visits.open(live)
        send(page, "x", reply=False)
        page.locator(".reply", has_text="word3").wait_for()
        if by_key:
            page.focus("#composer-text")
            page.keyboard.press("Escape")
        else:
            page.click("#stop")
        page.locator(".end", has_text="Stopped").wait_for()
        page.wait_for_selector("#send")
        assert 4 <= page.locator(".piece").count() < 900
        assert "word199" not in page.inner_text(".flow")
        page.wait_for_timeout(100)
        assert (live.engine.open, live.engine.left_early) == (0, 1)


def test_settings_reach_the_request(visits: Visits) -> None:
    with visits.serving(base_model("ok")) as live:
        page = visits.open(live)
        page.click("#sampling")
        for name, value in {"temperature": "0.5", "topP": "0.9", "seed": "42", "maxTokens": "7"}.items():
            page.fill(f"#{name}", value)
        page.select_option("#replay", "exact")
        page.fill("#topP", "2")
        assert page.get_attribute("#topP", "aria-invalid") == "true"
        page.fill("#topP", "0.9")
        page.keyboard.press("Escape")
        assert page.inner_text("#sampling") == "temperature 0.5 · top-p 0.9 · seed 42 · 7 tokens · exact replay"
        send(page, "x")
        (request,) = live.engine.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, request.max_tokens) == (0.5, 0.9, 42, 7)
        assert request.replay == "exact"
        page.reload()
        assert "temperature 0.5" in page.inner_text("#sampling")


def test_history_is_kept_here_exported_and_deleted(visits: Visits) -> None:
    with visits.serving(base_model(" told")) as live:
        page = visits.open(live)
        send(page, "once")
        page.reload()
        page.click("#open-history")
        page.get_by_role("button", name="once", exact=True).click()
        assert page.inner_text(".flow") == "once told"
        page.click("#open-history")
        with page.expect_download() as download:
            page.click("#export")
        kept = json.loads(download.value.path().read_text())["conversations"]
        assert [turn["text"] for turn in kept[0]["turns"]] == ["once", " told"]
        page.click("#delete-all")
        assert page.evaluate("localStorage.getItem('kvist.history.1')") is not None, "it asks once more"
        page.click("#delete-all")
        assert page.evaluate("localStorage.getItem('kvist.history.1')") is None
        assert page.inner_text("#history-list") == "Nothing is kept yet."


def test_a_key_is_asked_for_and_forgotten_with_the_tab(visits: Visits) -> None:
    with visits.serving(base_model("ok"), api_keys=[KEY]) as live:
        page = visits.open(live, expected=("401",))
        page.wait_for_selector("#settings[open]")
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", KEY)
        page.keyboard.press("Tab")
        page.wait_for_selector("#model b")
        page.keyboard.press("Escape")
        send(page, "x")
        assert page.inner_text(".flow") == "xok"
        stored = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert KEY not in stored[0]
        assert KEY in stored[1]


def test_errors_are_told(visits: Visits) -> None:
    """A refused request, an engine that fails in the middle, and a server that is gone."""
    with serving(base_model("some ", RuntimeError("boom"))) as live:
        page = visits.open(live, expected=("400", "ERR_CONNECTION"))
        send(page, "x" * 200_000)
        assert "context" in page.inner_text(".end")
        page.click("#new-text")
        send(page, "x")
        assert "Failed: the engine failed" in page.inner_text(".end")
        assert page.inner_text(".flow") == "xsome "
    send(page, " more")
    assert "cannot be reached" in page.inner_text(".end")


def say_hostile(request: Request) -> list[str | int]:
    chat = 4 in request.prompt
    return [HOSTILE, "</think>", HOSTILE, CALL] if chat else [HOSTILE]


def test_hostile_words_stay_text(visits: Visits) -> None:
    """Replies, reasoning, calls, messages, history: all of it is shown as it is spelled, none of it is markup."""
    with visits.serving(scripted(say_hostile)) as live:
        page = visits.open(live)
        send(page, HOSTILE)
        assert page.locator(".said").inner_text() == HOSTILE
        assert page.locator(".message.model .reply > .tokens").text_content() == HOSTILE
        assert page.locator(".reasoning .tokens").text_content() == HOSTILE
        assert HOSTILE in json.loads(page.locator(".call").inner_text().partition("\n")[2])["p"]
        assert "<i>name" in page.locator(".call").inner_text()
        mode(page, "Continue a text")
        send(page, HOSTILE)
        assert page.locator(".flow").text_content() == HOSTILE * 2
        page.click("#open-history")
        assert page.locator("#history-list li").count() == 2
        assert "<img src=x" in page.inner_text("#history-list")
        assert page.locator("#sheet img, #sheet script, #sheet b, #history img").count() == 0
        page.wait_for_timeout(100)
        assert page.evaluate("window.hit") is None


def test_no_vision_is_said(visits: Visits) -> None:
    with visits.serving(says("ok")) as live:
        page = visits.open(live)
        page.wait_for_selector("#model b")
        assert page.is_disabled("#attach")
        assert page.inner_text("#attach-reason") == "nano has no vision."
        drop(page, "a.png", png(1))
        assert "no vision" in page.inner_text("#notice")
        assert page.locator("#images figure").count() == 0


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


def test_pictures_by_file_paste_and_drop(visits: Visits, tiny: Live) -> None:
    """Three pictures with hostile names are previewed, one is taken away again; the model sees two."""
    page = visits.open(tiny, tokens=6)
    page.wait_for_selector("#model b")
    assert page.is_enabled("#attach")
    name = "<img src=x onerror=hit=1>.png"
    page.set_input_files("#file", [{"name": name, "mimeType": "image/png", "buffer": png(1)}])
    drop(page, "dropped.png", png(2))
    drop(page, "pasted.png", png(3), "paste")
    page.wait_for_function("document.querySelectorAll('#images figure').length === 3")
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
    rows = page.locator("table tbody tr")
    assert rows.count() == LAYERS
    for row in rows.all():
        window, sparse, sink = (float(text.strip("<%")) for text in row.locator("td").all_inner_texts()[2:5])
        assert window + sparse + sink == pytest.approx(100, abs=1.5)
    page.click("[aria-label='Token after']")
    page.locator(".chosen-token", has_text="token 4,").wait_for()
    assert page.locator(".piece.chosen").get_attribute("data-token") == "3"


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


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False), (360, True)])
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


def test_the_order_of_focus(visits: Visits) -> None:
    """Skip link, header, ways of writing, text, composer: as they are read. No stop is without a visible ring."""
    with visits.serving(base_model("some words here")) as live:
        page = visits.open(live)
        page.wait_for_selector("#model b")
        send(page, "x")
        page.evaluate("document.body.tabIndex = -1; document.body.focus()")
        seen = []
        for _ in range(13):
            page.keyboard.press("Tab")
            seen.append(
                page.evaluate(
                    """() => { const node = document.activeElement; const style = getComputedStyle(node.closest('.modes label')
                    ? node.nextElementSibling : node); return [node.id || node.name || node.className || node.textContent,
                    style.outlineStyle !== 'none']; }"""
                )
            )
        names = [name for name, _ in seen]
        wanted = ["skip", "new-text", "open-history", "open-settings", "theme", "mode"]
        assert names[: len(wanted)] == wanted
        assert names.index("tokens") < names.index("composer-text") < names.index("send") < names.index("sampling")
        assert [name for name, ring in seen if not ring] == []
