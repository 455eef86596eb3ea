"""What goes wrong, as a client sees it: status, code, message; and which of the engine's errors is which.

Owns the table of docs/server.md. Must not know routes. Both spellings of an error body (OpenAI's and Anthropic's) are here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvist.engine.errors import DeadlineExceeded, EngineStopped, NonFiniteLogits, QueueFull, RequestTooLong
from kvist.engine.sampling.grammar_text import GrammarError, GrammarSupportMissing
from kvist.engine.sampling.params import SamplingParams

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

CODES: dict[str, tuple[int, str]] = {
    "invalid_json": (
        400,
        "the body is no JSON, is no object, is nested too deeply, or has NaN, 1e999 or what is no UTF-8",
    ),
    "invalid_value": (400, "a field has a wrong type or lies outside its limits; `param` names it"),
    "unsupported_field": (400, "a field that this server does not know or cannot honour"),
    "conflicting_fields": (400, "two fields say different things, such as max_tokens and max_completion_tokens"),
    "invalid_prompt": (400, "a conversation that the prompt format cannot express"),
    "context_length_exceeded": (400, "prompt and wanted tokens exceed the context"),
    "invalid_grammar": (400, "a schema, regular expression or grammar that cannot be compiled or followed"),
    "capture_too_long": (400, "the microscope would run more than microscope_context positions again"),
    "image_unsupported": (400, "an image for a model without vision"),
    "invalid_image": (400, "an image that cannot be read, or by a URL that is not fetched"),
    "pins_full": (400, "pins would hold more pages than pin_share allows"),
    "invalid_upload": (400, "an upload that is no multipart form with one picture in the field file"),
    "not_stored": (400, "store, previous_response_id, conversation, background: this server keeps no responses"),
    "invalid_api_key": (401, "no key or a wrong one where keys are configured"),
    "admin_only": (403, "a route for operators, where no admin_keys are set"),
    "host_not_allowed": (403, "the Host header is not one of this server's names"),
    "origin_not_allowed": (403, "a browser page of another origin"),
    "not_found": (404, "no such route"),
    "pin_not_found": (404, "no pin of that name"),
    "file_not_found": (404, "no such uploaded file of this key, or not any more"),
    "request_not_found": (404, "no running or recent request of this key has the id; see history_requests"),
    "microscope_off": (404, "this server does not look into requests: microscope_context is 0, or the engine cannot"),
    "model_not_found": (404, "a model that is not served here"),
    "method_not_allowed": (405, "the route has other methods"),
    "body_timeout": (408, "the body did not arrive in time"),
    "body_too_large": (413, "the body is larger than max_body_bytes, a file than max_file_bytes"),
    "too_many_requests": (
        429,
        "max_concurrency requests or a look run, or the engine's queue is full; Retry-After says when to come back",
    ),
    "quota_exceeded": (429, "the key's requests or tokens a minute are used up; Retry-After says when to come back"),
    "files_full": (429, "the key holds max_files files or files_memory bytes; Retry-After says when the first one expires"),
    "engine_error": (500, "the engine failed this request; nothing of it is kept"),
    "internal_error": (500, "a fault of the server"),
    "draining": (503, "the server is shutting down"),
    "engine_stopped": (503, "the engine has stopped"),
    "deadline_exceeded": (504, "the request did not end within deadline_s"),
}
"""Every code: its status and what it means. docs/server.md is generated from it."""


def errors_table() -> str:
    """All codes as a Markdown table, by status."""
    rows = [
        f"| {status} | `{code}` | {meaning} |" for code, (status, meaning) in sorted(CODES.items(), key=lambda item: item[1][0])
    ]
    return "\n".join(["| status | code | when |", "|---|---|---|", *rows])


MAX_MESSAGE = 1000

# What the engine checks stands first in its messages, and has the same name in a request.
_NAMED_FIRST = {field.name for field in fields(SamplingParams)} | {"replay"}


class ApiError(Exception):
    """An answer that is no success. `code` is one of `CODES`; `param` names the field at fault."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = CODES[code][0]
        self.code, self.param, self.retry_after_s = code, param, retry_after_s
        # What a client sent may stand in it, at any length.
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."

    @property
    def type(self) -> str:
        """The class of error, in the words that both APIs share."""
        return TYPES[self.status]

    def openai_body(self) -> dict[str, Any]:
        """The body of OpenAI's routes, and of an error event in their streams."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The body of `/v1/messages`, and of an error event in its streams."""
        return {"type": "error", "error": {"type": self.type, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Retry-After where it makes sense."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def refused(error: Exception) -> ApiError:
    """An error that came before any token: what the request asked for is at fault unless it is named otherwise."""
    if isinstance(error, RequestTooLong):
        return ApiError("context_length_exceeded", str(error))
    if isinstance(error, GrammarError | GrammarSupportMissing):
        return ApiError("invalid_grammar", str(error))
    if isinstance(error, ValueError):
        first = str(error).partition(" ")[0]
        return ApiError("invalid_value", str(error), param=first if first in _NAMED_FIRST else None)
    return failed(error)


def failed(error: BaseException | None) -> ApiError:
    """An error that ended a request that ran."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError("too_many_requests", str(error), retry_after_s=1)
    if isinstance(error, DeadlineExceeded):
        return ApiError("deadline_exceeded", str(error))
    if isinstance(error, EngineStopped):
        return ApiError("engine_stopped", str(error))
    if isinstance(error, NonFiniteLogits | GrammarError):
        return ApiError("engine_error", str(error))
    return ApiError("engine_error", f"the engine failed this request ({type(error).__name__}); the server's log has more")
