"""Server-sent events as a response: headers early, comments while nothing comes, errors as events, an end for clients that leave.

Owns the wire form of a stream. Must not know what is streamed. Bug cases SRV-05, SRV-13.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvist.server.errors import ApiError
from kvist.server.logs import note

KEEPALIVE = ": keep-alive\n\n"
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Ends of lines to many a client's line reader, though not to the specification of events."""


def data_line(value: Any) -> str:
    """`data: {...}`"""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':')).translate(_LINE_ENDS)}\n\n"


def named_event(value: dict[str, Any]) -> str:
    """`event: NAME` and its data; the name is the value's `type`."""
    return f"event: {value['type']}\n{data_line(value)}"


class EventStream(Response):
    """An ASGI response that sends what `events` yields.

    `first` has been taken from it already, if anything came soon. `on_error`: an ApiError as text of this stream. When the
    client goes, `events` is closed, which ends its request.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        pending: asyncio.Future[str] | None,
        *,
        keepalive_s: float,
        send_timeout_s: float,
        on_error: Callable[[ApiError], str],
    ) -> None:
        super().__init__()
        self._events, self._pending = events, pending
        self._keepalive_s, self._send_timeout_s, self._on_error = keepalive_s, send_timeout_s, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client goes."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            results = await asyncio.gather(sending, leaving, return_exceptions=True)
            await self.close()
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def close(self) -> None:
        """End what feeds the stream."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        await self._events.aclose()  # type: ignore[attr-defined]

    async def _send_all(self, send: Send) -> None:
        async def body(text: str, more: bool) -> None:
            # A client that does not read fills the socket, and `send` waits: it is given up like one that has gone.
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        if self._pending is not None and not self._pending.done():
            await body(KEEPALIVE, True)
        while True:
            if self._pending is None:
                self._pending = asyncio.ensure_future(anext(self._events))
            done, _ = await asyncio.wait((self._pending,), timeout=self._keepalive_s)
            if not done:
                await body(KEEPALIVE, True)
                continue
            pending, self._pending = self._pending, None
            try:
                text = pending.result()
            except StopAsyncIteration:
                await body("", False)
                return
            except Exception as error:  # noqa: BLE001  # the status is out: the error goes as an event
                if not isinstance(error, ApiError):
                    note("fault", level=logging.ERROR, error=error)
                    error = ApiError("internal_error", "a fault of the server; its log has more")
                await body(self._on_error(error), False)
                return
            await body(text, True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def started(
    events: AsyncIterator[str],
    *,
    wait_s: float,
    keepalive_s: float,
    send_timeout_s: float,
    on_error: Callable[[ApiError], str],
) -> EventStream:
    """A stream whose first event came, or did not come within `wait_s`. Raises the ApiError that came instead: the client gets
    a status then, and an event later."""
    pending = asyncio.ensure_future(anext(events))
    stream = EventStream(events, pending, keepalive_s=keepalive_s, send_timeout_s=send_timeout_s, on_error=on_error)
    try:
        await asyncio.wait((pending,), timeout=wait_s)
        if pending.done() and not pending.cancelled() and isinstance(pending.exception(), ApiError):
            pending.result()
    except BaseException:
        await stream.close()
        raise
    return stream
