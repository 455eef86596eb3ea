"""Markup to plain text: HTML pages and OSIS (SWORD) markup, by the standard library's parser.

Knows tags and whitespace only; which pages are read and what is kept of them is decided elsewhere.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

_SKIPPED_TAGS = frozenset(re.findall(r"\S+", "script style nav head header footer form button noscript svg math select iframe"))
_SKIPPED_CLASSES = re.compile(
    r"\b(menu|searchmenu|navheader|navfooter|sphinxsidebar\w*|related|headerlink|sidebar|spirit-nav|nosearch|toc|"
    r"contents local|mobile-nav\w*|breadcrumb\w*|anchor|srclink|src|out-of-band|rightside|footer|leftnav|nav\w*|"
    r"bd-sidebar\w*|bd-toc|prev-next\w*|hide-me|indexterm|panel)\b"
)
_BLOCK_TAGS = frozenset(
    re.findall(r"\S+", "p div table tr ul ol dl dt dd blockquote section article main h1 h2 h3 h4 h5 h6 pre details summary hr")
)
_PARAGRAPH_TAGS = frozenset(re.findall(r"\S+", "p h1 h2 h3 h4 h5 h6 pre table blockquote dl section"))
_VOID_TAGS = frozenset(re.findall(r"\S+", "area base br col embed hr img input link meta param source track wbr"))


class _TextExtractor(HTMLParser):
    """Collects visible text; whitespace collapses outside <pre>, block tags start lines, list items get a dash."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._skipped_tag = ""
        self._skipped_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped_depth:
            self._skipped_depth += tag == self._skipped_tag
            return
        marks = " ".join(value or "" for name, value in attrs if name in ("class", "id"))
        if tag in _SKIPPED_TAGS or (
            tag not in _VOID_TAGS and tag not in ("body", "html", "main", "pre") and _SKIPPED_CLASSES.search(marks)
        ):
            self._skipped_tag, self._skipped_depth = tag, 1
            return
        if tag == "pre":
            self._pre_depth += 1
        if tag == "br":
            self.pieces.append("\n")
        elif tag == "li":
            self.pieces.append("\n- ")
        elif tag in ("td", "th"):
            self.pieces.append("  ")
        elif tag in _BLOCK_TAGS:
            self.pieces.append("\n\n" if tag in _PARAGRAPH_TAGS else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_depth:
            self._skipped_depth -= tag == self._skipped_tag
            return
        if tag == "pre" and self._pre_depth:
            self._pre_depth -= 1
        if tag in _BLOCK_TAGS:
            self.pieces.append("\n\n" if tag in _PARAGRAPH_TAGS else "\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped_depth:
            self.pieces.append(data if self._pre_depth else re.sub(r"\s+", " ", data))


def _main_region(page: str) -> str:
    """The part of a page that holds its content, found by the landmarks that the listed generators write."""
    for opening in ("<main", "<article", 'id="content"', '<div class="body"', "<body"):
        at = page.find(opening)
        if at >= 0:
            start = page.rfind("<", 0, at + 1)
            closing = page.find("</main>", at) if opening == "<main" else -1
            return page[start:closing] if closing > 0 else page[start:]
    return page


def html_to_text(page: str) -> str:
    """Readable text of one HTML page: navigation, scripts and generated listings of trait implementations dropped."""
    page = re.split(r'<h2 id="(?:synthetic|blanket)-implementations"', page, maxsplit=1)[0]
    extractor = _TextExtractor()
    extractor.feed(_main_region(page))
    extractor.close()
    text = "".join(extractor.pieces)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?=\S)", "\n", text)
    text = re.sub(r"\n- *\n+", "\n- ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def osis_to_text(markup: str) -> str:
    """Text of one SWORD block: notes dropped, paragraphs and verse lines broken, all other tags removed."""
    markup = re.sub(r"<note\b.*?</note>", "", markup, flags=re.S)
    markup = re.sub(r"\s*\n\s*", " ", markup)
    markup = re.sub(r'<(?:div|lb)\b[^>]*type="x-p"[^>]*>|<chapter\b[^>]*>|</?(?:p|title|lg)\b[^>]*>', "\n\n", markup)
    markup = re.sub(r"<(?:lb|l)\b[^>]*>", "\n", markup)
    text = html.unescape(re.sub(r"<[^>]*>", "", markup))
    text = re.sub(r"\\\+?\w+\*?", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
