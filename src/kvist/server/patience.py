"""How long a connection may take to say what it wants: uvicorn's HTTP/1.1 protocol with a limit on a request's head.

Owns that timer. Bodies have one of their own (`body.py`), as have streams that nobody reads (`event_stream.py`). Must not know
routes.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_protocol(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol class that closes connections whose request line and headers are not complete in time (slow-loris)."""

    class PatientProtocol(H11Protocol):
        """The timer runs from the connection's start, later from the first byte of a further request, to the end of its head."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            else:
                self._head_came()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:  # the next head has begun already
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_timeout_s, self.transport.close)

        def _head_came(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return PatientProtocol
