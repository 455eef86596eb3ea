"""Where a request's pictures come from: data URLs, uploaded files, and web addresses where the operator allows them.

Owns the choice and its refusals. Must not know any API's field names, nor what is in a picture.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass

from kvist.server.errors import ApiError

_STANDARD = str.maketrans("-_", "+/")


def base64_bytes(payload: str, where: str) -> bytes:
    """Bytes from base64 as clients write it: either alphabet, padded or not, with line breaks. All else is refused."""
    plain = "".join(payload.split()).translate(_STANDARD).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError("invalid_image", f"the image is not valid base64: {error}", param=where) from error


def _data_url_bytes(url: str, where: str) -> bytes:
    """Scheme, type and the word base64 in any case, with parameters between them (RFC 2397)."""
    head, comma, payload = url.partition(",")
    parts = [part.strip() for part in head.lower().split(";")]
    if not comma or len(parts) < 2 or parts[-1] != "base64" or not parts[0].startswith("data:image/"):
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
        scheme = url.partition(":")[0][:20]
        if scheme.lower() == "data":
            return _data_url_bytes(url, where)
        if self.fetch is not None and scheme.lower() in ("http", "https"):
            return self.fetch(url, where)
        raise ApiError(
            "invalid_image",
            f"an image URL of kind {scheme!r} is not fetched; send a data URL, or upload it to /v1/files",
            param=where,
        )

    def of_file(self, number: str, where: str) -> bytes:
        """The bytes of an uploaded file. Raises ApiError."""
        return self.stored(number, where)
