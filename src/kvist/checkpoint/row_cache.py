"""A bounded cache of equally long rows by id: sets of a few ways, the least recently used of a set goes first.

Whole batches are looked up and kept at once, in arrays: a table's rows are too small and too many for a dictionary. Must not
know where rows come from. Not safe for several threads at once; the owner locks.
"""

from __future__ import annotations

import numpy as np

WAYS = 8
_OVERHEAD_BYTES = 16  # tag and stamp of a way
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbouring ids fall into different sets


class RowCache:
    """At most `budget_bytes` of rows of `row_bytes` each, bookkeeping included, and room for no more than `most_rows`."""

    def __init__(self, row_bytes: int, budget_bytes: int, most_rows: int) -> None:
        self.row_bytes = row_bytes
        self.sets = min(budget_bytes // (WAYS * (row_bytes + _OVERHEAD_BYTES)), -(-most_rows // WAYS))
        self.tags_SW = np.full((self.sets, WAYS), -1, dtype=np.int64)
        self.stamps_SW = np.zeros((self.sets, WAYS), dtype=np.int64)
        self.rows_SWB = np.empty((self.sets, WAYS, row_bytes), dtype=np.uint8)
        self.clock = 0

    @property
    def capacity(self) -> int:
        """Rows that can be held."""
        return self.sets * WAYS

    def get(self, ids_n: np.ndarray, out_nB: np.ndarray) -> np.ndarray:
        """Copy the held ones of distinct ids into their rows of `out_nB`; bool [n], True where held."""
        if not self.sets:
            return np.zeros(len(ids_n), dtype=bool)
        self.clock += 1
        at_n = self._set_of(ids_n)
        match_nW = self.tags_SW[at_n] == ids_n[:, None]
        held_n = match_nW.any(1)
        way_n = match_nW.argmax(1)
        sets, ways = at_n[held_n], way_n[held_n]
        out_nB[held_n] = self.rows_SWB[sets, ways]
        self.stamps_SW[sets, ways] = self.clock
        return held_n

    def put(self, ids_n: np.ndarray, rows_nB: np.ndarray) -> None:
        """Keep rows of distinct ids that are not held. Of more than `WAYS` that fall into one set the first are kept."""
        if not self.sets:
            return
        self.clock += 1
        left_n = np.arange(len(ids_n))
        for _ in range(WAYS):
            if not len(left_n):
                return
            at_n = self._set_of(ids_n[left_n])
            # One row a set and round, so that no two rows want the same way.
            sets, first_n = np.unique(at_n, return_index=True)
            chosen_n = left_n[first_n]
            ways = self.stamps_SW[sets].argmin(1)
            self.tags_SW[sets, ways] = ids_n[chosen_n]
            self.stamps_SW[sets, ways] = self.clock
            self.rows_SWB[sets, ways] = rows_nB[chosen_n]
            left_n = np.delete(left_n, first_n)

    def _set_of(self, ids_n: np.ndarray) -> np.ndarray:
        mixed_n = (ids_n.astype(np.uint64) * _SPREAD) >> np.uint64(32)
        return (mixed_n % np.uint64(self.sets)).astype(np.int64)
