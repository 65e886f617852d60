"""Every bad request gets a 400 in the whole error form that names the field; no error quotes the user's text.

What is peculiar to a route stands in test_chat_protocol.py and test_completion_protocol.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.openai_errors import ApiError
from app.openai_protocol import GenerationRequest
from app.request_parsing import parse_request

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
Refused = Callable[[bytes, type[GenerationRequest]], dict[str, Any]]
ROUTES = [(CHAT, ChatCompletionRequest), (COMPLETION, CompletionRequest)]


def body_of(good: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**good, **changes}).encode()


COMMON = [
    # field, bad value, code, part of the message
    ("model", None, "invalid_type", "the name of a served model"),
    ("model", "", "invalid_value", "the name of a served model"),
    ("model", 5, "invalid_type", "5. It must be the name"),
    ("temperature", -0.1, "invalid_value", "-0.1. It must be a number from 0 to 2"),
    ("temperature", 2.1, "invalid_value", "2.1. It must be a number from 0 to 2"),
    ("temperature", "1", "invalid_type", "'1'. It must be a number from 0 to 2"),
    ("temperature", True, "invalid_type", "true. It must be a number from 0 to 2"),
    ("temperature", [], "invalid_type", "a list of 0 items"),
    ("temperature", 10**400, "invalid_type", "an integer of 1329 bits"),
    ("top_p", 0, "invalid_value", "above 0"),
    ("top_p", -1, "invalid_value", "above 0"),
    ("top_p", 1.01, "invalid_value", "not above 1"),
    ("n", 0, "invalid_value", "from 1 to 64"),
    ("n", -1, "invalid_value", "from 1 to 64"),
    ("n", 65, "invalid_value", "from 1 to 64"),
    ("n", 10**30, "invalid_value", "from 1 to 64"),
    ("n", 1.0, "invalid_type", "from 1 to 64"),
    ("n", True, "invalid_type", "from 1 to 64"),
    ("n", "2", "invalid_type", "from 1 to 64"),
    ("max_tokens", -1, "invalid_value", "at least 1"),
    ("max_tokens", 0, "invalid_value", "at least 1"),
    ("max_tokens", 2**31, "invalid_value", "2147483648"),
    ("max_tokens", 10**4000, "invalid_value", "an integer of 13288 bits"),
    ("max_tokens", "16", "invalid_type", "at least 1"),
    ("max_tokens", True, "invalid_type", "at least 1"),
    ("max_tokens", 16.0, "invalid_type", "at least 1"),
    ("seed", 2**63, "invalid_value", "64 bits"),
    ("seed", -(2**63) - 1, "invalid_value", "64 bits"),
    ("seed", 1.5, "invalid_type", "64 bits"),
    ("seed", "7", "invalid_type", "64 bits"),
    ("presence_penalty", 2.5, "invalid_value", "from -2 to 2"),
    ("presence_penalty", -2.5, "invalid_value", "from -2 to 2"),
    ("frequency_penalty", 2.5, "invalid_value", "from -2 to 2"),
    ("frequency_penalty", "high", "invalid_type", "'high'. It must be a number from -2 to 2"),
    ("top_k", -2, "invalid_value", "0 or -1 switches it off"),
    ("top_k", 2**31, "invalid_value", "0 or -1 switches it off"),
    ("top_k", 1.5, "invalid_type", "0 or -1 switches it off"),
    ("min_p", -0.1, "invalid_value", "from 0 to 1"),
    ("min_p", 1.1, "invalid_value", "from 0 to 1"),
    ("repetition_penalty", 0, "invalid_value", "from 0.01 to 100"),
    ("repetition_penalty", 1e-300, "invalid_value", "from 0.01 to 100"),
    ("repetition_penalty", 1e300, "invalid_value", "from 0.01 to 100"),
    ("min_tokens", -1, "invalid_value", "at least 0"),
    ("min_tokens", 10**100, "invalid_value", "at least 0"),
    ("ignore_eos", 1, "invalid_type", "true or false"),
    ("ignore_eos", "true", "invalid_type", "true or false"),
    ("skip_special_tokens", 0, "invalid_type", "true (the default) or false"),
    ("include_stop_str_in_output", "no", "invalid_type", "true or false"),
    ("stream", "true", "invalid_type", "true or false"),
    ("stream", 1, "invalid_type", "true or false"),
    ("stream_options", {"include_usage": True}, "invalid_value", "only allowed with 'stream': true"),
    ("stream_options", True, "invalid_type", "include_usage"),
    ("prompt_logprobs", 21, "invalid_value", "a whole number from 0 to 20"),
    ("prompt_logprobs", -1, "invalid_value", "a whole number from 0 to 20"),
    ("prompt_logprobs", True, "invalid_type", "a whole number from 0 to 20"),
    ("stop", "", "invalid_value", "item 0 has 0"),
    ("stop", ["a", ""], "invalid_value", "item 1 has 0"),
    ("stop", ["a", None], "invalid_value", "item 1 is no string"),
    ("stop", 5, "invalid_value", "at most 16 strings"),
    ("stop", {"a": 1}, "invalid_value", "at most 16 strings"),
    ("stop", [f"{i}" for i in range(17)], "invalid_value", "at most 16 strings"),
    ("stop", "x" * 257, "invalid_value", "item 0 has 257"),
    ("stop_token_ids", 5, "invalid_value", "a list of at most 256 token ids"),
    ("stop_token_ids", ["5"], "invalid_value", "a list of at most 256 token ids"),
    ("stop_token_ids", [True], "invalid_value", "a list of at most 256 token ids"),
    ("stop_token_ids", [1] * 257, "invalid_value", "a list of at most 256 token ids"),
    ("logit_bias", [], "invalid_value", "an object of at most 1024 token ids"),
    ("logit_bias", {"a": 1}, "invalid_value", "the key 'a' is no token id"),
    ("logit_bias", {"-1": 1}, "invalid_value", "the key '-1' is no token id"),
    ("logit_bias", {"1_0": 1}, "invalid_value", "the key '1_0' is no token id"),
    ("logit_bias", {"\u0663": 1}, "invalid_value", "is no token id"),
    ("logit_bias", {"1" * 5000: 1}, "invalid_value", "is no token id"),
    ("logit_bias", {"1": 101}, "invalid_value", "the bias of 1 is 101"),
    ("logit_bias", {"1": -100.5}, "invalid_value", "the bias of 1 is -100.5"),
    ("logit_bias", {"1": True}, "invalid_value", "the bias of 1 is true"),
    ("logit_bias", {"1": "5"}, "invalid_value", "the bias of 1 is '5'"),
    ("logit_bias", {"1": None}, "invalid_value", "the bias of 1 is null"),
    ("logit_bias", {"1": 10**400}, "invalid_value", "the bias of 1 is an integer of"),
    ("logit_bias", {f"{i}": 1 for i in range(1025)}, "invalid_value", "at most 1024 token ids"),
    ("cache_salt", "", "invalid_value", "a string of 1 to 256 characters"),
    ("cache_salt", "s" * 257, "invalid_value", "a string of 257 characters. It must be a string of 1 to 256"),
    ("cache_salt", 5, "invalid_type", "a string of 1 to 256 characters"),
    ("priority", 101, "invalid_value", "a whole number from -100 to 100"),
    ("priority", -101, "invalid_value", "a whole number from -100 to 100"),
    ("priority", 0.5, "invalid_type", "a whole number from -100 to 100"),
    ("priority", True, "invalid_type", "a whole number from -100 to 100"),
]


@pytest.mark.parametrize(("good", "request_type"), ROUTES, ids=["chat", "completion"])
@pytest.mark.parametrize(
    ("field", "value", "code", "said"), COMMON, ids=lambda value: str(value)[:20] if isinstance(value, str) else ""
)
def test_bad_values_of_common_fields(
    refused: Refused,
    good: dict[str, Any],
    request_type: type[GenerationRequest],
    field: str,
    value: Any,
    code: str,
    said: str,
) -> None:
    error = refused(json.dumps({**good, field: value}).encode(), request_type)
    assert (error["param"], error["code"]) == (field, code)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"", "invalid_json", "not valid JSON"),
        (b"{", "invalid_json", "not valid JSON"),
        (b"{'model': 'x'}", "invalid_json", "line 1 column 2"),
        (b'{"model": "x"} {}', "invalid_json", "trailing characters"),
        (b'{"temperature": NaN}', "invalid_json", "NaN and Infinity are not JSON."),
        (b'{"temperature": Infinity}', "invalid_json", "NaN and Infinity are not JSON."),
        (b'{"temperature": -Infinity}', "invalid_json", "NaN and Infinity are not JSON."),
        (b'{"model": "\xff"}', "invalid_json", "not valid JSON"),
        (b'{"model": "\\ud800"}', "invalid_json", "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", "number out of range"),
        (b"[" * 100_000, "invalid_json", "recursion limit exceeded"),
        (b"null", "invalid_type", "must be a JSON object, not null"),
        (b"[]", "invalid_type", "must be a JSON object, not a list"),
        (b'"text"', "invalid_type", "must be a JSON object, not a string"),
        (b"true", "invalid_type", "must be a JSON object, not a boolean"),
        (b"5", "invalid_type", "must be a JSON object, not a number"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_bodies_that_are_no_json_object(
    refused: Refused, request_type: type[GenerationRequest], body: bytes, code: str, said: str
) -> None:
    error = refused(body, request_type)
    assert (error["param"], error["code"]) == (None, code)
    assert said in error["message"]


@pytest.mark.parametrize(("field", "literal"), [("temperature", b"1e999"), ("top_p", b"1e999"), ("min_p", b"1e999")])
def test_numbers_that_overflow_to_infinity(refused: Refused, field: str, literal: bytes) -> None:
    error = refused(body_of(CHAT)[:-1] + b', "' + field.encode() + b'": ' + literal + b"}", ChatCompletionRequest)
    assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "request_type"), [("model", ChatCompletionRequest), ("messages", ChatCompletionRequest)]
)
def test_a_missing_field(refused: Refused, field: str, request_type: type[GenerationRequest]) -> None:
    body = {name: value for name, value in CHAT.items() if name != field}
    error = refused(json.dumps(body).encode(), request_type)
    assert (error["param"], error["code"]) == (field, "missing_required_parameter")
    assert error["message"].startswith(f"Missing required parameter: '{field}'.")


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        (
            {"temprature": 1},
            "temprature",
            "Unrecognized request argument supplied: temprature. Did you mean 'temperature'?",
        ),
        (
            {"max_token": 1},
            "max_token",
            "Unrecognized request argument supplied: max_token. Did you mean 'max_tokens'?",
        ),
        (
            {"guided_choice": ["a"]},
            "guided_choice",
            "Unrecognized request argument supplied: guided_choice. Set 'structured_outputs' to an object with "
            "'choice' instead.",
        ),
        (
            {"return_token_ids": True},
            "return_token_ids",
            "Unrecognized request argument supplied: return_token_ids",
        ),
        ({"xyzzy": 1}, "xyzzy", "Unrecognized request argument supplied: xyzzy"),
        ({"xyzzy": 1, "plugh": 2}, "xyzzy", "Unrecognized request arguments supplied: xyzzy, plugh"),
    ],
)
def test_unknown_fields(refused: Refused, changes: dict[str, Any], param: str, message: str) -> None:
    for body, request_type in (
        (body_of(CHAT, **changes), ChatCompletionRequest),
        (body_of(COMPLETION, **changes), CompletionRequest),
    ):
        error = refused(body, request_type)
        assert (error["param"], error["code"], error["message"]) == (param, "unknown_parameter", message)


def test_a_long_unknown_name_is_cut(refused: Refused) -> None:
    error = refused(body_of(CHAT, **{"x" * 10_000: 1}), ChatCompletionRequest)
    assert error["param"] == "x" * 64


def names_of(*parameters: Any) -> list[str]:
    return sorted({name for parameter in parameters for name in parameter.__annotations__})


@pytest.mark.parametrize(
    "name",
    names_of(chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsNonStreaming),
)
def test_every_field_of_the_official_chat_client_is_known(name: str) -> None:
    if name not in CHAT:
        parse_request(body_of(CHAT, **{name: None}), ChatCompletionRequest)


@pytest.mark.parametrize(
    "name",
    names_of(
        completion_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsNonStreaming
    ),
)
def test_every_field_of_the_official_completion_client_is_known(name: str) -> None:
    if name not in COMPLETION:
        parse_request(body_of(COMPLETION, **{name: None}), CompletionRequest)


SECRET = "my secret diary"


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": SECRET},
        {"messages": [SECRET]},
        {"messages": {"user": SECRET}},
        {"messages": [{"role": "user", "content": {"text": SECRET}}]},
        {"messages": [{"role": "user", "content": [SECRET]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": [SECRET]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}]},
        {"messages": [{"role": "user", "content": SECRET, "name": [SECRET]}]},
        {"messages": [{"role": "assistant", "content": SECRET, "refusal": SECRET}]},
        {"messages": [{"role": "assistant", "content": SECRET, "function_call": SECRET}]},
        {"chat_template_kwargs": SECRET},
        {"stop": [SECRET, ""]},
        {"stop": SECRET * 100},
        {"cache_salt": SECRET * 100},
        {"messages": [{"role": "user", "content": SECRET}], "temperature": 9},
        {"tools": SECRET},
        {"tools": [{"type": "function", "function": {"name": "f", "description": [SECRET]}}]},
        {"tools": [{"type": "function", "function": {"name": SECRET, "parameters": SECRET}}]},
        {"tools": [], "tool_choice": {"type": "function", "function": [SECRET]}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": SECRET}}]}]},
        {"messages": [{"role": "user", "content": SECRET, "tool_calls": [{"id": [SECRET]}]}]},
    ],
)
def test_errors_never_quote_the_users_text(refused: Refused, changes: dict[str, Any]) -> None:
    assert SECRET not in str(refused(body_of(CHAT, **changes), ChatCompletionRequest))


@pytest.mark.parametrize("prompt", [[SECRET, ""], [SECRET, 5], [SECRET, None], {"text": SECRET}, [[SECRET]]])
def test_errors_never_quote_the_prompt(refused: Refused, prompt: Any) -> None:
    assert SECRET not in str(refused(body_of(COMPLETION, prompt=prompt), CompletionRequest))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, "tools", "suffix", "user"})


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4), st.sampled_from(ROUTES))
def test_any_json_is_a_request_or_a_400(
    refused: Refused, changes: dict[str, Any], route: tuple[dict[str, Any], type[GenerationRequest]]
) -> None:
    good, request_type = route
    body = json.dumps({**good, **changes}).encode()
    try:
        parse_request(body, request_type)
    except ApiError:
        refused(body, request_type)
