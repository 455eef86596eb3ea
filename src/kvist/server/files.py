"""Uploaded pictures: kept in memory for a while, each for the key that sent it, within limits a key.

Owns identities, ownership, expiry and the bound. Must not know HTTP, multipart or what is in a picture. Any thread.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvist.server.errors import ApiError

PREFIX = "file-"
MAX_NAME = 255


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file: its id, the name its client gave it, its bytes, and seconds since the epoch of arrival and end."""

    id: str
    name: str
    data: bytes
    created: int
    expires: int


class FileShelf:
    """Files by owner. A key holds at most `max_files` of `memory_bytes` in all, each of `max_bytes`, for `keep_s` seconds.

    Nothing is written to disk, so nothing outlives the process; the whole shelf is bounded by the number of keys.
    """

    def __init__(
        self, *, max_files: int, max_bytes: int, memory_bytes: int, keep_s: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_files, self.max_bytes, self.memory_bytes, self.keep_s = max_files, max_bytes, memory_bytes, keep_s
        self._clock, self._lock = clock, threading.Lock()
        self._owners: dict[str, dict[str, StoredFile]] = {}

    @property
    def held(self) -> tuple[int, int]:
        """Files and bytes held now, of all owners."""
        with self._lock:
            self._sweep()
            files = [file for owned in self._owners.values() for file in owned.values()]
        return len(files), sum(len(file.data) for file in files)

    def put(self, owner: str, name: str, data: bytes, keep_s: int | None = None) -> StoredFile:
        """Keep a file. Raises ApiError for one that is too large or for which the owner has no room."""
        if len(data) > self.max_bytes:
            raise ApiError(
                "body_too_large", f"the file has {len(data)} bytes, at most {self.max_bytes} may come (max_file_bytes)"
            )
        with self._lock:
            self._sweep()
            owned = self._owners.setdefault(owner, {})
            held = sum(len(file.data) for file in owned.values())
            if len(owned) >= self.max_files or held + len(data) > self.memory_bytes:
                if not owned:
                    del self._owners[owner]
                raise self._full(owned, held, len(data))
            now = self._clock()
            file = StoredFile(
                id=f"{PREFIX}{secrets.token_hex(16)}",
                name=_plain(name),
                data=data,
                created=int(now),
                expires=math.ceil(now) + (self.keep_s if keep_s is None else min(keep_s, self.keep_s)),
            )
            owned[file.id] = file
        return file

    def get(self, owner: str, number: str, *, param: str | None = None) -> StoredFile:
        """An owner's file. Raises ApiError for one that is not there, has expired or is another key's: no telling which."""
        with self._lock:
            self._sweep()
            file = self._owners.get(owner, {}).get(number)
        if file is None:
            raise ApiError(
                "file_not_found", f"no file {number[:60]!r} of this key; it may have expired: upload it again", param=param
            )
        return file

    def list(self, owner: str) -> list[StoredFile]:
        """An owner's files, oldest first."""
        with self._lock:
            self._sweep()
            return list(self._owners.get(owner, {}).values())

    def delete(self, owner: str, number: str) -> None:
        """Forget a file. Raises ApiError as `get` does."""
        self.get(owner, number)
        with self._lock:
            self._owners.get(owner, {}).pop(number, None)

    def _full(self, owned: dict[str, StoredFile], held: int, size: int) -> ApiError:
        soonest = min((file.expires for file in owned.values()), default=self._clock())
        return ApiError(
            "files_full",
            f"this key holds {len(owned)} files of {held} bytes, {size} more do not fit (max_files {self.max_files}, "
            f"files_memory {self.memory_bytes} bytes); delete some or wait until one expires",
            retry_after_s=max(1, math.ceil(soonest - self._clock())),
        )

    def _sweep(self) -> None:
        now = self._clock()
        for owner, owned in list(self._owners.items()):
            for number in [number for number, file in owned.items() if file.expires <= now]:
                del owned[number]
            if not owned:
                del self._owners[owner]


def _plain(name: str) -> str:
    """A name to show: no folders, no control characters. It is never used as a path."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in last if character.isprintable())[:MAX_NAME] or "image"
