"""Places for pages in a few large pieces of host memory, side by side, so that a run of pages moves as one copy.

Owns which place is free: one is taken until the last view of it is gone, whoever holds that. Torch-free; what memory the pieces
are (pinned, for a card) is their giver's affair. Must not know keys, tiers or devices. Safe from any thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, cast

from kvist.cache.record import Buffer

PIECE_BYTES: Final = 64 << 20


class PageMemory:
    """Places of `record_bytes`, in each a page of `page_bytes` that begins `page_at` bytes behind the place's begin.

    `piece` gives writable memory of so many bytes, which stays; one is asked for whenever no place is free. Raises ValueError
    for a page that a record does not hold.
    """

    def __init__(
        self, piece: Callable[[int], memoryview], *, page_bytes: int, record_bytes: int | None = None, page_at: int = 0
    ) -> None:
        self.page_bytes, self.record_bytes, self.page_at = page_bytes, record_bytes or page_bytes, page_at
        if page_at + page_bytes > self.record_bytes:
            raise ValueError(f"a page of {page_bytes} bytes at {page_at} does not fit in a record of {self.record_bytes}")
        self.each = max(1, PIECE_BYTES // self.record_bytes)
        """Places of a piece; place `n` lies in piece `n // each`."""
        self._give, self._pieces, self._arrays = piece, list[memoryview](), list[ctypes.Array[_Place]]()
        # Places that hold nothing, the last one first, and those that have been let go since.
        self._free, self._returned = list[int](), deque[int]()
        self._lock = threading.Lock()
        self._place = _place_type(self.record_bytes, self._returned.append)
        self._array = self._place * self.each

    @property
    def places(self) -> int:
        """Places in all."""
        return len(self._pieces) * self.each

    @property
    def free(self) -> int:
        """Places that hold nothing now."""
        return len(self._free) + len(self._returned)

    def take(self, count: int) -> list[memoryview]:
        """Writable pages [page_bytes] in ascending places, neighbours as far as the free ones are."""
        return self.pages(self.reserve(count))

    def reserve(self, count: int) -> list[int]:
        """The numbers of such places, before anybody sees them: `pages` of each must be asked for once, however that ends."""
        with self._lock:
            if self._returned:
                # Others may let go meanwhile, but nobody else takes out.
                self._free += [self._returned.popleft() for _ in range(len(self._returned))]
                self._free.sort(reverse=True)
            while len(self._free) < count:
                first = self.places
                self._pieces.append(self._give(self.each * self.record_bytes))
                self._arrays.append(self._array.from_buffer(self._pieces[-1]))
                self._free[:0] = range(first + self.each - 1, first - 1, -1)
            taken = self._free[len(self._free) - count :][::-1]
            del self._free[len(self._free) - count :]
        return taken

    def pages(self, places: Sequence[int]) -> list[memoryview]:
        """The pages of reserved places."""
        return [self._page(number) for number in places]

    def own(self, payload: Buffer) -> memoryview:
        """The page's bytes in a place of this memory: themselves if they lie in one, else a copy."""
        if self.place_of(payload) is not None:
            assert isinstance(payload, memoryview)
            return payload
        (page,) = self.take(1)
        page[:] = payload
        return page

    def place_of(self, payload: Buffer) -> int | None:
        """The place that a page returned by `take` lies in; None for other memory."""
        holder = payload.obj if isinstance(payload, memoryview) else None
        return holder.number if isinstance(holder, self._place) else None

    def places_of(self, payloads: Sequence[Buffer]) -> list[int]:
        """The places of pages; -1 for one that lies in other memory."""
        if set(map(type, payloads)) <= {memoryview}:
            holders = [view.obj for view in cast("Sequence[memoryview]", payloads)]
            if set(map(type, holders)) <= {self._place}:
                return [place.number for place in cast("list[_Place]", holders)]
        return [-1 if (place := self.place_of(payload)) is None else place for payload in payloads]

    def records(self, first: int, count: int) -> memoryview:
        """Places `first`, `first` + 1, ... of one piece as one writable run of bytes."""
        at = first % self.each * self.record_bytes
        return self._pieces[first // self.each][at : at + count * self.record_bytes]

    def runs(self, places: list[int]) -> list[tuple[int, int]]:
        """(first, stop) of maximal runs of neighbours in a list of places, as positions in it."""
        if not places:
            return []
        first, stop = places[0], len(places)
        if places == list(range(first, first + stop)):
            # As most are, and found so in a fourth of the time: only the ends of pieces cut.
            cuts = list(range(self.each - first % self.each, stop, self.each))
        else:
            cuts = [at for at, (a, b) in enumerate(pairwise(places), 1) if b != a + 1 or not b % self.each]
        return list(pairwise([0, *cuts, stop]))

    def _page(self, number: int) -> memoryview:
        piece, at = divmod(number, self.each)
        place = self._arrays[piece][at]
        place.number = number
        return memoryview(place).cast("B")[self.page_at : self.page_at + self.page_bytes]


class _Place(ctypes.Array[ctypes.c_ubyte]):
    """What all views of a place hold on to. With its number in a slot: of thousands of places each line of memory counts."""

    __slots__ = ("number",)
    _type_ = ctypes.c_ubyte
    _length_ = 0
    number: int


def _place_type(nbytes: int, gone: Callable[[int], None]) -> type[_Place]:
    """A place of `nbytes` that says its number to `gone` when nobody can see it any more."""

    class Place(_Place):
        __slots__ = ()
        _type_ = ctypes.c_ubyte
        _length_ = nbytes

        def __del__(self) -> None:
            # May run anywhere, under any lock: one append, which waits for nothing.
            gone(self.number)

    return Place
