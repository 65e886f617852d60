"""docs/api.md names the fields that the requests have, with their limits; whatever is added must be documented."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from app import completion_protocol, openai_errors, openai_protocol
from app.chat_protocol import ChatCompletionRequest, ChatMessage
from app.completion_protocol import CompletionRequest
from app.ingress import http
from app.openai_protocol import NO_EFFECT, GenerationRequest, StreamOptions
from app.responses_protocol import ResponsesRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each table row by the names in backticks in its first one."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in found, name
                found[name] = cells[1:]
    return found


def own_fields(request: type[GenerationRequest]) -> set[str]:
    return request.model_fields.keys() - GenerationRequest.model_fields.keys()


def test_the_tables_have_the_fields_of_the_requests_and_no_others() -> None:
    chat, message = section("Fields of chat completions").split("A message:")
    assert rows(section("Fields of both endpoints")).keys() == GenerationRequest.model_fields.keys()
    assert rows(chat).keys() == own_fields(ChatCompletionRequest)
    assert rows(message).keys() == ChatMessage.model_fields.keys()
    assert rows(section("Fields of completions")).keys() == own_fields(CompletionRequest)
    options = " ".join(rows(section("Fields of both endpoints"))["stream_options"])
    assert set(re.findall(r"`([a-z]+_[a-z]+)`", options)) == StreamOptions.model_fields.keys()


def test_the_fields_of_responses_are_listed() -> None:
    table, listed = section("Responses").split("Refused, unless")
    assert rows(table).keys() == ResponsesRequest.model_fields.keys()
    assert set(re.findall(r"`([a-z_]+)`", listed)) == ResponsesRequest._harmless.keys()


def test_what_is_refused_or_ignored_is_listed() -> None:
    table, ignored = section("What is refused").split("without effect:")
    assert rows(table).keys() == ChatCompletionRequest._harmless.keys() | CompletionRequest._harmless.keys()
    assert set(re.findall(r"`([a-z_]+)`", ignored.split("\n\n")[0])) == NO_EFFECT


def limits(model: type[BaseModel], name: str) -> set[float]:
    metadata = model.model_fields[name].metadata
    values = {getattr(item, kind, None) for item in metadata for kind in ("ge", "gt", "le", "min_length", "max_length")}
    return {value for value in values if isinstance(value, int | float)}


@pytest.mark.parametrize(
    ("title", "request_type"),
    [
        ("Fields of both endpoints", GenerationRequest),
        ("Fields of chat completions", ChatCompletionRequest),
        ("Fields of completions", CompletionRequest),
    ],
)
def test_limits_are_those_that_are_checked(title: str, request_type: type[GenerationRequest]) -> None:
    for name, cells in rows(section(title).split("A message:")[0]).items():
        numbers = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", cells[0])}
        is_whole_text = {"seed", "model", "messages", "min_tokens"}  # said in words
        if name not in is_whole_text:
            missing = limits(request_type, name) - numbers - {openai_protocol.MAX_COUNT * 1.0}
            assert not missing, (name, missing)


CONSTANTS: Mapping[str, tuple[int, ...]] = {
    "n": (openai_protocol.MAX_CHOICES,),
    "stop": (openai_protocol.MAX_STOPS, openai_protocol.MAX_STOP_CHARS),
    "stop_token_ids": (openai_protocol.MAX_STOP_TOKEN_IDS,),
    "logit_bias": (openai_protocol.MAX_LOGIT_BIAS,),
    "max_tokens": (openai_protocol.MAX_COUNT, completion_protocol.DEFAULT_MAX_TOKENS),
}


def test_limits_of_lists_are_those_that_are_checked() -> None:
    table = rows(section("Fields of both endpoints"))
    for name, values in CONSTANTS.items():
        said = {int(number) for number in re.findall(r"\d+", " ".join(table[name][:2]))}
        assert said >= set(values), name
    completions = section("Fields of completions")
    assert f"up to {completion_protocol.MAX_PROMPTS} of these" in completions
    assert f"at most {completion_protocol.MAX_SEQUENCES}." in completions


def test_routes_are_all_listed() -> None:
    listed = " ".join(rows(section("Routes")))
    for route in http.routes:
        path = str(getattr(route, "path", "")).replace("{model:path}", "{model}")
        if path != "/docs/oauth2-redirect":
            assert path in listed, path


def test_every_status_and_kind_of_error_is_listed() -> None:
    table = section("Errors")
    kinds = {value for name, value in vars(openai_errors).items() if name.isupper() and isinstance(value, str)}
    assert kinds <= set(re.findall(r"`([a-z_]+)`", table))
    made = [
        openai_errors.invalid_request("m"),
        openai_errors.unsupported("p", "w"),
        openai_errors.context_length_exceeded(context_tokens=1, prompt_tokens=1, answer_tokens=1, param="prompt"),
        openai_errors.request_too_large(1),
        openai_errors.unauthorized(),
        openai_errors.forbidden("m"),
        openai_errors.model_not_found("a", "b"),
        openai_errors.overloaded("r"),
        openai_errors.over_key_limit("l", retry_after_s=1.0),
        openai_errors.unavailable("r"),
        openai_errors.timeout(1.0),
        openai_errors.internal(),
        openai_errors.from_http_status(404, "d"),
        openai_errors.from_http_status(405, "d"),
    ]
    for error in made:
        line = next(line for line in table.splitlines() if line.startswith(f"| {int(error.status)} "))
        assert f"`{error.type}`" in line
        assert f"`{error.code}`" in line
