"""Random life of a cache: requests come, hit, run, end, vanish and are preempted over a pool, its index and a toy tier.

Page contents are stood in for by a record of what each slot was computed from, so every hit is checked for holding the
right rows of the right tenant, image and provenance. Counts are checked after each step, and nothing is left at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.cache.identity import EXACT, Chain, ImageKey, bounded, common_tokens, root
from kvist.cache.key_table import KeyTable
from kvist.cache.page_ends import PageEnds
from kvist.cache.pool import CacheFull, PagePool
from kvist.cache.prefix import LowerPage, Pin, PrefixIndex, PrefixQuery

ALIGNMENT = 2
PICTURES = (b"c" * 32, b"d" * 32)
REPLAY = bounded(4)


@dataclass(frozen=True)
class Slot:
    """What one token's rows were computed from: tenant and every token and image up to it; `approximate` after a replay."""

    origin: int
    approximate: bool


@dataclass(eq=False)
class Request:
    """A toy request: the tokens it will have, how far it is, and the pages that it holds."""

    tokens: list[int]
    images: list[ImageKey]
    tenant: int
    accepts: int
    chain: Chain
    pages: list[int] = field(default_factory=list)
    done: int = 0
    published: int = 0
    provenance: int = EXACT
    poisoned: bool = False


class Tier:
    """Copies of pages by key; reads may fail, and copies vanish."""

    name = "shelf"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.copies: dict[bytes, list[Slot | None]] = {}

    def holds(self, key: bytes) -> bool:
        return key in self.copies

    def put(self, key: bytes, slots: list[Slot | None]) -> None:
        self.copies[key] = list(slots)
        while len(self.copies) > 40:
            del self.copies[self.rng.choice(sorted(self.copies))]

    def get(self, key: bytes) -> list[Slot | None] | None:
        if self.rng.random() < 0.1:
            self.copies.pop(key, None)
        return self.copies.get(key)


class World:
    """All of it, driven by one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.size = self.rng.choice([2, 4, 8])
        self.events: Counter[str] = Counter()
        self.tier = Tier(self.rng)
        self.start()

    def start(self) -> None:
        """A fresh process: empty pool and index, the tier as it was."""
        self.pool = PagePool(self.rng.randint(20, 60))
        self.index = PrefixIndex(self.pool, self.size, [self.tier])
        self.index.on_evict = self.evicted
        self.slots: list[list[Slot | None]] = [[None] * self.size for _ in range(self.pool.total)]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pins: list[Pin] = []

    # ---- what requests are made of

    def new_request(self) -> Request:
        rng = self.rng
        tokens: list[int] = []
        # Few fragments in few orders: prefixes are shared, part ways inside pages, and come back.
        for _ in range(rng.randint(1, 5)):
            fragment = random.Random(rng.randint(0, 3))
            tokens += [fragment.randint(0, 3) for _ in range(fragment.choice([3, 5, 8, 13]))]
        images = []
        if rng.random() < 0.5:
            images = [ImageKey(rng.choice(PICTURES), rng.choice([0, 3]), rng.choice([2, 7]))]
        images = [image for image in images if image.end <= len(tokens)]
        tenant = rng.randrange(2)
        chain = Chain(root(b"m" * 32, "toy", bytes([tenant]), self.size), self.size)
        chain.extend(tokens, images)
        return Request(tokens, images, tenant, rng.choice([EXACT, REPLAY]), chain, poisoned=rng.random() < 0.05)

    def origin(self, request: Request, position: int) -> int:
        images = tuple((image.content, image.start) for image in request.images if image.start <= position)
        spans = tuple(min(image.end, position + 1) for image in request.images if image.start <= position)
        return hash((request.tenant, tuple(request.tokens[: position + 1]), images, spans))

    # ---- the life of a request

    def submit(self) -> None:
        """One request, or two alike that may both run before the first has published anything."""
        request = self.new_request()
        self.waiting.append(request)
        if self.rng.random() < 0.4:
            self.waiting.append(self.again(request, request.tokens))
            self.admit()
            self.admit()

    def again(self, request: Request, tokens: list[int]) -> Request:
        """A new request of the same tenant with the same images."""
        chain = Chain(request.chain.root, self.size)
        chain.extend(tokens, request.images)
        return Request(tokens, request.images, request.tenant, self.rng.choice([EXACT, REPLAY]), chain)

    def admit(self) -> None:
        if not self.waiting:
            return
        request = self.waiting.pop(self.rng.choice([-1, self.rng.randrange(len(self.waiting))]))
        limit = len(request.tokens) - 1
        found = self.index.match(PrefixQuery(request.chain, request.accepts, limit))
        request.pages = list(found.pages)
        try:
            if found.partial:
                self.copy(found.partial, request)
            hit = found.tokens
            if found.lower and found.reach > hit:
                self.drop_partial(request, len(found.pages))
                hit = len(found.pages) * self.size + self.restore(request, found.lower)
        except CacheFull:
            self.events["refused"] += 1
            self.pool.release(request.pages)
            request.pages = []
            self.waiting.append(request)
            return
        self.begin(request, hit - hit % ALIGNMENT, len(found.pages))

    def begin(self, request: Request, hit: int, whole: int) -> None:
        keep = -(-hit // self.size)
        self.pool.release(request.pages[keep:])
        request.pages = request.pages[:keep]
        assert hit < len(request.tokens), "nothing would be left to compute"
        held = [self.slots[request.pages[at // self.size]][at % self.size] for at in range(hit)]
        for at, slot in enumerate(held):
            assert slot is not None and slot.origin == self.origin(request, at), f"position {at} holds foreign rows"
        approximate = any(slot and slot.approximate for slot in held)
        assert not (approximate and request.accepts == EXACT), "an exact request was given approximate rows"
        request.done = hit
        request.published = min(max(whole, request.published), hit // self.size)
        if hit and request.accepts != EXACT:
            request.provenance = request.accepts
        self.events["hit" if hit else "miss"] += 1
        self.events["partial hit"] += hit % self.size > 0
        self.running.append(request)

    def copy(self, partial: tuple[int, int], request: Request) -> None:
        """Copy-on-write; the shared page is given back whether or not there is room."""
        page, tokens = partial
        try:
            (own,) = self.allocate(1)
        finally:
            self.pool.release([page])
        self.slots[own][:tokens] = self.slots[page][:tokens]
        request.pages.append(own)

    def drop_partial(self, request: Request, whole: int) -> None:
        self.pool.release(request.pages[whole:])
        del request.pages[whole:]

    def restore(self, request: Request, lower: list[LowerPage]) -> int:
        """Bring pages up from the tier until one fails; returns the tokens that were restored."""
        tokens = 0
        for page in lower:
            copy = self.tier.get(page.key)
            if copy is None:
                self.events["tier failed"] += 1
                break
            (own,) = self.allocate(1)
            self.slots[own] = list(copy)
            request.pages.append(own)
            tokens += page.tokens
            self.events["restored"] += 1
            if page.tokens == self.size:
                self.exchange(request, page.number, self.index.publish(request.chain, page.number, [own], page.provenance))
                request.published = page.number + 1
        return tokens

    def allocate(self, count: int) -> list[int]:
        pages = self.pool.allocate(count)
        for page in pages:
            self.slots[page] = [None] * self.size
        return pages

    def advance(self) -> None:
        """One step: every running request computes a chunk."""
        for request in list(self.running):
            if request not in self.running:
                continue
            end = min(request.done + self.rng.choice([1, 1, self.size + 1]), len(request.tokens))
            try:
                request.pages += self.allocate(-(-end // self.size) - len(request.pages))
            except CacheFull:
                self.preempt(self.running[-1])
                continue
            for at in range(request.done, end):
                self.write(request, at)
            request.done = end
            if not request.poisoned:
                self.publish(request)
            if end == len(request.tokens):
                self.finish(request)

    def write(self, request: Request, at: int) -> None:
        page, place = request.pages[at // self.size], at % self.size
        assert self.pool.references(page) == 1, "a page that another request reads is written to"
        assert not self.pool.kept(page) or self.slots[page][place] is None, "rows that others may find are written over"
        self.slots[page][place] = Slot(self.origin(request, at), request.provenance != EXACT)

    def publish(self, request: Request) -> None:
        first, last = request.published, request.done // self.size
        holders = self.index.publish(request.chain, first, request.pages[first:last], request.provenance)
        if self.rng.random() < 0.4:
            self.exchange(request, first, holders)
        for number, page in enumerate(holders, first):
            if page == request.pages[number] and self.rng.random() < 0.5:
                self.tier.put(self.index.key_of(page), self.slots[page])
        request.published = last

    def exchange(self, request: Request, first: int, holders: list[int]) -> None:
        """Read the page that was there before instead of an own copy."""
        for number, page in enumerate(holders, first):
            own = request.pages[number]
            if own != page:
                self.pool.retain([page])
                self.pool.release([own])
                request.pages[number] = page
                self.events["exchanged"] += 1

    def finish(self, request: Request) -> None:
        if request.done == len(request.tokens) and request.chain.tail_tokens and not request.poisoned:
            self.index.publish_partial(request.chain, request.pages[-1], request.provenance)
        self.leave(request)
        if self.rng.random() < 0.5:
            self.waiting.append(self.again(request, request.tokens + self.new_request().tokens[:6]))

    def preempt(self, request: Request) -> None:
        self.events["preempted"] += 1
        self.leave(request)
        request.pages, request.done, request.published, request.provenance = [], 0, 0, EXACT
        self.waiting.append(request)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)

    # ---- what else happens

    def cancel(self) -> None:
        if self.running:
            self.events["cancelled"] += 1
            self.leave(self.rng.choice(self.running))

    def pin(self) -> None:
        if len(self.pins) < 2:
            request = self.new_request()
            self.pins.append(self.index.pin(PrefixQuery(request.chain, request.accepts)))

    def unpin(self) -> None:
        if self.pins:
            self.index.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))

    def evict(self) -> None:
        self.index.evict_one()

    def evicted(self, page: int, key: bytes, provenance: int, tokens: int) -> None:
        assert self.pool.references(page) == 0
        held = self.slots[page][:tokens]
        assert all(slot is not None for slot in held), "the bytes of an evicted page are gone already"
        assert provenance != EXACT or not any(slot.approximate for slot in held if slot)
        if tokens == self.size and self.rng.random() < 0.5:
            self.tier.put(key, self.slots[page])

    def shutdown(self) -> None:
        """Everybody leaves; the pool must be empty again."""
        while self.running:
            self.leave(self.running[0])
        while self.pins:
            self.unpin()
        assert self.pool.owned == 0
        while self.index.evict_one() is not None:
            pass
        self.check()
        assert (self.pool.free, self.index.pages) == (self.pool.total, 0), "pages leaked"
        self.events.update(superseded=self.index.counters.superseded, evicted=self.index.counters.evicted)

    def step(self) -> None:
        acts = [self.submit, self.admit, self.advance, self.cancel, self.pin, self.unpin, self.evict]
        if len(self.waiting) > 8:
            self.waiting.pop()
        if self.rng.random() < 0.002:
            self.shutdown()
            self.start()
        self.rng.choices(acts, weights=[6, 8, 16, 1, 0.3, 0.3, 0.5])[0]()
        self.check()

    def check(self) -> None:
        self.index.check()
        want = Counter(page for request in self.running for page in request.pages)
        want += Counter(page for pin in self.pins for page in pin.pages)
        assert {p: n for p in range(self.pool.total) if (n := self.pool.references(p))} == want
        assert self.pool.free + self.pool.owned + self.pool.cached == self.pool.total
        self.events["blocked"] += self.pool.available < self.pool.free + self.pool.cached


def walk(seed: int, steps: int) -> Counter[str]:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.shutdown()
    return world.events


EXPECTED = {
    "hit", "miss", "partial hit", "refused", "preempted", "cancelled", "restored", "tier failed", "exchanged", "superseded",
    "evicted", "blocked",
}  # fmt: skip


def test_random_lives_are_sound_and_everything_happens() -> None:
    events: Counter[str] = Counter()
    for seed in range(6):
        events += walk(seed, 250)
    assert set(events) == EXPECTED, events


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_random_lives_are_sound_long(seed: int) -> None:
    assert set(walk(seed, 2000)) >= {"hit", "miss", "partial hit", "restored", "evicted"}


# ---- the parts against plain models of them


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(0, 40)), max_size=80))
def test_the_key_table_is_a_dictionary(calls: list[tuple[bool, int, int]]) -> None:
    """16 pages, 41 keys in 32 places: probes run into each other and over the end."""
    table, model = KeyTable(16, 16), {}
    names = {number: number.to_bytes(16, "big") for number in range(41)}
    for insert, page, number in calls:
        owner = {key for key, other in model.items() if other == page}
        if insert and not owner and names[number] not in model:
            table.insert(names[number], page)
            model[names[number]] = page
        elif not insert and owner:
            table.remove(page)
            del model[owner.pop()]
        assert {name: table.find(name) for name in names.values()} == {name: model.get(name) for name in names.values()}
        assert table.used == len(model)


CONTENTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(lambda ids: b"".join(i.to_bytes(4, "big") for i in ids))


@given(stored=st.lists(CONTENTS, max_size=12), asked=CONTENTS, gone=st.sets(st.integers(0, 11)))
def test_page_ends_agree_with_a_search_of_all(stored: list[bytes], asked: bytes, gone: set[int]) -> None:
    ends = PageEnds(limit=12)
    for page, content in enumerate(stored):
        ends.add(page, b"below", content, turn=False)
        ends.add(page + 100, b"elsewhere", content, turn=False)
    for page in gone:
        ends.discard(page)
    ends.limit = 24
    ends.check()
    left = {page: content for page, content in enumerate(stored) if page not in gone}
    want = max((common_tokens(content, asked) for content in left.values()), default=0)
    page, tokens = ends.longest(b"below", asked)
    assert tokens == want
    assert not want or common_tokens(left[page], asked) == want
    holder = ends.holder(b"below", asked)
    assert (holder is not None) == any(content.startswith(asked) for content in left.values())
    assert holder is None or left[holder].startswith(asked)
    shorter = ends.shorter(b"below", asked)
    assert shorter is None or (asked.startswith(left[shorter]) and len(left[shorter]) < len(asked))
