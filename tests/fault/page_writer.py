"""A process that writes pages until it is killed, and what every test of the store knows about pages by number.

Run as a program: `page_writer.py FOLDER FIRST BUDGET BATCH [KEEP]`; prints the number up to which pages are published. With KEEP
it cuts the store down to that many pages after each batch. Imports no torch.
"""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

from kvist.cache.record import Page
from kvist.cache.store import PageStore

MODEL = b"model under test"
PAGE_BYTES = 1500
PAGE_TOKENS = 4


def key(number: int) -> bytes:
    return blake2b(b"page %d" % number, digest_size=16).digest()


def payload(number: int, page_bytes: int = PAGE_BYTES) -> bytes:
    return random.Random(number).randbytes(page_bytes)


def page(number: int, page_bytes: int = PAGE_BYTES) -> Page:
    return Page(key(number), payload(number, page_bytes), tokens=PAGE_TOKENS, provenance=number % 3, parent=key(number - 1))


def open_store(folder, **options) -> PageStore:
    options = {"model": MODEL, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS} | options
    return PageStore.open(folder, **options)


def main() -> None:
    folder, first, budget, batch = sys.argv[1], *map(int, sys.argv[2:5])
    store = open_store(folder, budget_bytes=budget or None)
    assert not store.read_only and "torch" not in sys.modules
    print("open", flush=True)
    while True:
        assert store.put([page(number) for number in range(first, first + batch)]) == batch
        first += batch
        print(first, flush=True)
        if len(sys.argv) > 5:
            store.shrink(int(sys.argv[5]))


if __name__ == "__main__":
    main()
