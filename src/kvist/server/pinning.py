"""Named prefixes that stay in the cache: computed once, held, listed, let go, and there again after a restart.

Owns names, the list on disk and the order of the work. Must not know HTTP or pages; the engine's side (`PinHolder`) holds them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.engine.request import FinishedEvent, Request
from kvist.engine.sampling.params import SamplingParams
from kvist.server.errors import ApiError, failed, refused
from kvist.server.logs import note
from kvist.server.served import EngineClient, PinHolder

FORMAT = 1
FILE_NAME = "pins.json"
TOUCH_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A named prefix: its ids, one hold a salt, tokens found in the cache and seconds when it was pinned, where it came from."""

    name: str
    ids: tuple[int, ...]
    held: tuple[Any, ...]
    pages: int
    cached_tokens: int
    seconds: float
    source: str


class Pinner:
    """Pins prefixes for all callers. `salts`: one for each cache that is kept apart; each gets a copy of its own."""

    def __init__(
        self, holder: PinHolder, engine: EngineClient, salts: Sequence[bytes], *, context: int, deadline_s: float
    ) -> None:
        self._holder, self._engine, self._salts = holder, engine, tuple(salts)
        self._context, self._deadline_s = context, deadline_s
        self._pins: dict[str, Pinned] = {}
        self._coming: dict[str, list[int]] = {}
        try:
            self._coming = dict(self._saved())
        except (ValueError, OSError) as error:
            note("pins", level=logging.ERROR, error=error)
        self._turn = asyncio.Lock()

    @property
    def pins(self) -> list[Pinned]:
        """All, by name."""
        return [self._pins[name] for name in sorted(self._pins)]

    @property
    def pages(self) -> int:
        """Pages held."""
        return self._holder.pages

    @property
    def limit_pages(self) -> int:
        """Most pages that may be held."""
        return self._holder.limit_pages

    @property
    def tokens(self) -> int:
        """Tokens held, all copies."""
        return sum(held.tokens for pin in self._pins.values() for held in pin.held)

    async def pin(self, name: str, ids: Sequence[int], source: str = "api") -> Pinned:
        """Compute a prefix if need be and hold it. Pinning the same again changes nothing. Raises ApiError."""
        if not _NAME.fullmatch(name):
            raise ApiError("invalid_value", f"a pin's name has 1..64 letters, digits, . _ or -, got {name[:80]!r}", param="name")
        async with self._turn:
            known = self._pins.get(name)
            if known is not None and known.ids == tuple(ids):
                return known
            if known is not None:
                raise ApiError("invalid_value", f"a pin {name!r} of other tokens exists; delete it first", param="name")
            self._require_room(len(ids))
            pin = await self._computed(name, tuple(ids), source)
            self._pins[name] = pin
            self._coming.pop(name, None)
            await asyncio.to_thread(self._save)
        note("pinned", name=name, tokens=len(ids), pages=pin.pages, cached_tokens=pin.cached_tokens, seconds=pin.seconds)
        return pin

    async def unpin(self, name: str) -> None:
        """Let go of a prefix; its pages may then be evicted like others. Raises ApiError."""
        async with self._turn:
            pin = self._pins.pop(name, None)
            if pin is None and self._coming.pop(name, None) is None:
                raise ApiError("pin_not_found", f"no pin {name[:80]!r}; GET /kvist/pins lists them")
            if pin is not None:
                await self._let_go(pin.held)
            await asyncio.to_thread(self._save)
        note("unpinned", name=name)

    async def keep(self, wanted: Callable[[], Awaitable[list[tuple[str, list[int]]]]]) -> None:
        """Pin what the settings and the list on disk name, then keep the copies on disk fresh; runs until cancelled.

        What cannot be pinned is logged and left out: the server serves all the same.
        """
        try:
            named = [("settings", name, ids) for name, ids in await wanted()]
        except (ApiError, ValueError, OSError) as error:
            note("pins", level=logging.ERROR, error=error)
            named = []
        for source, name, ids in [*named, *(("api", name, ids) for name, ids in self._coming.items())]:
            try:
                await self.pin(name, ids, source)
            except ApiError as error:
                note("not pinned", level=logging.ERROR, name=name, reason=error.message)
        while True:
            await asyncio.sleep(TOUCH_S)
            await self._holder.touch()

    def _require_room(self, tokens: int) -> None:
        if not 1 <= tokens < self._context:
            raise ApiError("context_length_exceeded", f"a pin has 1..{self._context - 1} tokens, got {tokens}", param="prompt")
        need = self._holder.pages_of(tokens) * len(self._salts)
        if self._holder.pages + need > self._holder.limit_pages:
            raise ApiError(
                "pins_full",
                f"{tokens} tokens need {need} pages ({len(self._salts)} copies), {self._holder.pages} of at most "
                f"{self._holder.limit_pages} are pinned (pin_share); delete a pin, or give the cache more memory",
            )

    async def _computed(self, name: str, ids: tuple[int, ...], source: str) -> Pinned:
        began, cached = time.perf_counter(), 0
        held: list[Any] = []
        try:
            for salt in self._salts:
                cached += await self._run(ids, salt)
                held.append(await self._kept_hold(ids, salt, held))
                # The page at the end counts only as far as rows are whole groups; a whole page less means it was evicted.
                if self._holder.pages_of(held[-1].tokens + 1) < self._holder.pages_of(len(ids) + 1):
                    raise ApiError("engine_error", f"only {held[-1].tokens} of {len(ids)} tokens stayed in memory; try again")
        except BaseException as error:
            await asyncio.shield(self._let_go(held))
            if isinstance(error, Exception) and not isinstance(error, ApiError):
                raise failed(error) from error
            raise
        seconds = round(time.perf_counter() - began, 4)
        pages = sum(self._holder.pages_of(hold.tokens) for hold in held)
        return Pinned(name=name, ids=ids, held=tuple(held), pages=pages, cached_tokens=cached, seconds=seconds, source=source)

    async def _kept_hold(self, ids: tuple[int, ...], salt: bytes, held: list[Any]) -> Any:
        """A hold that is not lost if the caller goes while the engine's thread is making it."""
        holding = asyncio.ensure_future(self._holder.hold(ids, salt))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            held.append(await holding)
            raise

    async def _run(self, ids: tuple[int, ...], salt: bytes) -> int:
        """Have the prefix computed; how many of its tokens the cache had."""
        sampling = SamplingParams(temperature=0)
        try:
            request = Request(prompt=ids, max_tokens=1, sampling=sampling, salt=salt, tenant="pins", deadline_s=self._deadline_s)
        except ValueError as error:
            raise refused(error) from error
        events = await self._engine.submit(request)
        try:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    if event.reason in ("error", "cancelled"):
                        raise failed(event.error)
                    return event.usage.cached_tokens
        finally:
            await events.close()
        raise AssertionError("a request ends with FinishedEvent")

    async def _let_go(self, held: Sequence[Any]) -> None:
        for pin in held:
            await self._holder.release(pin)

    def _save(self) -> None:
        """Write the list of pins that came over the API, those of an earlier process that are not pinned again yet included.

        Token ids only; readable by the owner only.
        """
        if self._holder.folder is None:
            return
        kept = [{"name": pin.name, "ids": pin.ids} for pin in self._pins.values() if pin.source == "api"]
        kept += [{"name": name, "ids": tuple(ids)} for name, ids in self._coming.items()]
        target = self._holder.folder / FILE_NAME
        fresh = target.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"format": FORMAT, "pins": kept}, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)

    def _saved(self) -> list[tuple[str, list[int]]]:
        """The list of an earlier process. Raises ValueError for a file that is none."""
        if self._holder.folder is None or not (file := self._holder.folder / FILE_NAME).is_file():
            return []
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{file} is larger than {_MAX_FILE_BYTES} bytes; delete it")
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            pins = [(str(pin["name"]), [_id(number) for number in pin["ids"]]) for pin in known["pins"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is no list of pins ({type(error).__name__}); delete it") from error
        if known.get("format") != FORMAT:
            raise ValueError(f"{file} has format {known.get('format')!r}, this version reads {FORMAT}; delete it")
        return pins


def _id(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError("a token id is a whole number")
    return number
