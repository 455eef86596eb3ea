"""What a store tells about itself: counts of what happened since opening, and its state now.

Owns names and meaning of the figures. Must not count anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StoreCounters:
    """What happened since opening, in pages unless named otherwise. `corrupt`: damaged pages that were dropped, by reason."""

    hits: int = 0
    misses: int = 0
    negative_hits: int = 0
    published: int = 0
    already_there: int = 0
    not_published: int = 0
    evicted: int = 0
    superseded: int = 0
    read_errors: int = 0
    write_errors: int = 0
    full: int = 0
    index_errors: int = 0
    index_rebuilds: int = 0
    corrupt: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        """All faults together: damaged pages, failed reads and writes, a full disk, a bad index."""
        errors = self.read_errors + self.write_errors + self.full + self.index_errors + self.index_rebuilds
        return errors + sum(self.corrupt.values())


@dataclass(frozen=True, kw_only=True)
class StoreStat:
    """State of a store: pages, the most that the budget allows (None: no limit), and bytes of its files."""

    pages: int
    capacity: int | None
    slot_bytes: int
    page_bytes: int
    used_bytes: int
    file_bytes: int
    index_bytes: int
    read_only: bool
