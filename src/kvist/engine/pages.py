"""Pages of requests: pool, prefix index and identity chains put together for the scheduler and the engine.

Owns which pages of a job are offered to others and under what provenance. Must not know tensors or schedules; lower tiers
come in through `Tiers`. Design section 4.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvist.cache.identity import EXACT, Chain, ImageKey, bounded, page_key, root
from kvist.cache.pool import PagePool
from kvist.cache.prefix import Pin, PrefixIndex, PrefixQuery
from kvist.cache.record import Buffer, Page
from kvist.cache.tiers import Tiers
from kvist.config import LayerPlan
from kvist.engine.replay import Replay
from kvist.engine.request import Job
from kvist.engine.scheduler import Hit

LOG = logging.getLogger(__name__)

FEW_TOKENS = 16
"""Up to so many tokens are appended one by one, which costs a decode step less than arrays of them."""


ASKED_AT_ONCE = 64
"""Pages of a prompt that the disk is asked about at once, and then reads: one question costs about as much as one page's."""


class PageBytes(Protocol):
    """Where the bytes of device pages are."""

    def read(self, pages: Sequence[int]) -> Sequence[Buffer]:
        """The bytes of each page now."""
        ...

    def write(self, pages: Sequence[int], payloads: Iterable[Buffer | None]) -> int:
        """Overwrite pages in order, up to the first whose bytes are missing; returns how many were."""
        ...


class Pages:
    """Implements `scheduler.PageBook` on a pool and an index; publishes pages of finite, committed tokens.

    `fingerprint` and `numerics` tell models apart. With `tiers`, published pages are offered to them and come back from there
    through `content`. ValueError for tiers whose store belongs to another model or page size.
    """

    def __init__(
        self,
        plan: LayerPlan,
        *,
        pages: int,
        page_tokens: int,
        fingerprint: bytes,
        numerics: str,
        replay: Replay = "bounded",
        tiers: Tiers | None = None,
        content: PageBytes | None = None,
    ) -> None:
        assert tiers is None or content is not None, "tiers need the pages' bytes"
        self.plan, self.page_tokens, self.replay = plan, page_tokens, replay
        self.fingerprint, self.numerics = fingerprint, numerics
        self.tiers, self.content = tiers, content
        if tiers is not None and tiers.store is not None:
            model, held = root(fingerprint, numerics, b"", page_tokens), tiers.store.geometry
            if (held.model, held.page_tokens) != (model, page_tokens):
                raise ValueError(
                    f"the page store is for model {held.model.hex()} with pages of {held.page_tokens} tokens, this engine is "
                    f"{model.hex()} with {page_tokens}; open a store of its own"
                )
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, page_tokens, () if tiers is None else tiers.lookups)
        self._roots: dict[bytes, bytes] = {}
        self._coming: dict[bytes, int] = {}

    @property
    def total(self) -> int:
        """Pages in all."""
        return self.pool.total

    @property
    def available(self) -> int:
        """Pages that `allocate` could give now."""
        return self.pool.available

    def enter(self, job: Job) -> None:
        """Begin the job's identity chain with its whole prompt."""
        job.chain = Chain(self._root(job.request.salt), self.page_tokens)
        spans = sorted(job.request.images, key=lambda image: image.start)
        images = [ImageKey(image.content, image.start, image.tokens) for image in spans]
        job.chain.extend(job.tokens.ids, images)
        job.replay_length = self.accepted(job)
        self._prefetch(job)

    def _root(self, salt: bytes) -> bytes:
        if salt not in self._roots:
            if len(self._roots) >= 1 << 16:
                self._roots.clear()
            self._roots[salt] = root(self.fingerprint, self.numerics, salt, self.page_tokens)
        return self._roots[salt]

    def pin(self, ids: npt.NDArray[np.int64], salt: bytes) -> tuple[Pin, list[bytes]]:
        """Hold the pages in memory that begin with these tokens (no images); the pin, and the keys of its whole pages."""
        chain = Chain(self._root(salt), self.page_tokens)
        chain.extend(ids)
        pin = self.index.pin(PrefixQuery(chain, self._provenance_of(self.replay)))
        whole = pin.pages[: pin.tokens // self.page_tokens]
        return pin, [self.index.key_of(page) for page in whole]

    def _prefetch(self, job: Job) -> None:
        """Begin to read what only the disk has of the job's prefix, up to the first page that no tier has."""
        if self.tiers is None or self.tiers.store is None or job.chain is None or job.request.prompt_logprobs is not None:
            return
        missing = [digest for digest in job.chain.digests if not self._held(digest, job.replay_length)]
        wanted: list[bytes] = []
        for at in range(0, len(missing), ASKED_AT_ONCE):
            keys = [self._keys(digest, job.replay_length) for digest in missing[at : at + ASKED_AT_ONCE]]
            flat = [key for mine in keys for key in mine]
            where = dict(zip(flat, self.tiers.where(flat), strict=True))
            found = [next((key for key in mine if where[key] is not None), None) for mine in keys]
            there = list(takewhile(lambda key: key is not None, found))
            fresh = [key for key in there if key is not None and where[key] == "disk"]
            # The disk begins before the rest is asked for.
            self.tiers.prefetch(fresh)
            wanted += fresh
            if len(there) < len(keys):
                break
        job.coming = wanted[::-1]

    def _keys(self, digest: bytes, provenance: int) -> list[bytes]:
        return [page_key(digest, kind) for kind in dict.fromkeys((EXACT, provenance))]

    def accepted(self, job: Job) -> int:
        """The provenance that a job accepts and gives besides EXACT: the length of its bounded replay."""
        return self._provenance_of(self.replay if job.request.replay is None else job.request.replay)

    def _provenance_of(self, replay: Replay) -> int:
        if replay == "exact":
            return EXACT
        return bounded(self.plan.window if isinstance(replay, str) else replay)

    def lookup(self, job: Job) -> Hit:
        """See `scheduler.PageBook.lookup`. A prompt whose logits are all wanted hits nothing: all its rows must run."""
        assert job.chain is not None
        if job.request.prompt_logprobs is not None:
            return Hit([], None, 0, True, {})
        found = self.index.match(PrefixQuery(job.chain, job.replay_length, limit=len(job)))
        size, step = self.page_tokens, self.plan.alignment
        whole, exact, tiers = list(found.pages), found.exact, {"device": len(found.pages) * size}
        if found.lower and found.reach > found.tokens:
            if found.partial is not None:
                self.pool.release([found.partial[0]])
            return Hit(whole, None, len(whole) * size, exact, tiers, found.lower)
        if found.partial is None:
            return Hit(whole, None, len(whole) * size, exact, tiers)
        page, tokens = found.partial
        tokens -= tokens % step
        if not tokens:
            self.pool.release([page])
            return Hit(whole, None, len(whole) * size, exact, tiers)
        tiers["device"] += tokens
        return Hit(whole, page, len(whole) * size + tokens, exact, tiers)

    def restore(self, job: Job, hit: Hit) -> Hit:
        """See `scheduler.PageBook.restore`. Whole pages in order until one fails."""
        assert job.chain is not None and self.tiers is not None and self.content is not None
        coming = list(takewhile(lambda entry: entry.tokens == self.page_tokens, hit.lower))
        pages = self.pool.allocate(len(coming))
        try:
            came = self.content.write(pages, self.tiers.get_many([entry.key for entry in coming]))
        except BaseException:
            self.pool.release([*pages, *hit.pages])  # the caller gets none to hold
            raise
        self.pool.release(pages[came:])
        tiers = dict(hit.tiers)
        for provenance, run in groupby(coming[:came], key=lambda entry: entry.provenance):
            entries = list(run)
            first = entries[0].number - coming[0].number
            self.index.publish(job.chain, entries[0].number, pages[first : first + len(entries)], provenance)
            for entry in entries:
                tiers[entry.tier] = tiers.get(entry.tier, 0) + self.page_tokens
        whole = [*hit.pages, *pages[:came]]
        exact = hit.exact and all(entry.provenance == EXACT for entry in coming[:came])
        return Hit(whole, None, len(whole) * self.page_tokens, exact, tiers)

    def awaits(self, job: Job, *, busy: bool) -> bool:
        """See `scheduler.PageBook.awaits`."""
        assert job.chain is not None
        while job.coming and (self.tiers is None or not self.tiers.arriving(job.coming[-1])):
            job.coming.pop()
        if busy and job.coming:
            return True
        if job.request.prompt_logprobs is not None or not self._coming:
            return False
        digests, accepted = job.chain.digests, job.replay_length
        # No page is kept without the one before it, so the first that is missing is found by halving.
        missing = bisect_left(digests, True, key=lambda digest: not self._held(digest, accepted))
        return missing < len(digests) and any(key in self._coming for key in self._keys(digests[missing], accepted))

    def _held(self, digest: bytes, accepted: int) -> bool:
        return any(self.index.holds(key) for key in self._keys(digest, accepted))

    def begin(self, job: Job) -> None:
        """See `scheduler.PageBook.begin`."""
        assert job.chain is not None
        for digest in job.chain.digests[job.published :]:
            self._coming.setdefault(page_key(digest, self._provenance(job)), job.id)

    def _arrived(self, job: Job, digests: Sequence[bytes]) -> None:
        for digest in digests:
            key = page_key(digest, self._provenance(job))
            if self._coming.get(key) == job.id:
                del self._coming[key]

    def whereabouts(self, digests: Sequence[bytes], replay_length: int) -> dict[str, int]:
        """How many of these pages each tier holds now, those of bounded replay included. From any thread."""
        keys = [self._keys(digest, replay_length) for digest in list(digests)]
        count = {"device": sum(any(self.index.holds(key) for key in both) for both in keys), "host": 0, "disk": 0}
        if self.tiers is not None:
            store = self.tiers.store
            count["host"] = sum(any(self.tiers.in_memory(key) for key in both) for both in keys)
            kept = store.contains_many([key for both in keys for key in both]) if store is not None else set()
            count["disk"] = sum(any(key in kept for key in both) for both in keys)
        return count

    def allocate(self, count: int) -> list[int]:
        """See `scheduler.PageBook.allocate`."""
        return self.pool.allocate(count)

    def release(self, pages: Iterable[int]) -> None:
        """See `scheduler.PageBook.release`."""
        self.pool.release(list(pages))

    def advance(self, job: Job) -> list[tuple[int, int]]:
        """Put newly computed tokens into the chain and offer pages that became full (their rows are finite and final).

        Returns (number, page) of pages that the job reads from another request from now on, see `_adopt`.
        """
        assert job.chain is not None
        fresh = job.tokens.ids[job.chain.tokens : job.computed]
        if len(fresh) > FEW_TOKENS:
            job.chain.extend(fresh)
        else:
            for token in fresh.tolist():
                job.chain.append(token)
        first, full = job.published, job.computed // self.page_tokens
        if full <= first:
            return []
        provenance = self._provenance(job)
        holders = self.index.publish(job.chain, first, job.pages[first:full], provenance)
        if len(holders) < full - first:
            # A page before was offered by another job and has been evicted since: offer all of them again.
            first, holders = 0, self.index.publish(job.chain, 0, job.pages[:full], provenance)
        others = {number: page for number, page in enumerate(holders, first) if page != job.pages[number]}
        ours = [number for number in range(job.published, full) if number not in others]
        self._offer(job, provenance, ours)
        self._arrived(job, job.chain.digests[job.published : full])
        job.offered.update(ours)
        job.published = full
        return self._adopt(job, others) if provenance == EXACT else []

    def _adopt(self, job: Job, others: dict[int, int]) -> list[tuple[int, int]]:
        """Go on with pages that others published first under the same identity, and give the job's own back.

        Exact pages only. Two exact pages of one identity hold what a cold run gives: the same bits in `deterministic` mode,
        elsewhere bits that differ as they do between any two batches, and a hit would take either. Of bounded pages that is
        not so: their rows depend on where the hit before them ended, which their identity does not say. A reply that was
        begun on its own rows would go on with others, and bounded replay's meaning (rows stay as they were first computed)
        would be lost; such a duplicate is kept by its request until that ends, and then freed.
        """
        for number, page in others.items():
            self.pool.retain([page])
            self.pool.release([job.pages[number]])
            job.pages[number] = page
        job.adopted.update(others)
        return list(others.items())

    def _offer(self, job: Job, provenance: int, numbers: Sequence[int]) -> None:
        """Hand newly published pages to the lower tiers."""
        if self.tiers is None or self.content is None:
            return
        assert job.chain is not None
        try:
            payloads = self.content.read([job.pages[number] for number in numbers])
        except MemoryError as error:
            # Tiers only save work: these pages stay where they are, and are computed again once they have gone.
            LOG.warning("%d pages are not offered to the tiers: %s", len(numbers), error)
            return
        for number, payload in zip(numbers, payloads, strict=True):
            digest, parent = job.chain.identity(number)
            self.tiers.offer(Page(page_key(digest, provenance), payload, self.page_tokens, provenance, parent))

    def copied(self, job: Job, page: int) -> None:
        """The bytes of a held page are copied for the job, which goes on inside it: its hold ends, its name is noted."""
        job.copied = self.index.key_of(page)
        self.pool.release([page])

    def leave(self, job: Job, *, keep: bool) -> None:
        """The job is about to give its pages up: with `keep`, offer the page that is not full too, for the tokens it has."""
        assert job.chain is not None
        self._arrived(job, job.chain.digests[job.published :])
        job.offered, job.adopted, job.copied = set(), set(), None
        if not keep:
            return
        if not job.pages or job.computed != job.chain.tokens or not job.computed % self.page_tokens:
            return
        page = job.pages[job.computed // self.page_tokens]
        self.index.publish_partial(job.chain, page, self._provenance(job))

    def withdraw(self, job: Job) -> None:
        """Forget what the job has published since it was admitted: its numbers went wrong."""
        self.index.withdraw([job.pages[number] for number in sorted(job.offered)])
        job.offered = set()

    def distrust(self, job: Job) -> None:
        """The numbers behind the job's hit went wrong, perhaps because of it: whoever comes next computes those pages again.

        That is every page whose rows came from others: whole pages of the hit, the page whose first tokens were copied behind
        them, and pages adopted since. Pages behind which others have published stay: their numbers were right.
        """
        if job.span is None or job.chain is None:
            return
        numbers = sorted({*range(job.span.hit // self.page_tokens), *job.adopted})
        doubtful = []
        if job.copied is not None and self.index.forget(job.copied):  # first, as it may hang on the last whole page
            doubtful.append(job.copied)
        self.index.withdraw([job.pages[number] for number in numbers])
        if self.tiers is not None:
            gone = [number for number in numbers if not self.pool.kept(job.pages[number])]
            doubtful += [key for number in gone for key in self._keys(job.chain.digests[number], job.replay_length)]
            self.tiers.drop(doubtful)

    def _provenance(self, job: Job) -> int:
        return EXACT if job.exact_rows else job.replay_length
