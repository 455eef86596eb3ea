"""`/kvist/pins`: prefixes that stay in the cache, for operators: pin, list, let go. Needs an admin key.

Owns this API's shapes. Must not know how pages are held.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from kvist.server.errors import ApiError
from kvist.server.pictures import Pictures
from kvist.server.pinning import Pinned, Pinner
from kvist.server.protocol.pins import PinRequest, setting_pin
from kvist.server.routes.completions import encoded_ids
from kvist.server.service import Service, unless_gone


def _pinner(service: Service) -> Pinner:
    if service.pinner is None:
        raise ApiError("not_found", "this server's engine cannot pin prefixes")
    return service.pinner


async def create(service: Service, request: Request) -> JSONResponse:
    """Pin a prefix, computing it if need be. Raises ApiError."""
    pinner = _pinner(service)
    body = await service.body(request, PinRequest)
    if body.model is not None:
        service.require_model(body.model)
    ids = await service.in_thread(lambda: _text_ids(service, body))
    return JSONResponse(shape(await unless_gone(request, pinner.pin(body.name, ids))))


async def listed(service: Service, request: Request) -> JSONResponse:
    """All pins and what they hold."""
    pinner = _pinner(service)
    held = {"pages": pinner.pages, "limit_pages": pinner.limit_pages, "tokens": pinner.tokens}
    return JSONResponse({"object": "list", "data": [shape(pin) for pin in pinner.pins], **held})


async def delete(service: Service, request: Request) -> JSONResponse:
    """Let go of a prefix. Raises ApiError."""
    name = request.path_params["name"]
    await _pinner(service).unpin(name)
    return JSONResponse({"name": name, "object": "kvist.pin", "deleted": True})


def shape(pin: Pinned) -> dict[str, Any]:
    """A pin as it is told: never its text."""
    return {
        "name": pin.name,
        "object": "kvist.pin",
        "tokens": len(pin.ids),
        "copies": len(pin.held),
        "pages": pin.pages,
        "cached_tokens": pin.cached_tokens,
        "seconds": pin.seconds,
        "source": pin.source,
    }


async def from_settings(service: Service) -> list[tuple[str, list[int]]]:
    """The pins that the settings name, as ids. Raises ApiError, ValueError, OSError."""

    def made() -> list[tuple[str, list[int]]]:
        bodies = [setting_pin(setting, number) for number, setting in enumerate(service.settings.pins)]
        return [(body.name, _text_ids(service, body)) for body in bodies]

    return await service.in_thread(made)


def _text_ids(service: Service, body: PinRequest) -> list[int]:
    ids = encoded_ids(service, body, Pictures(stored=_no_file))
    if service.served.image_token_id in ids:
        raise ApiError("invalid_value", "pins are text; leave the pictures out", param="messages")
    return ids


def _no_file(number: str, where: str) -> bytes:
    raise ApiError("file_not_found", f"pins are text; {number[:60]!r} is a file of a client", param=where)
