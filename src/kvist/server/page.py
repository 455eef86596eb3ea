"""The page at `/`: packaged files, and the headers under which nothing but our own scripts and styles can run.

Owns the content policy and where the files lie. Must not know what the page shows or which routes it calls.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(str(files("kvist"))) / "assets" / "page"
PREFIX = "/page"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text can become markup, whatever a script does with it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked again each time, answered by 304 from the ETag
}


def is_page(path: str) -> bool:
    """Whether a path belongs to the page, which needs no key: it holds nothing of the model or its users."""
    return path == "/" or path.startswith(f"{PREFIX}/")


async def index(request: Request) -> FileResponse:
    """The document."""
    del request
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


class PageFiles(StaticFiles):
    """Scripts, styles and pictures of the page, with its headers."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """A file, or 304."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response
