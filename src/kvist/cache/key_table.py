"""From a page's key to the page: a hash table in two flat arrays, so that a million pages cost 30 MB and no objects.

Owns keys by page and their places. Must not know what a key stands for. Keys are cryptographic digests, but the place
comes from Python's own randomised hash of bytes: nobody can prepare keys that meet in one place.
"""

from __future__ import annotations

from array import array


class KeyTable:
    """At most one key a page and one page a key; open addressing with linear probes, at most half full."""

    def __init__(self, pages: int, key_bytes: int) -> None:
        self.key_bytes = key_bytes
        self._mask = (1 << (2 * pages - 1).bit_length()) - 1
        # 0: empty; otherwise page + 1
        self._places = array("I", bytes(4 * (self._mask + 1)))
        self._keys = bytearray(pages * key_bytes)
        self.used = 0

    def find(self, key: bytes) -> int | None:
        """The page of a key, or None."""
        place = self._place(key)
        held = self._places[place]
        return held - 1 if held else None

    def insert(self, key: bytes, page: int) -> None:
        """Give a page its key. The key must not be there and the page must have none (the caller's own invariant)."""
        assert len(key) == self.key_bytes, f"a key has {self.key_bytes} bytes, got {len(key)}"
        place = self._place(key)
        assert not self._places[place], f"the key of page {page} belongs to page {self._places[place] - 1}"
        self._places[place] = page + 1
        self._keys[page * self.key_bytes : (page + 1) * self.key_bytes] = key
        self.used += 1

    def key_of(self, page: int) -> bytes:
        """The key last given to a page; meaningful while it is in the table."""
        return bytes(self._keys[page * self.key_bytes : (page + 1) * self.key_bytes])

    def remove(self, page: int) -> None:
        """Take a page's key out; the keys after it move up, so that no probe ends too early."""
        places, mask = self._places, self._mask
        hole = self._place(self.key_of(page))
        assert places[hole] == page + 1, f"page {page} has no key"
        at = hole
        while held := places[at := at + 1 & mask]:
            wanted = hash(self.key_of(held - 1)) & mask
            # An entry may move into the hole unless its own place lies (cyclically) after the hole.
            if (at - wanted & mask) >= (at - hole & mask):
                places[hole], hole = held, at
        places[hole] = 0
        self.used -= 1

    def _place(self, key: bytes) -> int:
        places, mask, size, keys = self._places, self._mask, self.key_bytes, self._keys
        place = hash(key) & mask
        while held := places[place]:
            start = (held - 1) * size
            if keys[start : start + size] == key:
                break
            place = place + 1 & mask
        return place
