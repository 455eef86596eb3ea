"""`kvist.json`: what a model's folder says of it that `config.json` has no place for.

Owns the file's name and form. The release has none: without it a model counts as tuned to chat.
"""

from __future__ import annotations

import json
from pathlib import Path

ABOUT_NAME = "kvist.json"


def is_base(folder: Path) -> bool:
    """Whether the folder's `kvist.json`, where there is one, says `"base": true`: a model that was not tuned to chat.

    Raises ValueError for a file of another form.
    """
    about = folder / ABOUT_NAME
    try:
        facts = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{about} is not JSON: {error}; mend or remove it") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("base", False), bool):
        raise ValueError(f'{about} must hold an object whose "base" is true or false; mend or remove it')
    return bool(facts.get("base", False))


def write_about(folder: Path, *, base: bool) -> None:
    """The file for a folder; none where there is nothing to say."""
    if base:
        (folder / ABOUT_NAME).write_text('{"base": true}\n', encoding="utf-8")
