"""Who may run now: requests at a time, quotas a key, and the end of all when the server drains.

Owns counts of what runs. Must not know HTTP or the engine. One event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvist.server.errors import ApiError
from kvist.server.generation import Generation

MAX_BUCKETS = 10_000


@dataclass
class Bucket:
    """An allowance that fills evenly over a minute; what is taken may overdraw it, and the next one waits."""

    per_minute: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        """Add what the time since the last look allows."""
        self.level = min(float(self.per_minute), self.level + (now - self.at) * self.per_minute / 60)
        self.at = now

    def wait_s(self, need: float) -> int:
        """Whole seconds until `need` is there; 0 if it is."""
        return max(0, math.ceil((need - self.level) * 60 / self.per_minute))


@dataclass
class Admission:
    """Lets requests in. `limit` at a time; a key's requests and tokens a minute (0: no limit)."""

    limit: int
    retry_after_s: int = 1
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    draining: bool = False
    _buckets: dict[tuple[str, str], Bucket] = field(default_factory=dict)
    _generations: set[Generation] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _hurried: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Holds a place while a request runs. Raises ApiError (429, 503)."""
        self.require_open()
        if self.running >= self.limit:
            raise ApiError(
                "too_many_requests",
                f"{self.running} requests run, at most {self.limit} may (max_concurrency); try again",
                retry_after_s=self.retry_after_s,
            )
        self._take_quota(tenant)
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    def require_open(self) -> None:
        """Raise if the server is on its way down."""
        if self.draining:
            raise ApiError("draining", "the server is shutting down; send the request to another one", retry_after_s=5)

    def spend(self, tenant: str, tokens: int) -> None:
        """Count a request's tokens when it has ended."""
        if self.tokens_per_minute:
            self._bucket("tokens", tenant, self.tokens_per_minute).level -= tokens

    @contextmanager
    def watched(self, generation: Generation) -> Iterator[Generation]:
        """Makes a generation one that `stop_all` ends."""
        self._generations.add(generation)
        try:
            yield generation
        finally:
            self._generations.discard(generation)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs; after `timeout_s`, or when it is hurried, end what still does. True if nothing was ended."""
        self.draining = True
        if not self.running:
            return True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurried)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for generation in self._generations:
            generation.stop(ApiError("draining", "the server shut down before this request ended; send it again"))
        return not self.running

    def hurry(self) -> None:
        """Let `drain` wait no longer."""
        self._hurried.set()

    def take(self, kind: str, tenant: str, per_minute: int) -> None:
        """Count one of the key's `kind` of the minute (0: no limit). Raises ApiError (429)."""
        if not per_minute:
            return
        bucket = self._bucket(kind, tenant, per_minute)
        if wait_s := bucket.wait_s(1):
            raise ApiError("quota_exceeded", f"this key's {per_minute} {kind} a minute are used up; wait", retry_after_s=wait_s)
        bucket.level -= 1

    def _take_quota(self, tenant: str) -> None:
        requests, tokens = self.requests_per_minute, self.tokens_per_minute
        waits = [0]
        if requests:
            waits.append(self._bucket("requests", tenant, requests).wait_s(1))
        if tokens:
            waits.append(self._bucket("tokens", tenant, tokens).wait_s(1))
        if max(waits):
            raise ApiError("quota_exceeded", "this key's quota of the minute is used up; wait", retry_after_s=max(waits))
        if requests:
            self._bucket("requests", tenant, requests).level -= 1

    def _bucket(self, kind: str, tenant: str, per_minute: int) -> Bucket:
        now = self.clock()
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        bucket = self._buckets.setdefault((kind, tenant), Bucket(per_minute, float(per_minute), now))
        bucket.refill(now)
        return bucket
