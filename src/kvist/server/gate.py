"""The door in front of every route: request ids, Host and Origin, keys, places, the log line, and a reply for every fault.

Owns who may come in. Pure ASGI, so that a place is held until the last byte of a stream is out. Must not know routes' contents;
keys are compared by digest in constant time and never kept in clear.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.server.admission import Admission
from kvist.server.errors import ApiError
from kvist.server.figures import Figures
from kvist.server.logs import note
from kvist.server.page import is_page
from kvist.server.tracing import Tracing

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/live", "/health")
ADMIN_PATHS = "/kvist/pins"
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys:
    """The keys that may use the server, as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.strip()) for key in keys]

    @property
    def needed(self) -> bool:
        """Whether any key is configured."""
        return bool(self._digests)

    def tenant(self, headers: Headers) -> str:
        """A short name of the caller's key that does not give it away; empty where no key is needed. Raises ApiError."""
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.strip())
        # No early end: the time must not tell how far a guess was right.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            said = "a wrong API key" if given else "no API key"
            raise ApiError("invalid_api_key", f"{said}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        return digest.hex()[:12]


def tenant_of(key: str) -> str:
    """The short name under which a key's requests run."""
    return _digest(key.strip()).hex()[:12]


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"kvist-key\0" + key.encode("utf-8", "surrogateescape")).digest()


class Names:
    """The Host and Origin headers that are let in."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str], *, loopback: bool) -> None:
        self._any = not loopback or "*" in hosts
        self._hosts = {*LOOPBACK_NAMES, *(host.lower() for host in hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def check(self, headers: Headers) -> None:
        """Raise ApiError for a name that could be a browser's rebound one, or a page of somebody else."""
        host = headers.get("host", "").lower()
        if not self._any and _without_port(host) not in self._hosts:
            raise ApiError("host_not_allowed", f"host {host[:80]!r} is no name of this server; add it to allowed_hosts")
        origin = headers.get("origin", "").lower()
        if origin and origin not in self._origins and not self._own(origin, host):
            raise ApiError("origin_not_allowed", f"pages of origin {origin[:80]!r} may not use it; add it to allowed_origins")

    @staticmethod
    def _own(origin: str, host: str) -> bool:
        return origin in (f"http://{host}", f"https://{host}")


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host)


class Gate:
    """ASGI middleware; see the file's top. `places`: the paths that run on the engine and need one."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        admins: Keys,
        names: Names,
        admission: Admission,
        figures: Figures,
        places: frozenset[str],
        tracing: Tracing | None = None,
    ) -> None:
        self._app, self._keys, self._admins, self._names, self._tracing = app, keys, admins, names, tracing
        self._admission, self._figures, self._places = admission, figures, places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: in, through and logged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope["state"] = {**scope.get("state", {}), "id": number, "tenant": "", "facts": {}}
        method = scope["method"] if scope["method"] in METHODS else "other"
        span = None if self._tracing is None else self._tracing.begin(headers, method, scope["path"])
        scope["state"]["span"] = span
        began, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = answered["request-id"] = number  # OpenAI's client reads one, Anthropic's the other
            await send(message)

        try:
            await self._through(scope, receive, sending, headers)
        except ApiError as error:
            await self._reply(scope, sending, error, status)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:  # noqa: BLE001  # every request ends in a reply; the trace goes to the log
            note("fault", level=logging.ERROR, error=error, id=number, path=_route(scope))
            await self._reply(scope, sending, ApiError("internal_error", "a fault of the server; its log has more"), status)
        seconds = time.perf_counter() - began
        if self._tracing is not None and span is not None:
            self._tracing.end(span, method, _route(scope), status or 499, number, scope["state"]["facts"])
        self._figures.ended(_route(scope), method, status or 499, seconds)
        note(
            "request",
            id=number,
            method=method,
            route=_route(scope),
            status=status or 499,
            seconds=round(seconds, 4),
            tenant=scope["state"]["tenant"],
            **scope["state"]["facts"],
        )

    async def _through(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        self._names.check(headers)
        path = scope["path"]
        if path.startswith(ADMIN_PATHS):
            if not self._admins.needed:
                raise ApiError("admin_only", "set admin_keys to use this route")
            scope["state"]["tenant"] = self._admins.tenant(headers)
        elif path not in OPEN_PATHS and not is_page(path):
            scope["state"]["tenant"] = self._keys.tenant(headers)
        with ExitStack() as held:
            if path in self._places and scope["method"] == "POST":
                held.enter_context(self._admission.enter(scope["state"]["tenant"]))
            await self._app(scope, receive, send)

    async def _reply(self, scope: Scope, send: Send, error: ApiError, status: int) -> None:
        if status:  # the head is out already: the stream just ends
            return
        body = json.dumps(error_body(scope["path"], error), ensure_ascii=False).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        if error.code in ("body_too_large", "body_timeout"):
            headers["connection"] = "close"
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})


def error_body(path: str, error: ApiError) -> dict[str, object]:
    """The error in the spelling of the API that the path belongs to."""
    return error.anthropic_body() if path.startswith("/v1/messages") else error.openai_body()


def _route(scope: Scope) -> str:
    """The route's own path: what a client wrote may hold anything and stays out of logs."""
    route = scope.get("route")
    return getattr(route, "path", "") or "other"
