"""Saved sessions: what was said, as a small file by name; the cache pages that make resuming quick lie in the page store.

Owns names, the file's form and its safety (a name is never a path, a file is never believed). Must not know conversations.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

FORMAT = 1
MAX_BYTES = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SessionError(ValueError):
    """A session that cannot be saved or loaded; the message says why and what to do."""


class SessionFiles:
    """Sessions of one model in a folder. `model` names weights and numerics; another model's sessions are refused."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self._model = folder, model

    @property
    def names(self) -> list[str]:
        """Names of what is saved here."""
        found = (file.stem for file in self.folder.glob("*.json")) if self.folder.is_dir() else ()
        return sorted(name for name in found if _NAME.fullmatch(name))

    def save(self, name: str, conversation: dict[str, Any]) -> Path:
        """Write a session, whole or not at all; only its owner may read it. Raises SessionError, OSError."""
        target = self._file(name)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = target.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "model": self._model, "conversation": conversation}, file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
        return target

    def load(self, name: str) -> dict[str, Any]:
        """The conversation of a session. Raises SessionError, OSError."""
        file = self._file(name)
        if not file.is_file():
            known = ", ".join(self.names) or "none"
            raise SessionError(f"no session {name!r}; saved are: {known}")
        if file.stat().st_size > MAX_BYTES:
            raise SessionError(f"session {name!r} has more than {MAX_BYTES} bytes; delete {file}")
        try:
            known_session = json.loads(file.read_text(encoding="utf-8"))
            form, model, conversation = (known_session[key] for key in ("format", "model", "conversation"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SessionError(f"session {name!r} is damaged ({type(error).__name__}); delete {file}") from error
        if form != FORMAT or not isinstance(conversation, dict):
            raise SessionError(f"session {name!r} has format {form!r}, this version reads {FORMAT}")
        if model != self._model:
            raise SessionError(f"session {name!r} is of another model or number type; load it with the ones that made it")
        return conversation

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise SessionError(f"a session's name has 1..64 letters, digits, . _ or -, got {name[:80]!r}")
        return self.folder / f"{name}.json"
