"""The page's files as the server gives them: headers, types, caching, no key, nothing beside them; and no way to make markup.

Needs no browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvist.checkpoint import is_base
from kvist.server.page import FOLDER, POLICY
from tests.server_fakes import NANO, Live, says, scripted, serving

KEY = "kv-page-key-0123456789"
FILES = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(says("ok"), api_keys=[KEY]) as server:
        yield server


def test_the_policy_names_no_other_source() -> None:
    assert "unsafe" not in POLICY
    assert set(re.findall(r"'[^']+'|\w+:", POLICY)) == {"'none'", "'self'", "'script'", "data:", "blob:"}


@pytest.mark.parametrize("name", FILES)
def test_files_without_a_key(live: Live, name: str) -> None:
    answer = httpx.get(f"{live.url}/page/{name}")
    assert answer.status_code == 200
    kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}[Path(name).suffix]
    assert answer.headers["content-type"].replace("application/j", "text/j").startswith(kind)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(f"{live.url}/page/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_document_asks_for_files_that_exist(live: Live) -> None:
    document = httpx.get(live.url)
    assert document.headers["content-security-policy"] == POLICY
    asked = re.findall(r'(?:href|src)="page/([^"]+)"', document.text)
    assert len(asked) >= 5
    assert set(asked) <= set(FILES)
    for script in (name for name in FILES if name.endswith(".js")):
        imported = re.findall(r'from "\./([^"]+)"', (FOLDER / script).read_text())
        assert set(imported) <= set(FILES), script
    assert not re.search(r"\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", document.text), "the policy would refuse it"


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../pyproject.toml",
        "/page/%2e%2e/%2e%2e/config.py",
        "/page/..%5cx",
        "/page//etc/passwd",
    ],
)
def test_nothing_else_is_given(live: Live, path: str) -> None:
    with httpx.Client() as client:
        request = client.build_request("GET", live.url)
        request.url = request.url.copy_with(raw_path=path.encode())
        answer = client.send(request)
    assert answer.status_code in (401, 404), "a path that leaves the folder is a route like others, which needs a key"
    assert "error" in answer.json()
    assert httpx.post(f"{live.url}/page/main.js").status_code == 405


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_have_no_way_to_make_markup(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith("// "), "what it owns stands at its top"
    assert len(text.splitlines()) < 500
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment", text
    )
    assert found == []
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_what_a_model_can(tmp_path: Path) -> None:
    """`/v1/models` says what the page needs to know; the folder says whether the model was tuned to chat."""
    with serving(scripted(says("ok"))) as live:
        model = httpx.get(f"{live.url}/v1/models").json()["data"][0]
    assert model["capabilities"] == {"vision": False, "base": False}
    assert is_base(NANO)
    assert not is_base(tmp_path)
    for text, problem in (
        ('["base"]', "must hold"),
        ('{"base": "yes"}', "must hold"),
        ("{", "is not JSON"),
        ("[" * 9**6, "is not JSON"),
    ):
        (tmp_path / "kvist.json").write_text(text)
        with pytest.raises(ValueError, match=rf"kvist\.json {problem}"):
            is_base(tmp_path)


def test_replay_of_a_request(live: Live) -> None:
    """`replay` in either API reaches the engine; what is no replay is a type error."""
    headers = {"authorization": f"Bearer {KEY}"}
    chat = {"model": "nano", "messages": [{"role": "user", "content": "x"}]}
    for path, body in (("/v1/completions", {"model": "nano", "prompt": "x"}), ("/v1/chat/completions", chat)):
        for replay in ("exact", "bounded", 64, None):
            answer = httpx.post(live.url + path, json={**body, "replay": replay}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert live.engine.requests[-1].replay == replay
        answer = httpx.post(live.url + path, json={**body, "replay": True}, headers=headers)
        assert answer.status_code == 400
        assert "replay" in answer.json()["error"]["param"]
