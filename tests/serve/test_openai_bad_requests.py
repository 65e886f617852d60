"""Bad input to the running app: an error in OpenAI's form, and the same workers serve on."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.openai_app import CONTEXT_TOKENS, OpenAIApp, send, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.model]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
VOCABULARY = 49152


def chat(**changes: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [USER], "max_tokens": 2, **changes}


def completion(**changes: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETION, {"prompt": "hi", "max_tokens": 2, **changes}


def content(value: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": "user", "content": value}])


EMPTY_PROMPTS = [
    completion(prompt=""),
    completion(prompt=[]),
    completion(prompt=[[]]),
    completion(prompt=[""]),
    completion(prompt=["hi", ""]),
    completion(prompt=[[1, 2], []]),
    completion(prompt=None),
    (COMPLETION, {"max_tokens": 2}),
    chat(messages=[]),
    chat(messages=None),
    (CHAT, {"max_tokens": 2}),
    chat(messages=[{"role": "user"}]),
    content(None),
    content([]),
]
BAD_PROMPTS = [
    completion(prompt=7),
    completion(prompt={"text": "hi"}),
    completion(prompt=[[1], "hi", 3]),
    completion(prompt=[1, "hi"]),
    completion(prompt=[1.5]),
    completion(prompt=[True]),
    completion(prompt=[-1]),
    completion(prompt=[VOCABULARY]),
    completion(prompt=[10**30]),
    completion(prompt=["hi"] * 65),
    chat(messages=USER),
    chat(messages=["hi"]),
    chat(messages=[{"content": "hi"}]),
    chat(messages=[{"role": "wizard", "content": "hi"}]),
    content(7),
    content({"type": "text", "text": "hi"}),
    content(["hi"]),
    content([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    content([{"type": "text", "text": "hi"}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]),
    content([{"type": "text"}]),
    content([{"type": "text", "text": None}]),
    chat(messages=[{"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}]),
]
TOO_LONG = [
    completion(prompt=[5] * CONTEXT_TOKENS, max_tokens=1),
    completion(prompt=[5] * CONTEXT_TOKENS),
    completion(prompt=[5] * (3 * CONTEXT_TOKENS)),  # beyond the model's own context too
    completion(prompt=[[5], [5] * CONTEXT_TOKENS]),
    completion(prompt="hi", max_tokens=CONTEXT_TOKENS),
    completion(prompt="hi", max_tokens=2**31 - 1),
    completion(prompt=[5] * CONTEXT_TOKENS, max_tokens=1, echo=True, logprobs=1),
    content("word " * 5000),
    content("word " * 100_000),
    chat(max_tokens=CONTEXT_TOKENS),
    chat(max_tokens=2**31 - 1),
]
BAD_COUNTS = [
    *(
        make(**{field: value})
        for make in (chat, completion)
        for field, value in [
            ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 10**40), ("max_tokens", 1.5),
            ("max_tokens", "2"), ("max_tokens", True),
            ("n", 0), ("n", -1), ("n", 65), ("n", 10**40), ("n", 1.5), ("n", "2"),
            ("min_tokens", -1), ("min_tokens", 3),
            ("seed", 2**63), ("seed", 10**40), ("seed", 0.5),
            ("top_k", -2), ("top_k", 10**40),
        ]
    ),
    chat(max_tokens=0),
    completion(max_tokens=0),
    chat(max_tokens=None, max_completion_tokens=0),
    chat(max_tokens=2, max_completion_tokens=3),
    completion(best_of=0), completion(best_of=-1), completion(best_of=2), completion(best_of=10**40),
    completion(n=2, best_of=1), completion(prompt=["hi"] * 64, n=5),
    completion(logprobs=-1), completion(logprobs=21), completion(logprobs=10**40), completion(logprobs=True),
    chat(logprobs=5), chat(top_logprobs=2), chat(logprobs=True, top_logprobs=-1), chat(logprobs=True, top_logprobs=21),
]  # fmt: skip
BAD_NUMBERS = [
    make(**{field: value})
    for make in (chat, completion)
    for field, value in [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", 10**400), ("temperature", "1"),
        ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("min_p", -0.1), ("min_p", 1.1),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", -1),
    ]
]  # fmt: skip
BAD_OTHERS = [
    make(**changes)
    for make in (chat, completion)
    for changes in [
        {"stop": ""}, {"stop": ["a", ""]}, {"stop": 7}, {"stop": [7]}, {"stop": ["a"] * 17}, {"stop": "a" * 257},
        {"stop_token_ids": [-1]}, {"stop_token_ids": [VOCABULARY]}, {"stop_token_ids": ["1"]},
        {"logit_bias": {"a": 1}}, {"logit_bias": {"5": 101}}, {"logit_bias": {str(VOCABULARY): 1}},
        {"logit_bias": {"5": None}}, {"logit_bias": [5]},
        {"stream": "yes"}, {"stream": False, "stream_options": {"include_usage": True}}, {"stream_options": 1},
        {"model": ""}, {"model": 7}, {"cache_salt": ""}, {"temprature": 1}, {"user_id": 1},
    ]
]  # fmt: skip
BAD_OTHERS += [
    chat(tools=[{"type": "function", "function": {"name": "f"}}]),  # this model's template knows none
    chat(tools=[{"type": "function", "function": {"name": "f()"}}], tool_choice="required"),
    chat(tool_choice="required"),
    chat(response_format={"type": "json_object", "schema": {}}),
    chat(chat_template_kwargs={"messages": []}),
    chat(chat_template_kwargs={"chat_template": "{{ 1 / 0 }}"}),
    chat(continue_final_message=True),
    completion(suffix="."),
]
BAD_REQUESTS = [*EMPTY_PROMPTS, *BAD_PROMPTS, *TOO_LONG, *BAD_COUNTS, *BAD_NUMBERS, *BAD_OTHERS]

NO_JSON = [
    b"",
    b"{",
    b'{"model": "m", "prompt": "hi",}',
    b"null",
    b"[]",
    b'"hi"',
    b"\xff\xfe{}",
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    *(
        b'{"model": "MODEL", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": %s}'
        % number
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999")
    ),
]


@pytest.mark.parametrize(("path", "body"), BAD_REQUESTS)
def test_a_bad_request(openai_app: OpenAIApp, path: str, body: dict[str, Any]) -> None:
    for request in (body, {"stream": True, **body}):  # a stream fails by its status too, before it begins
        error = openai_app.post(path, request).error(400)
        assert error["type"] == "invalid_request_error"
        assert error["param"]
        assert error["code"]


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_what_the_pool_could_never_hold(openai_app: OpenAIApp, path: str, body: dict[str, Any]) -> None:
    error = openai_app.post(path, body).error(400, "context_length_exceeded")
    assert str(CONTEXT_TOKENS) in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("body", NO_JSON, ids=range(len(NO_JSON)))
def test_a_body_that_is_no_good_json(openai_app: OpenAIApp, path: str, body: bytes) -> None:
    body = body.replace(b"MODEL", openai_app.model.encode())
    assert openai_app.post(path, body).error(400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_unknown_model(openai_app: OpenAIApp, path: str) -> None:
    body = {**(chat() if path == CHAT else completion())[1], "model": "gpt-9"}
    error = openai_app.post(path, json.dumps(body).encode()).error(404, "model_not_found")
    assert openai_app.model in error["message"]
    with pytest.raises(openai.NotFoundError):
        openai_app.client.models.retrieve("gpt-9")


@pytest.mark.parametrize("path", ["/v1/nowhere", "/", "/v1", "/v1/chat/completions/x", "/v2/models"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_route(openai_app: OpenAIApp, path: str, method: str) -> None:
    assert openai_app.post(path, {}, method).error(404, "not_found")["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETION, "POST"),
        ("DELETE", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("PATCH", "/health", "GET"),
    ],
)
def test_a_wrong_method(openai_app: OpenAIApp, method: str, path: str, allowed: str) -> None:
    answer = openai_app.post(path, {}, method)
    answer.error(405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


def test_errors_raise_what_clients_expect(openai_app: OpenAIApp) -> None:
    with pytest.raises(openai.BadRequestError, match="'n'") as caught:
        openai_app.chat("hi", n=0)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
    with pytest.raises(openai.BadRequestError) as caught:
        openai_app.chat("hi", temperature=3.0, stream=True)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_app.client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    assert unknown.value.code == "model_not_found"


def test_a_bad_request_among_good_ones_fails_alone(openai_app: OpenAIApp) -> None:
    good = openai_app.complete("1, 2, 3, 4,", max_tokens=24, stream=True)
    first = next(good)
    for path, body in BAD_REQUESTS[::7]:
        openai_app.post(path, body).error(400)
    text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in good)
    assert text.startswith(" 5, 6, 7, 8")


def test_after_all_of_it_the_same_workers_serve(openai_app: OpenAIApp) -> None:
    app = openai_app.app
    workers = {(member.worker_id, member.epoch) for member in app.members()}
    failed = app.total("failed_requests")
    for path, body in BAD_REQUESTS:
        openai_app.post(path, body).error(400)
    for body in NO_JSON:
        send(app.base_url, "POST", CHAT, body).error(400)
    assert app.get("/health") == (200, {"status": "ok", "problems": []})
    assert {(member.worker_id, member.epoch) for member in app.members()} == workers
    assert app.total("failed_requests") == failed  # none of them came as far as a worker
    assert app.total("live_blocks") == 0
    assert text_of(openai_app.complete("1, 2, 3, 4,", max_tokens=5)) == " 5, 6"
