"""Random traces over one paged memory: chunks, decode, rejected drafts, shared prefixes, restarts, all in ragged batches.

The oracle is each request's full forward on a dense memory; native float32 operators give a row the same bits in any batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.engine.session import Session
from kvist.model.memory import DenseMemory
from tests.equivalence.test_paged_memory import VERIFY, Piece, model_of, run

SLOTS, LENGTH, SIZE, STEPS = 4, 56, 8, 14
EACH = LENGTH // SIZE + 1


@dataclass
class Request:
    """A slot's request: its tokens, its logits from one full forward, how many positions are computed, its pages."""

    ids: Tensor
    full: Tensor
    pages: list[int]
    done: int = 0
    publish: int = 0


class Trace:
    """One memory and the requests in its slots. Pages are counted here: a shared page is never given out."""

    def __init__(self, seed: int) -> None:
        self.random, self.model = random.Random(seed), model_of("cpu")
        self.memory = PagedMemory(
            self.model.config, self.model.numerics, pages=SLOTS * EACH, slots=SLOTS, verify_rows=VERIFY, page_tokens=SIZE
        )
        self.free = list(range(SLOTS * EACH))
        self.random.shuffle(self.free)
        self.owners = [0] * len(self.free)
        self.requests: dict[int, Request] = {}

    def take(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.owners[page] += 1
        return pages

    def drop(self, slot: int) -> None:
        for page in self.requests.pop(slot).pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)
        self.memory.close(slot)

    def begin(self, slot: int) -> None:
        """A new request: from nothing, or on another's prefix, whole pages shared and the last one copied."""
        others = [request for request in self.requests.values() if request.done >= 4]
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        ids = torch.randint(4, 256, (LENGTH,), generator=generator)
        hit, pages = 0, []
        if others and self.random.random() < 0.7:
            source = self.random.choice(others)
            hit = self.random.randrange(2, source.done + 1, 2)
            ids[:hit] = source.ids[:hit]
            pages = source.pages[: hit // SIZE]
            for page in pages:
                self.owners[page] += 1
            if hit % SIZE:
                copy = self.take(1)
                self.memory.copy_page(source.pages[hit // SIZE], copy[0])
                pages = pages + copy
        pages = pages + self.take(EACH - len(pages))
        full = Session(self.model, memory=DenseMemory(self.model.config, self.model.numerics), chunk=999).score(ids)
        self.requests[slot] = Request(ids, full, pages, publish=hit)
        self.memory.open(slot, pages, hit)

    def piece(self, slot: int) -> tuple[Piece, int]:
        """What a slot runs next, and how many of the rows have right tokens."""
        request = self.requests[slot]
        left = LENGTH - request.done
        if request.done and self.random.random() < 0.5:
            count = min(left, self.random.randint(1, VERIFY))
            right = self.random.randint(1, count)
            ids = torch.cat([request.ids[: request.done + right], 259 - request.ids[request.done + right :]])
            return (slot, ids, request.done, request.done + count, request.publish), right
        count = min(left, self.random.choice([1, 1, 2, 5, 9, 20]))
        return (slot, request.ids, request.done, request.done + count, request.publish), count

    def step(self) -> None:
        for slot in range(SLOTS):
            request = self.requests.get(slot)
            if request is not None and (request.done == LENGTH or self.random.random() < 0.05):
                self.drop(slot)
            if slot not in self.requests and self.random.random() < 0.7:
                self.begin(slot)
        slots = [slot for slot in self.requests if self.random.random() < 0.8]
        self.random.shuffle(slots)
        chosen = [self.piece(slot) for slot in slots]
        if not chosen:
            return
        logits = run(self.model, self.memory, [piece for piece, _ in chosen])
        at = 0
        for (slot, _, start, stop, _), right in chosen:
            request = self.requests[slot]
            assert torch.equal(logits[at : at + right], request.full[start : start + right]), (slot, start, stop, right)
            request.done, at = start + right, at + stop - start


@pytest.mark.parametrize("seed", range(12))
def test_every_row_has_the_bits_of_the_full_forward(seed: int) -> None:
    trace = Trace(seed)
    for _ in range(STEPS):
        trace.step()
        assert sum(owners > 0 for owners in trace.owners) + len(trace.free) == SLOTS * EACH
