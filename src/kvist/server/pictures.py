"""Where a request's pictures come from: data URLs, uploaded files, and web addresses where the operator allows them.

Owns the choice and its refusals. Must not know any API's field names, nor what is in a picture.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass

from kvist.server.errors import ApiError


def base64_bytes(payload: str, where: str) -> bytes:
    """Bytes from base64, strictly."""
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError("invalid_image", f"the image is not valid base64: {error}", param=where) from error


def _data_url_bytes(url: str, where: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
        raise ApiError("invalid_image", f"a data URL must begin with data:image/...;base64, got {head[:60]!r}", param=where)
    return base64_bytes(payload, where)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A caller's pictures. `stored`: an uploaded file's bytes by id; `fetch`: an address's bytes, None where nothing is fetched.

    Both get the place in the request, for the error's `param`, and raise ApiError.
    """

    stored: Callable[[str, str], bytes]
    fetch: Callable[[str, str], bytes] | None = None

    def of_url(self, url: str, where: str) -> bytes:
        """The bytes behind a URL of a picture. Raises ApiError."""
        if url.startswith("data:"):
            return _data_url_bytes(url, where)
        if self.fetch is not None and url.startswith(("http://", "https://")):
            return self.fetch(url, where)
        scheme = url.partition(":")[0][:20]
        raise ApiError(
            "invalid_image",
            f"an image URL of kind {scheme!r} is not fetched; send a data URL, or upload it to /v1/files",
            param=where,
        )

    def of_file(self, number: str, where: str) -> bytes:
        """The bytes of an uploaded file. Raises ApiError."""
        return self.stored(number, where)
