"""Text clean-up and the gates a document must pass: one normal form of whitespace, no boilerplate, no data blobs.

Works on strings; knows no files, sources or tokenizers.
"""

from __future__ import annotations

import re

SPECIAL_MARKS = ("<｜", "｜DSML｜", "<think>", "</think>")
"""Spellings of special tokens: a text that holds one cannot be tokenised as plain text, so it is left out."""

_GUTENBERG_START = re.compile(r"^.*\*\*\* ?START OF TH.*$", re.M | re.I)
_GUTENBERG_END = re.compile(r"^.*(\*\*\* ?END OF TH|End of (the )?Project Gutenberg).*$", re.M | re.I)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\ufffd]")


def normalise(text: str) -> str:
    """Unix newlines, no control characters, no trailing blanks, at most two empty lines in a row, one final newline."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", text)
    text = re.sub(r"[ \t\u00a0]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n") + "\n" if text.strip() else ""


def strip_gutenberg(text: str) -> str:
    """Cuts Project Gutenberg's header and licence where their markers are present."""
    if start := _GUTENBERG_START.search(text):
        text = text[start.end() :]
    if end := _GUTENBERG_END.search(text):
        text = text[: end.start()]
    return text


def rejection(text: str, tier: str) -> str:
    """Why a cleaned document is unfit for training, or "" where it is fit."""
    size = len(text)
    if size < (200 if tier == "docs" else 100):
        return "too short"
    if tier == "code" and size > 1_000_000:
        return "too long"
    if "canary guid" in text.lower():
        return "asks to be kept out of training"
    if any(mark in text for mark in SPECIAL_MARKS):
        return "spells a special token"
    if sum(character.isascii() for character in text) < 0.9 * size:
        return "mostly not English"
    letters = sum(map(str.isalpha, text))
    if letters < 0.35 * size or sum(map(str.isdigit, text)) > 0.2 * size:
        return "mostly data"
    if tier == "code":
        lines = text.splitlines()
        if size > 120 * len(lines) or max(map(len, lines)) > 4000:
            return "mostly data"
    return ""
