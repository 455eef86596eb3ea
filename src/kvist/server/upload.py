"""A multipart body within limits: one file and a few short fields.

Owns size, time and form of an upload. Must not know what the file is for. The multipart parser is python-multipart's; whatever it
makes of hostile bytes ends in a 4xx.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from kvist.server.errors import ApiError

MAX_FIELDS = 8
MAX_FIELD_BYTES = 4096
FORM_BYTES = 64 << 10
"""What a form may hold besides the file."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """The file's name and bytes, and the other fields."""

    name: str
    data: bytes
    fields: dict[str, str]


async def read_upload(request: Request, *, limit_bytes: int, timeout_s: float) -> Upload:
    """The body's only file (field `file`, at most `limit_bytes`). Raises ApiError; ClientDisconnect if the client left."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError("invalid_upload", "an upload is multipart/form-data with the picture in the field `file`", param="file")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit_bytes + FORM_BYTES:
        raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            form = await _parsed(request, limit_bytes)
            try:
                return await _taken(form, limit_bytes)
            finally:
                await form.close()
    except TimeoutError as error:
        raise ApiError("body_timeout", f"the file did not arrive within {timeout_s:g} s; send it again") from error


async def _parsed(request: Request, limit_bytes: int) -> FormData:
    parser = MultiPartParser(
        request.headers, _bounded(request, limit_bytes), max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise ApiError("invalid_upload", f"the multipart body cannot be read: {error.message[:200]}") from error
    except (LookupError, ValueError) as error:
        # A charset that is no text's, a boundary that cannot be one.
        raise ApiError("invalid_upload", f"the multipart body cannot be read ({type(error).__name__})") from error


async def _bounded(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes + FORM_BYTES:
            raise _too_large(limit_bytes)
        yield part


async def _taken(form: FormData, limit_bytes: int) -> Upload:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError("invalid_upload", "the form has no file in the field `file`", param="file")
    data = await file.read()
    if len(data) > limit_bytes:
        raise _too_large(limit_bytes)
    if not data:
        raise ApiError("invalid_upload", "the file is empty", param="file")
    fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    return Upload(name=file.filename or "", data=data, fields=fields)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"a file may have {limit_bytes} bytes (max_file_bytes); send a smaller one")
