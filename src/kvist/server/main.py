"""Running a server: a launched engine behind the application, uvicorn around it, a graceful end on SIGTERM.

Owns the life of the process. `launch` comes from the engine's side, which loads the model; nothing of it is imported before.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import FrameType

import uvicorn

from kvist.server.app import create_app, create_service
from kvist.server.loaded import served_model
from kvist.server.logs import configure, note
from kvist.server.patience import patient_protocol
from kvist.server.routes.pins import from_settings
from kvist.server.service import Service
from kvist.server.settings import ServerSettings, read_settings, unknown_variables
from kvist.server.tracing import Tracing, otlp_tracing


class DrainingServer(uvicorn.Server):
    """Stops in order: not ready, (a while later) no new connections, running requests to their end or their deadline."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does; then the port is known."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            self._on_ready(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains, a second one ends at once: what runs is told so and not waited for."""
        if self._service.admission.draining or self._loop is None:
            super().handle_exit(sig, frame)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._service.admission.hurry)
            self.force_exit = self.force_exit or sig in (signal.SIGINT, signal.SIGTERM)
            return
        note("draining", signal=signal.Signals(sig).name, running=self._service.admission.running)
        self._service.admission.draining = True
        self._loop.call_soon_threadsafe(self._loop.call_later, self._service.settings.drain_delay_s, self._stop_listening)

    def _stop_listening(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets, give running requests their time, end the rest with an error that says why."""
        draining = asyncio.ensure_future(self._service.admission.drain(self._service.settings.drain_s))
        await super().shutdown(sockets)
        whole = await draining
        note("drained", all_ended=whole)


def serve_app(service: Service, *, on_ready: Callable[[int], None] | None = None) -> DrainingServer:
    """The server of a service, to be run by `serve()` or `run()`. `on_ready` gets the port."""
    settings = service.settings

    def ready(port: int) -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        note("ready", address=f"http://{host}:{port}", model=service.names[0], context=service.served.context)
        if on_ready is not None:
            on_ready(port)

    config = uvicorn.Config(
        create_app(service),
        host=settings.host,
        port=settings.port,
        http=patient_protocol(settings.head_timeout_s),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_s) + 5,
        h11_max_incomplete_event_size=64 << 10,
    )
    return DrainingServer(config, service, ready)


def serve(model: str, arguments: list[str], config: Path | None = None) -> None:
    """`kvist serve MODEL`: settings, model, server, until a signal. Raises ValueError and named errors for what cannot be."""
    settings = read_settings(arguments, config=config)
    configure(settings.log_level, settings.log_format)
    for name in unknown_variables():
        note("no such setting: the variable has no effect", level=logging.WARNING, variable=name)
    tracing = otlp_tracing() if settings.tracing else None
    with bound_socket(settings.host, settings.port) as bound:
        asyncio.run(_serve(model, settings, bound, tracing))
    if tracing is not None:
        tracing.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on an address, not listening yet: who comes before the model is there is refused, not kept waiting. OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
    return bound


async def _serve(model: str, settings: ServerSettings, bound: socket.socket, tracing: Tracing | None) -> None:
    from kvist.engine.launch import LaunchOptions, launch

    note("loading", model=model)
    options = LaunchOptions(**{field.name: getattr(settings, field.name) for field in fields(LaunchOptions)})
    launched = await asyncio.to_thread(launch, model, options)
    try:
        service = create_service(served_model(launched, pin_share=settings.pin_share), settings, tracing)
        keeping = None
        if service.pinner is not None:
            keeping = asyncio.create_task(service.pinner.keep(lambda: from_settings(service)))
        await serve_app(service).serve([bound])
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait((keeping,))
    finally:
        await launched.close()
        note("closed")
