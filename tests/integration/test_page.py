"""The page in headless Chromium: texts and chats stream, stop, edit; settings, history, keys, errors, hostile words.

Owns what a person does. Exact words come from a scripted engine behind the real routes.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvist.engine.request import Request
from kvist.server.served import Served
from kvist.text.marks import DSML
from tests.browser import Visits, counted, drop, idle, mode, send
from tests.integration.test_server_images import png
from tests.server_fakes import TOKENIZER, Pause, says, scripted, serving

pytestmark = pytest.mark.browser

KEY = "kv-page-key-0123456789"
HOSTILE = "<img src=x onerror=\"window.hit=1\"><script>window.hit=1</script><b onclick='hit=1'>"
CALL = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="<i>name">\n<{DSML} parameter name="p" string="true">{HOSTILE}</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
SLOWLY = [step for word in range(200) for step in (f"word{word} ", Pause(0.02))]


def base_model(*steps: object) -> Served:
    """A scripted base model, with which the page begins a text."""
    return replace(scripted(says(*steps)), base=True)  # type: ignore[arg-type]


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
        counted(page, ".message", 2)
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


def test_a_running_text_that_is_left_is_kept(visits: Visits) -> None:
    """Another page in front ends the request; what was written of the first one is in the history."""
    with visits.serving(base_model(*SLOWLY)) as live:
        page = visits.open(live)
        send(page, "begun ", reply=False)
        page.locator(".reply", has_text="word2").wait_for()
        page.click("#new-text")
        idle(page)
        assert page.locator(".flow").count() == 0
        page.click("#open-history")
        page.get_by_role("button", name="begun", exact=True).click()
        assert page.inner_text(".flow").startswith("begun word0 word1 word2")
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


SPLITS = r"""async () => {
  const { split } = await import('/page/pieces.js');
  const wrong = [];
  let state = 1;
  const draw = (below) => { state = (state * 48271) % 2147483647; return state % below; };
  const known = ['a', 'ab', 'b', ' ', '', '\uFFFD', '</think>', 'é', 'aa'];
  for (let round = 0; round < 4000; round += 1) {
    const tokens = Array.from({length: 1 + draw(6)}, () => known[draw(known.length)]);
    const said = tokens.map((one) => one === '\uFFFD' ? '\u{1F33F}'.slice(0, draw(3)) : one === '</think>' ? '' : one).join('');
    const parts = split(said, tokens);
    if (parts.join('') !== said || parts.length !== tokens.length) wrong.push([tokens, said, parts]);
    const plain = tokens.every((one) => one !== '\uFFFD' && one !== '</think>');
    if (plain && parts.some((one, at) => one !== tokens[at])) wrong.push([tokens, parts]);
  }
  return wrong.slice(0, 3);
}"""

FULL = """async () => {
  const { History, blank } = await import('/page/history.js');
  const said = [];
  for (let at = 0; at < 5; at += 1) {
    const one = blank('chat');
    one.turns.push({by: 'person', text: `number ${at}`, images: [{name: 'a', url: 'data:' + 'x'.repeat(1500000)}]});
    said.push(new History().keep(one));
  }
  const kept = new History().kept;
  return {said, texts: kept.map((one) => one.turns[0].text), urls: kept.map((one) => one.turns[0].images[0].url.length)};
}"""


def test_parts_of_tokens_join_to_the_text(visits: Visits) -> None:
    """Property: whatever a stream's tokens are, no character is lost or doubled, and plain tokens get exactly themselves."""
    with visits.serving(says("ok")) as live:
        page = visits.open(live)
        assert page.evaluate(SPLITS) == []


def test_a_full_history_lets_old_pictures_go_first(visits: Visits) -> None:
    with visits.serving(says("ok")) as live:
        page = visits.open(live)
        found = page.evaluate(FULL)
        assert found["texts"] == [f"number {at}" for at in (4, 3, 2, 1, 0)], "texts stay"
        assert found["urls"][0] > 1_000_000, "the newest keeps its picture"
        assert found["urls"][-1] == 0
        assert "pictures of old messages were dropped" in found["said"][-1]
        assert found["said"][0] == ""


def test_no_vision_is_said(visits: Visits) -> None:
    with visits.serving(says("ok")) as live:
        page = visits.open(live)
        page.wait_for_selector("#model b")
        assert page.is_disabled("#attach")
        assert page.inner_text("#attach-reason") == "nano has no vision."
        drop(page, "a.png", png(1))
        assert "no vision" in page.inner_text("#notice")
        assert page.locator("#images figure").count() == 0


def test_the_order_of_focus(visits: Visits) -> None:
    """Skip link, header, ways of writing, text, composer: as they are read. No stop is without a visible ring."""
    with visits.serving(base_model("some words here")) as live:
        page = visits.open(live)
        page.wait_for_selector("#model b")
        send(page, "x")
        page.evaluate("document.body.tabIndex = -1; document.body.focus()")
        seen = []
        for _ in range(12):
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
