"""Named errors of the disk store: each says what was met, what the limit is, and the way out.

Owns the errors that a directory, a disk or a configuration can cause; a damaged page is not among them: it becomes a miss.
"""

from __future__ import annotations


class StoreError(RuntimeError):
    """A store cannot be used as asked; nothing that was stored is lost by it."""


class StoreUnwritable(StoreError):
    """The directory cannot be created, locked or written."""


class StoreFull(StoreError):
    """The disk has no room for a store to begin with."""


class NewerStore(StoreError):
    """The directory was written by a later version of the format."""


class OtherModel(StoreError):
    """The directory holds pages of another model, other numerics or another page layout."""


class NotAStore(StoreError):
    """The page file is something else, damaged in both copies of its head, or absent for a reader."""


class ReadOnlyStore(StoreError):
    """A change was asked of a store that is open for reading."""


class StoreBudgetTooSmall(StoreError, ValueError):
    """The byte budget does not hold one page."""
