"""Cuts the shipped excerpt: the first chapters of the held-out novel, for the demo and for tests of long contexts.

It is the text that the model never saw in training, in the same cleaned form as the rest of the corpus.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvist.train.corpus.build import read_documents

EXCERPT_BYTES = 120_000


def whole_chapters(text: str, limit_bytes: int) -> str:
    """The longest run of whole chapters from the first one on that fits `limit_bytes` of UTF-8.

    Raises ValueError where not even one chapter fits.
    """
    starts = [match.start() for match in re.finditer(r"^CHAPTER \w+$", text, re.M | re.I)] + [len(text)]
    ends = [end for end in starts[1:] if len(text[starts[0] : end].encode()) <= limit_bytes]
    if not ends:
        raise ValueError(f"no chapter of the {len(text)} characters fits {limit_bytes} bytes: allow more")
    return text[starts[0] : ends[-1]].rstrip() + "\n"


def write_excerpt(out: Path, target: Path) -> int:
    """Writes the excerpt of Persuasion from the built corpus to `target`; returns its size in bytes."""
    novel = next(d for d in read_documents(out, "prose", "heldout") if d.source == "austen")
    text = whole_chapters(novel.text, EXCERPT_BYTES)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return len(text.encode())
