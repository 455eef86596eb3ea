"""Prefixes that stay in memory: pages that a finished request has left behind, held so that they are never evicted.

Owns the bound: what is pinned never takes the pages that the longest promised request needs. Must not know names, texts or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvist.cache.prefix import Pin
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.engine import Engine


class EnginePins:
    """Holds prefixes of a running engine, at most `share` of its pages. All work is done in the engine's thread.

    `folder`: where a list of what is pinned may be kept beside the pages themselves; None: nothing is kept.
    """

    def __init__(self, client: AsyncEngine, share: float, folder: Path | None) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"pins may hold a share of 0 up to (not including) 1 of the pages, got {share}")
        engine = client.engine
        self._client, self.folder = client, folder
        self.page_tokens = engine.plan.layout.page_tokens
        needed = -(-engine.plan.context // self.page_tokens)
        self.limit_pages = max(0, min(int(engine.plan.pages * share), engine.plan.pages - needed))
        self._held: dict[Pin, list[bytes]] = {}

    @property
    def pages(self) -> int:
        """Pages that are held; one that several prefixes share counts once."""
        return len({page for pin in list(self._held) for page in pin.pages})

    def pages_of(self, tokens: int) -> int:
        """Pages that a prefix of so many tokens may take."""
        return -(-tokens // self.page_tokens)

    async def hold(self, ids: Sequence[int], salt: bytes) -> Pin:
        """Hold what memory has of these tokens; `Pin.tokens` says how many those are. EngineStopped."""
        return await self._client.between_steps(lambda engine: self._hold(engine, ids, salt))

    async def release(self, pin: Pin) -> None:
        """Let go of a prefix. ValueError for one that is not held, EngineStopped."""
        await self._client.between_steps(lambda engine: self._release(engine, pin))

    async def touch(self) -> None:
        """Tell the lower tiers that the pinned pages are wanted, so that their copies on disk outlive the process too."""
        await self._client.between_steps(self._touch)

    def _hold(self, engine: Engine, ids: Sequence[int], salt: bytes) -> Pin:
        pin, keys = engine.pages.pin(np.asarray(ids, dtype=np.int64), salt)
        self._held[pin] = keys
        return pin

    def _release(self, engine: Engine, pin: Pin) -> None:
        engine.pages.index.unpin(pin)
        del self._held[pin]

    def _touch(self, engine: Engine) -> None:
        if engine.pages.tiers is not None:
            for keys in self._held.values():
                engine.pages.tiers.touch(keys)
