"""What a person does to a store: prove all of it, cut it down, write its pages as plain files.

Owns these three walks; the store does the work on each page. Must not print, nor know the file formats of the store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from kvist.cache.store import PageStore
from kvist.cache.store_directory import capacity_of

LIST_NAME = "pages.jsonl"


@dataclass
class Verification:
    """Result of proving every page: good ones and their bytes, bad ones by reason, and what was wrong with the index."""

    pages: int = 0
    payload_bytes: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    index: str | None = None
    dropped: bool = False

    @property
    def good(self) -> bool:
        """True if nothing was wrong."""
        return not self.bad and self.index is None


def verify(store: PageStore) -> Verification:
    """Read and prove every page. A writer drops the bad ones, and makes a bad index again, by this; a reader only tells."""
    result = Verification(index=store.check_index(), dropped=not store.read_only)
    for entry in store.entries():
        found = store.prove(entry)
        if isinstance(found, str):
            result.bad[found] = result.bad.get(found, 0) + (found != "superseded")
        else:
            result.pages += 1
            result.payload_bytes += len(found.payload)
    result.bad = {reason: count for reason, count in result.bad.items() if count}
    store.flush()
    return result


def export(store: PageStore, out: Path) -> int:
    """Write every provable page as `KEY.page` (its bytes alone) and a line of `pages.jsonl`; returns how many.

    `out` must be absent or empty. Raises `ValueError` otherwise, `OSError` where it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give a new folder, so that an export is never mixed with other files")
    geometry, count = store.geometry, 0
    with (out / LIST_NAME).open("w") as lines:
        for entry in store.entries():
            found = store.prove(entry)
            if isinstance(found, str):
                continue
            header, name = found.header, f"{entry.key.hex()}.page"
            (out / name).write_bytes(found.payload)
            row = {
                "key": entry.key.hex(),
                "file": name,
                "bytes": len(found.payload),
                "tokens": header.tokens,
                "page_tokens": geometry.page_tokens,
                "provenance": "exact" if header.provenance == 0 else f"bounded({header.provenance})",
                "parent": header.parent.hex(),
                "sequence": header.sequence,
                "model": geometry.model.hex(),
            }
            lines.write(json.dumps(row) + "\n")
            count += 1
    return count


def prune(folder: Path, keep_bytes: int) -> tuple[int, int]:
    """Cut a store down to a byte budget; returns pages (removed, kept).

    Raises `ReadOnlyStore` while another process writes, `StoreBudgetTooSmall` for less than a page, else as `PageStore.open`.
    """
    store = PageStore.open(folder)
    try:
        gone = store.shrink(capacity_of(keep_bytes, store.geometry))
        return gone, store.stat().pages
    finally:
        store.close()
