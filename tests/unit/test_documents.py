"""The pages of this repository name what exists: links, headings, files, and the identifiers in backticks.

Owns what counts as a name. Knows nothing of what the pages say; `reading.md`'s program is run as it stands there.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*/*.md")])
RECORDS = {"log.md", "performance-history.md", "data-card.md"}
"""Pages that name what was: files and identifiers may be gone, links may not."""

ELSEWHERE = {"index.sqlite", "pages.kv", "nice", "../shared/performance-anchors.md", "../shared"}
"""Names of files that a store writes, of a system's commands, and of what lies beside the checkout."""

SOURCES = (".py", ".c", ".h", ".cu", ".cuh", ".js", ".css", ".html", ".toml", ".json", ".txt")
CODE = ("src", "tests", "benchmarks", "tools", "pyproject.toml")
DATA = ("src/kvist/assets/persuasion", "tests/golden/cases", "benchmarks/results")
FILE = re.compile(r"[\w./\-]+\.(?:py|c|h|cu|cuh|md|jsonl?|js|css|html|toml|txt|png|webp|sqlite|kv)|[\w.\-]+(?:/[\w.\-]+)*/")
NAME = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?")


@cache
def files() -> frozenset[str]:
    """Every file and folder of the checkout that belongs to it, from the root."""
    kept = {"src", "tests", "benchmarks", "tools", "docs", "models"}
    found = [p for folder in kept for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    names = {p.relative_to(ROOT).as_posix() for p in found} | kept | {p.name for p in ROOT.iterdir()}
    return frozenset(names)


@cache
def tails() -> frozenset[str]:
    """The same by every ending that begins at a folder or a file's own name."""
    parts = [name.split("/") for name in files()]
    return frozenset("/".join(part[at:]) for part in parts for at in range(len(part)))


@cache
def words() -> frozenset[str]:
    """All identifiers of the sources, of this test's own file excepted."""
    found: set[str] = {"main"}
    for name in files():
        path = ROOT / name
        source = path.suffix in SOURCES and name.startswith(CODE) and not name.startswith(DATA)
        if source and path != Path(__file__):
            found |= set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


def dead_names(text: str) -> list[str]:
    """Files and identifiers in backticks that occur nowhere in the sources. A metric may be put together from its parts."""
    dead = []
    for code in sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))):
        if code in ELSEWHERE:
            continue
        if FILE.fullmatch(code):
            if code.rstrip("/") not in tails():
                dead.append(code)
        elif NAME.fullmatch(code):
            dead += [word for word in re.findall(r"[A-Za-z_]\w*", code.split("(")[0]) if not _known(word)]
    return dead


def _known(word: str) -> bool:
    setting = word.removeprefix("KVIST_SERVE_").lower()
    figure = re.sub(r"^kvist_(server_|prefix_|tier_|store_)?|_total$|_seconds$", "", word)
    return word in words() or setting in words() or figure in words() or f"pinned_pages{word}" in words()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in RECORDS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_files_and_identifiers_exist(page: Path) -> None:
    assert dead_names(page.read_text(encoding="utf-8")) == []


def test_dead_links_and_names_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A (heading)\n[a](#a-heading) [b](#gone) [c](gone.md) [d](https://example.org/x) [e](page.md#a-heading)\n")
    assert dead_links(page) == ["#gone", "gone.md"]
    text = "`config.py` `no_such_file.py` `src/kvist/` `no_such_folder/` `LayerPlan.of` `LayerPlan.no_such_member`"
    assert dead_names(text + " `kvist_pages_free`") == ["no_such_member", "no_such_file.py", "no_such_folder/"]


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text(encoding="utf-8"))
        if link.partition("#")[0]
    }
    assert [page.name for page in PAGES if page.parent.name == "docs" and page not in linked] == []


def test_the_program_of_the_reading_page_gives_the_logits_of_one_pass() -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reading.md").read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(program, "docs/reading.md", "exec"), scope)
    step, memory_type, config = scope["step"], scope["DenseMemory"], scope["config"]
    assert callable(step) and callable(memory_type)
    scope["memory"] = memory_type(config, scope["numerics"])
    with torch.inference_mode():
        whole = step(0, 40)
    prompt, newest = scope["prompt"], scope["next_token"]
    assert isinstance(prompt, torch.Tensor) and isinstance(newest, torch.Tensor)
    torch.testing.assert_close(torch.cat([prompt, newest]), whole, rtol=1e-4, atol=1e-4)
