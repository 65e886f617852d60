"""Errors in the form that OpenAI clients read: `{"error": {"message", "type", "param", "code"}}`.

Before the first byte of an answer an error is an HTTP status with this body; after it, it is a last SSE event with the
same body. Messages say what was given, what is allowed and what to do, and never quote a prompt: they reach logs.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

INVALID_REQUEST = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
NOT_FOUND = "not_found_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"
TIMEOUT = "timeout_error"


class ApiError(Exception):
    """An error to answer with. Picklable: it may be raised in one process and answered in another.

    `param` is the request field at fault ("messages[0].role"), `code` a machine-readable reason, `retry_after_s` when
    trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, message, type, param, code, retry_after_s)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to the status (whole seconds in `Retry-After`, rounded up)."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def sse_error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its first byte. No `[DONE]` follows it."""
    return b"data: " + json.dumps(error.body(), separators=(",", ":")).encode() + b"\n\n"


def invalid_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, INVALID_REQUEST, param, code)


def unsupported(param: str, what_to_do: str) -> ApiError:
    """For a known option that would change the answer and is not implemented: better refused than ignored."""
    message = f"'{param}' is not supported yet, and ignoring it would change the answer. {what_to_do}"
    return invalid_request(message, param=param, code="unsupported_parameter")


def context_length_exceeded(*, context_tokens: int, prompt_tokens: int, answer_tokens: int, param: str) -> ApiError:
    """`param`: "messages" or "prompt"."""
    wanted = f" and {answer_tokens} for the answer" if answer_tokens else ""
    message = (
        f"This model's maximum context length is {context_tokens} tokens, but the request needs "
        f"{prompt_tokens + answer_tokens}: {prompt_tokens} in '{param}'{wanted}. "
        f"Shorten the {param} or ask for fewer tokens."
    )
    return invalid_request(message, param=param, code="context_length_exceeded")


def request_too_large(limit_bytes: int) -> ApiError:
    message = f"The request body is longer than {limit_bytes} bytes. Send a shorter prompt, or fewer of them."
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, INVALID_REQUEST, None, "request_too_large")


def unauthorized(reason: str = "No valid API key was given.") -> ApiError:
    message = f"{reason} Send it in the header 'Authorization: Bearer KEY'."
    return ApiError(HTTPStatus.UNAUTHORIZED, message, AUTHENTICATION, None, "invalid_api_key")


def forbidden(message: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, PERMISSION, None, "permission_denied")


def model_not_found(given: str, served: str) -> ApiError:
    message = f"The model {shortened(given)} does not exist here. Use '{served}', or see GET /v1/models."
    return ApiError(HTTPStatus.NOT_FOUND, message, INVALID_REQUEST, "model", "model_not_found")


def no_embeddings() -> ApiError:
    message = "This server's model generates text and makes no embeddings. Ask a server of an embedding model."
    return invalid_request(message, code="unsupported_endpoint")


def overloaded(reason: str, *, retry_after_s: float = 1.0) -> ApiError:
    message = f"The server is overloaded: {reason}. Try again later."
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, RATE_LIMIT, None, "server_overloaded", retry_after_s)


def over_key_limit(limit: str, *, retry_after_s: float) -> ApiError:
    message = f"Too many requests: {limit}. Try again later."
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, RATE_LIMIT, None, "rate_limit_exceeded", retry_after_s)


def unavailable(reason: str, *, retry_after_s: float | None = 1.0) -> ApiError:
    message = f"The server cannot take this request now: {reason}."
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, SERVER, None, "service_unavailable", retry_after_s)


def timeout(limit_s: float) -> ApiError:
    message = f"The request took longer than the limit of {limit_s:g} s and was cancelled. Ask for fewer tokens."
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, TIMEOUT, None, "timeout")


def internal(request_id: str | None = None) -> ApiError:
    """For whatever is our own fault. The cause belongs in the log, beside the request id, not in the answer."""
    where = f" Its request id is {request_id}." if request_id else ""
    message = f"The server failed while it worked on this request; see its log.{where}"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, SERVER, None, "internal_error")


def from_http_status(status: int, detail: str) -> ApiError:
    """For what the web framework refuses by itself: an unknown route (404), a wrong method (405), a large body."""
    if status == HTTPStatus.NOT_FOUND:
        return ApiError(status, detail, NOT_FOUND, None, "not_found")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ApiError(status, detail, SERVER, None, "internal_error")
    return ApiError(status, detail, INVALID_REQUEST, None, HTTPStatus(status).name.lower())


def shortened(value: object, limit: int = 40) -> str:
    """A value as it may stand in a message: JSON for numbers and short strings, else what it is and how large."""
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**limit else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}... ({len(value)} characters)"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} items"
    if isinstance(value, dict):
        return f"an object with {len(value)} fields"
    return f"a value of type {type(value).__name__}"
