"""The application: routes, the gate in front of them, and errors of the framework in our words.

Owns which path leads where. Must not know what routes do.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import HTTPException as FastApiError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from kvist.server.admission import Admission
from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.figures import Figures
from kvist.server.gate import Gate, Keys, Names, error_body
from kvist.server.page import PREFIX, PageFiles, index
from kvist.server.protocol.chat import ChatRequest
from kvist.server.protocol.completions import CompletionRequest, TokenizeRequest
from kvist.server.protocol.messages import CountRequest, MessagesRequest
from kvist.server.protocol.microscope import MicroscopeRequest
from kvist.server.protocol.pins import PinRequest
from kvist.server.protocol.responses import ResponseRequest
from kvist.server.routes import chat, completions, files, messages, microscope, pins, responses
from kvist.server.served import Served
from kvist.server.service import Service
from kvist.server.settings import ServerSettings, is_loopback
from kvist.server.tracing import Tracing

Handler = Callable[[Service, Request], Awaitable[Any]]

POSTS: dict[str, tuple[Handler, type[Body]]] = {
    "/v1/chat/completions": (chat.create, ChatRequest),
    "/v1/completions": (completions.create, CompletionRequest),
    "/v1/responses": (responses.create, ResponseRequest),
    "/v1/messages": (messages.create, MessagesRequest),
    "/v1/messages/count_tokens": (messages.count, CountRequest),
    "/tokenize": (completions.tokenize, TokenizeRequest),
    "/kvist/microscope": (microscope.look, MicroscopeRequest),
    "/kvist/pins": (pins.create, PinRequest),
}
NEED_PLACE = frozenset((*POSTS, "/v1/files")) - {"/kvist/microscope"}
"""What runs on the engine, and what encodes prompts or decodes pictures, which costs as much as a short prompt does. Looks have a
bound of their own (`captures.py`)."""
OTHERS: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/files"): files.create,
    ("GET", "/v1/files"): files.listed,
    ("GET", "/v1/files/{number}"): files.retrieve,
    ("GET", "/v1/files/{number}/content"): files.content,
    ("DELETE", "/v1/files/{number}"): files.delete,
    ("GET", "/v1/responses/{number}"): responses.stored,
    ("DELETE", "/v1/responses/{number}"): responses.stored,
    ("GET", "/kvist/pins"): pins.listed,
    ("DELETE", "/kvist/pins/{name}"): pins.delete,
    ("GET", "/kvist/live"): microscope.recent,
    ("GET", "/kvist/live/{request_id}"): microscope.live,
}
"""Routes without a JSON body."""


def create_service(served: Served, settings: ServerSettings, tracing: Tracing | None = None) -> Service:
    """A model with its rules and figures."""
    admission = Admission(
        limit=settings.max_concurrency,
        retry_after_s=settings.retry_after_s,
        requests_per_minute=settings.requests_per_minute,
        tokens_per_minute=settings.tokens_per_minute,
    )
    figures = Figures(served.collectors, {"running": lambda: admission.running, "draining": lambda: float(admission.draining)})
    return Service(served, settings, admission, figures, tracing)


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="kvist", docs_url=None, redoc_url=None, openapi_url="/openapi.json", redirect_slashes=False)
    for path, (handler, schema) in POSTS.items():
        app.add_api_route(path, _bound(service, handler), methods=["POST"], openapi_extra=_described(schema), name=path)
    for (method, path), handler in OTHERS.items():
        extra = _parameters(path)
        if (method, path) == ("POST", "/v1/files"):
            extra |= {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": files.FORM}}}}
        app.add_api_route(path, _bound(service, handler), methods=[method], openapi_extra=extra, name=f"{method} {path}")
    _add_operations(app, service)
    app.add_route("/", index, methods=["GET"], name="page", include_in_schema=False)
    app.mount(PREFIX, PageFiles())
    app.add_exception_handler(ApiError, _on_api_error)
    for kind in (HTTPException, FastApiError):
        app.add_exception_handler(kind, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    settings = service.settings
    gated: ASGIApp = Gate(
        app,
        keys=Keys(key.get_secret_value() for key in settings.api_keys),
        admins=Keys(key.get_secret_value() for key in settings.admin_keys),
        names=Names(settings.allowed_hosts, settings.allowed_origins, loopback=is_loopback(settings.host)),
        admission=service.admission,
        figures=service.figures,
        places=NEED_PLACE,
        tracing=service.tracing,
    )
    if settings.allowed_origins:
        gated = CORSMiddleware(
            gated, allow_origins=settings.allowed_origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )
    return gated


def _bound(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Any]]:
    async def endpoint(request: Request) -> Any:
        return await handler(service, request)

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _described(schema: type[Body]) -> dict[str, Any]:
    """The body for OpenAPI, which is read by hand; definitions stand inside."""
    shape = schema.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(shape)}}}}


def _parameters(path: str) -> dict[str, Any]:
    """A path's parts that vary, for OpenAPI."""
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    shape = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {"parameters": [{"name": name, **shape} for name in names]} if names else {}


def _inlined(shape: dict[str, Any]) -> dict[str, Any]:
    """The schema with its `$defs` in the places that refer to them; none of ours refers to itself."""
    definitions = shape.pop("$defs", {})

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return visit(definitions[value["$ref"].rpartition("/")[2]])
            return {name: visit(inner) for name, inner in value.items() if name != "discriminator"}
        return [visit(inner) for inner in value] if isinstance(value, list) else value

    result: dict[str, Any] = visit(shape)
    return result


def _add_operations(app: FastAPI, service: Service) -> None:
    served = service.served

    def model_shape(name: str) -> dict[str, Any]:
        shape = {"id": name, "object": "model", "created": served.created, "owned_by": "kvist", "max_model_len": served.context}
        shape["capabilities"] = {"vision": served.read_image is not None, "base": served.base}
        # Anthropic's client reads the two below.
        return {**shape, "type": "model", "display_name": name}

    async def models() -> Response:
        """The models served."""
        names = [model_shape(name) for name in service.names]
        return _json({"object": "list", "data": names, "has_more": False, "first_id": names[0]["id"], "last_id": names[-1]["id"]})

    async def model(name: str) -> Response:
        """One model."""
        return _json(model_shape(service.require_model(name)))

    async def live() -> Response:
        """The process answers."""
        return _json({"status": "live"})

    async def health() -> Response:
        """Ready for requests: 200, or 503 while draining or after the engine has stopped."""
        service.admission.require_open()
        if (reason := served.stopped()) is not None:
            raise ApiError("engine_stopped", reason)
        return _json({"status": "ready", "model": service.names[0]})

    async def metrics() -> Response:
        """Figures in Prometheus' text form."""
        return Response(service.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, endpoint in (("/v1/models", models), ("/live", live), ("/health", health), ("/metrics", metrics)):
        app.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
    for path, endpoint in (("/live", live), ("/health", health)):
        # Load balancers and watchers often ask for the head only.
        app.add_api_route(path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False)
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], response_class=Response)


def _json(value: Any) -> Response:
    return Response(json.dumps(value, ensure_ascii=False), media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = error.headers()
    if error.code in ("body_too_large", "body_timeout"):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error_body(request.url.path, error), status_code=error.status, headers=headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    """The framework raises the error again once this is sent; the gate logs it."""
    del error
    return await _on_api_error(request, ApiError("internal_error", "a fault of the server; its log has more"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    code = "method_not_allowed" if status == 405 else "not_found"
    told = ApiError(code, f"{request.method} leads nowhere here; docs/server.md lists the routes")
    return await _on_api_error(request, told)
