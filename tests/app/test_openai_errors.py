from __future__ import annotations

import json
import pickle

import pytest

from app import openai_errors as errors
from app.openai_errors import ApiError

CASES = [
    (errors.invalid_request("no", param="n"), 400, "invalid_request_error", "n", "invalid_value"),
    (errors.unsupported("tools", "Leave it out."), 400, "invalid_request_error", "tools", "unsupported_parameter"),
    (
        errors.context_length_exceeded(context_tokens=10, prompt_tokens=8, answer_tokens=3, param="messages"),
        400,
        "invalid_request_error",
        "messages",
        "context_length_exceeded",
    ),
    (errors.unauthorized(), 401, "authentication_error", None, "invalid_api_key"),
    (errors.forbidden("not yours"), 403, "permission_error", None, "permission_denied"),
    (errors.model_not_found("gpt-9", "tiny"), 404, "invalid_request_error", "model", "model_not_found"),
    (errors.overloaded("the queue is full"), 429, "rate_limit_error", None, "server_overloaded"),
    (errors.internal("req-1"), 500, "server_error", None, "internal_error"),
    (errors.unavailable("no decode worker"), 503, "server_error", None, "service_unavailable"),
    (errors.timeout(30), 504, "timeout_error", None, "timeout"),
    (errors.from_http_status(404, "Not Found"), 404, "not_found_error", None, "not_found"),
    (errors.from_http_status(405, "Method Not Allowed"), 405, "invalid_request_error", None, "method_not_allowed"),
    (errors.from_http_status(502, "Bad Gateway"), 502, "server_error", None, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "type", "param", "code"), CASES)
def test_every_error_has_the_whole_form(
    error: ApiError, status: int, type: str, param: str | None, code: str | None
) -> None:
    assert error.status == status
    body = json.loads(json.dumps(error.body()))
    assert body == {"error": {"message": str(error), "type": type, "param": param, "code": code}}
    assert len(str(error)) > 1


@pytest.mark.parametrize(("error", "status", "type", "param", "code"), CASES)
def test_errors_travel_between_processes(
    error: ApiError, status: int, type: str, param: str | None, code: str | None
) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.body(), copy.headers()) == (error.status, error.body(), error.headers())


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (30, "30")])
def test_retry_after_is_in_whole_seconds(retry_after_s: float, header: str) -> None:
    assert errors.overloaded("full", retry_after_s=retry_after_s).headers() == {"Retry-After": header}


def test_headers_of_other_errors() -> None:
    assert errors.unauthorized().headers() == {"WWW-Authenticate": "Bearer"}
    assert errors.unavailable("gone", retry_after_s=None).headers() == {}
    assert errors.internal().headers() == {}


def test_context_length_names_the_numbers() -> None:
    error = errors.context_length_exceeded(context_tokens=2048, prompt_tokens=2000, answer_tokens=100, param="prompt")
    assert "2048 tokens" in str(error)
    assert "2100: 2000 in 'prompt' and 100 for the answer" in str(error)


def test_the_last_event_of_a_stream_that_fails() -> None:
    event = errors.sse_error_event(errors.unavailable("the worker\n\nwas lost"))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        (float("nan"), "NaN"),
        (-7, "-7"),
        pytest.param(10**5000, "an integer of 16610 bits", id="huge"),
        ("short", "'short'"),
        ("x" * 1000, f"'{'x' * 40}'... (1000 characters)"),
        ([1, 2], "a list of 2 items"),
        ({"a": 1}, "an object with 1 fields"),
    ],
)
def test_values_in_messages_are_short(value: object, text: str) -> None:
    assert errors.shortened(value) == text
