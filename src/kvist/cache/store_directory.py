"""A store's directory: the writer's lock, opening or creating its files, and the index made again from the records.

Owns what must happen before a store is usable, and the errors it can end in. Must not serve pages.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvist.cache.page_file import FILE_NAME, HEAD_BYTES, FileSystem, Geometry, PageFile
from kvist.cache.page_index import BYTES_A_PAGE, PageIndex, UnfinishedIndex, is_damage, is_full
from kvist.cache.record import KEY_BYTES, CorruptPage, read_header
from kvist.cache.store_errors import NotAStore, OtherModel, StoreBudgetTooSmall, StoreError, StoreFull, StoreUnwritable

LOCK_NAME: Final = "writer.lock"
UNLIMITED: Final = 1 << 40
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

log = logging.getLogger(__name__)


def lock_for_writing(folder: Path, files: FileSystem, *, create: bool) -> tuple[int | None, str | None]:
    """Become the directory's writer: (lock, None), or (None, a notice) while another process is. Raises `OSError`.

    The kernel releases the lock of a process that ended in any way, so nothing stale is ever left behind.
    """
    if not create and not (folder / FILE_NAME).exists():
        raise _no_store(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fd = files.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        writer = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        return None, f"{folder} is being written by process {writer}: opened read-only, new pages are not kept on disk"
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd, None


def open_page_file(
    folder: Path,
    files: FileSystem,
    *,
    model: bytes | None,
    page_bytes: int | None,
    page_tokens: int | None,
    budget_bytes: int | None,
    writable: bool,
) -> tuple[PageFile, int]:
    """The page file of a folder and how many slots the budget allows. Raises `StoreError` or `OSError`.

    A writer creates what is missing, but nothing before the budget is known to hold a page.
    """
    if model is not None and len(model) != KEY_BYTES:
        raise ValueError(f"the model root has {len(model)} bytes, not {KEY_BYTES}; make it with identity.root")
    file = PageFile.open(folder, files, read_only=not writable)
    if file is not None:
        try:
            _require_same(file, model, page_bytes, page_tokens)
            return file, capacity_of(budget_bytes, file.geometry)
        except BaseException:
            file.close()
            raise
    if not writable or model is None or page_bytes is None:
        raise _no_store(folder)
    if not 1 <= page_bytes < 1 << 31:
        raise ValueError(f"page_bytes is {page_bytes}; from 1 to 2**31 - 1")
    geometry = Geometry.new(page_bytes=page_bytes, page_tokens=page_tokens or 0, model=model)
    capacity = capacity_of(budget_bytes, geometry)
    return PageFile.create(folder, geometry, files), capacity


def capacity_of(budget_bytes: int | None, geometry: Geometry) -> int:
    """Slots that a byte budget pays for, index included. Raises `StoreBudgetTooSmall` below one."""
    if budget_bytes is None:
        return UNLIMITED
    each = geometry.slot_bytes + BYTES_A_PAGE
    if budget_bytes < HEAD_BYTES + each:
        raise StoreBudgetTooSmall(
            f"a disk budget of {budget_bytes:,} bytes holds no page: one needs {HEAD_BYTES + each:,} bytes "
            f"(file head {HEAD_BYTES:,}, slot {geometry.slot_bytes:,}, index {BYTES_A_PAGE}). Raise it or leave the disk tier out"
        )
    return (budget_bytes - HEAD_BYTES) // each


def open_index(folder: Path, file: PageFile, *, read_only: bool) -> tuple[PageIndex, bool]:
    """The index that belongs to a page file, and whether it had to be made again. Raises `StoreError`, `sqlite3.Error`."""
    store = file.geometry.store
    try:
        return PageIndex(folder, store, read_only=read_only), False
    except sqlite3.Error as error:
        if read_only:
            raise NotAStore(
                f"the index of {folder} cannot be read ({error}) and a reader must not make it again: open the directory for "
                "writing once, for example with `kvist cache verify --drop`"
            ) from error
        if PageIndex.exists(folder) and not is_damage(error):
            raise
        fresh = not file.slots and (isinstance(error, UnfinishedIndex) or not PageIndex.exists(folder))
        log.log(logging.DEBUG if fresh else logging.WARNING, "%s: index is made from the records (%s)", folder, error)
    return make_index(folder, file), not fresh


def make_index(folder: Path, file: PageFile) -> PageIndex:
    """A new index from the headers in the page file. They are not proved: a page is when it is read."""
    index = PageIndex.create(folder, file.geometry.store)
    try:
        index.refill(_records(file))
    except BaseException:
        index.close()
        raise
    return index


def surroundings(error: OSError | sqlite3.Error, folder: Path) -> StoreError:
    """The named error for what the system said while a store was opened."""
    full = is_full(error) if isinstance(error, sqlite3.Error) else error.errno in _NO_ROOM
    reason = str(error) if isinstance(error, sqlite3.Error) else error.strerror or str(error)
    if full:
        return StoreFull(f"{folder}: {reason}. A store needs room for its head and index: free some, or choose another disk")
    return StoreUnwritable(f"{folder} cannot be used for a store: {reason}. Choose a directory that this user can write")


def is_no_room(error: OSError) -> bool:
    """Whether an error says that the disk, a quota or a file size limit is full."""
    return error.errno in _NO_ROOM


def _no_store(folder: Path) -> NotAStore:
    below = sorted(str(path.parent) for path in folder.glob(f"*/{FILE_NAME}")) if folder.is_dir() else []
    way = f"there is one in {', '.join(below)}" if below else "give the directory that a writer was started with"
    return NotAStore(f"{folder} holds no store ({FILE_NAME} is missing); {way}")


def _require_same(file: PageFile, model: bytes | None, page_bytes: int | None, page_tokens: int | None) -> None:
    here = file.geometry
    for name, wanted, found in (
        ("model root", model and model.hex(), here.model.hex()),
        ("bytes a page", page_bytes, here.page_bytes),
        ("tokens a page", page_tokens, here.page_tokens),
    ):
        if wanted is not None and wanted != found:
            raise OtherModel(
                f"{file.path} belongs to another model, numerics or page layout: its {name} is {found}, wanted {wanted}. "
                "Use a directory of its own for every model; the pages are left as they are"
            )


def _records(file: PageFile) -> Iterator[tuple[int, bytes | None, int]]:
    geometry = file.geometry
    for slot in range(file.slots):
        try:
            header = read_header(file.read_header(slot))
        except (CorruptPage, OSError):
            yield slot, None, 0  # the slot is free: whatever it holds is no page
            continue
        if header.model != geometry.model or header.payload_bytes != geometry.page_bytes or header.sequence >= 1 << 62:
            yield slot, None, 0
        else:
            yield slot, header.key, header.sequence
