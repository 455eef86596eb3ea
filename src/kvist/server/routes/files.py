"""`/v1/files`: pictures sent once and named by id in later requests; OpenAI's and Anthropic's file clients read the answers.

Owns this API's shapes and fields. Must not know how files are kept.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvist.server.errors import ApiError
from kvist.server.files import StoredFile
from kvist.server.service import Service
from kvist.server.upload import read_upload

PURPOSE = "vision"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
KNOWN_FIELDS = frozenset(("purpose", _ANCHOR, _SECONDS))

FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": [PURPOSE]},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
"""The form's schema for OpenAPI."""


async def create(service: Service, request: Request) -> JSONResponse:
    """Keep a picture. Raises ApiError."""
    settings, served = service.settings, service.served
    if served.read_image is None:
        raise ApiError("image_unsupported", f"{served.name} has no vision: there is no use for files")
    upload = await read_upload(request, limit_bytes=settings.max_file_bytes, timeout_s=settings.body_timeout_s)
    keep_s = _checked(upload.fields)
    try:
        # Decoded once now, so that whoever names the file later is not the first to learn what is wrong with it.
        await asyncio.to_thread(served.read_image, upload.data)
    except ValueError as error:
        raise ApiError("invalid_image", str(error), param="file") from error
    file = service.files.put(request.state.tenant, upload.name, upload.data, keep_s)
    request.state.facts["file_bytes"] = len(file.data)
    return JSONResponse(shape(file))


def _checked(fields: dict[str, str]) -> int | None:
    """Seconds to keep the file, if they were given. Raises ApiError for what is not understood."""
    for name in fields:
        if name not in KNOWN_FIELDS:
            raise ApiError("unsupported_field", f"{name[:80]} is not supported here; leave it out", param=name[:80])
    if fields.get("purpose", PURPOSE) != PURPOSE:
        raise ApiError("invalid_value", f"purpose must be {PURPOSE}, got {fields['purpose'][:40]!r}", param="purpose")
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise ApiError("invalid_value", f"the anchor must be created_at, got {fields[_ANCHOR][:40]!r}", param=_ANCHOR)
    seconds = fields.get(_SECONDS)
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 10 and int(seconds)):
        raise ApiError("invalid_value", f"seconds must be a whole number from 1, got {seconds[:40]!r}", param=_SECONDS)
    return int(seconds)


async def listed(service: Service, request: Request) -> JSONResponse:
    """The caller's files, oldest first."""
    shapes = [shape(file) for file in service.files.list(request.state.tenant)]
    ends = {"first_id": shapes[0]["id"], "last_id": shapes[-1]["id"]} if shapes else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": shapes, "has_more": False, **ends})


async def retrieve(service: Service, request: Request) -> JSONResponse:
    """What is known of a file. Raises ApiError."""
    return JSONResponse(shape(service.files.get(request.state.tenant, request.path_params["number"])))


async def content(service: Service, request: Request) -> Response:
    """A file's bytes, as a download: no browser takes them for a page. Raises ApiError."""
    file = service.files.get(request.state.tenant, request.path_params["number"])
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(file.data, media_type="application/octet-stream", headers=headers)


async def delete(service: Service, request: Request) -> JSONResponse:
    """Forget a file. Raises ApiError."""
    number = request.path_params["number"]
    service.files.delete(request.state.tenant, number)
    return JSONResponse({"id": number, "object": "file", "type": "file_deleted", "deleted": True})


def shape(file: StoredFile) -> dict[str, Any]:
    """A file as both clients read it."""
    return {
        "id": file.id,
        "object": "file",
        "type": "file",
        "bytes": len(file.data),
        "size_bytes": len(file.data),
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.name,
        "mime_type": "application/octet-stream",
        "purpose": PURPOSE,
        "status": "processed",
        "downloadable": True,
    }
