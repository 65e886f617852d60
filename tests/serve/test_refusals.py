"""Requests that this app refuses, or ends, for what its model and its limits are: a small model with a strict template,
one request at a time, and little time for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.model_source import resolve_model
from tests.openai_app import Messages, OpenAIApp
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

TIMEOUT_S = 2.5
STRICT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('Only user and assistant roles are supported, not ' + message['role'] + '!') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)
FOREVER: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}
"""Far more than fits in the time limit."""


@pytest.fixture(scope="module")
def strict_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose chat template refuses roles, in the words of real templates."""
    folder = tmp_path_factory.mktemp("models") / "strict"
    shutil.copytree(resolve_model("random/llama-12x8").path, folder)
    (folder / "chat_template.jinja").write_text(STRICT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def strict_app(deploy: Deploy, strict_model: Path) -> Iterator[OpenAIApp]:
    roles = small_roles()
    limits = {"max_inflight_requests": 1, "max_queued_requests": 0, "request_timeout_s": TIMEOUT_S}
    app = OpenAIApp.of(
        deploy({"model": str(strict_model), "mode": "static", **roles, "ingress": {**roles["ingress"], **limits}})
    )
    with app.client:
        yield app
        assert_serves_on(app)


def assert_serves_on(strict_app: OpenAIApp) -> None:
    """Whatever a test did: nothing is left of it, and the next request is served."""
    app: RunningApp = strict_app.app
    wait_until(lambda: app.get("/debug/blocks")[1]["inflight_requests"] == 0, 10.0, "a request goes on")
    wait_until(lambda: app.total("live_blocks") == 0, 10.0, "a worker keeps blocks")
    assert app.get("/health")[0] == 200
    assert strict_app.complete("hi", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (["system", "user"], "Only user and assistant roles are supported, not system!"),
        (["developer", "user"], "not system!"),
        (["user", "assistant", "tool"], "not tool!"),
        (["assistant"], "must alternate"),
        (["user", "user"], "must alternate"),
    ],
)
def test_a_template_that_refuses_a_role(strict_app: OpenAIApp, roles: list[str], reason: str, stream: bool) -> None:
    messages: Messages = [{"role": role, "content": "a secret"} for role in roles]
    with pytest.raises(openai.BadRequestError, match="chat template refuses these messages") as caught:
        strict_app.chat(messages, max_tokens=2, stream=stream)
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages")
    assert reason in str(caught.value)
    assert "a secret" not in str(caught.value)


def test_a_chat_that_the_template_takes(strict_app: OpenAIApp) -> None:
    answer = strict_app.chat("hi", max_tokens=2, ignore_eos=True)
    assert answer.usage.completion_tokens == 2
    assert answer.usage.prompt_tokens == len("[user]hi")  # a token is a byte


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_more_requests_than_may_run_or_wait(strict_app: OpenAIApp, route: str, stream: bool) -> None:
    running = strict_app.complete("hi", stream=True, **FOREVER)
    next(running)
    body: dict[str, Any] = {"max_tokens": 2, "stream": stream}
    body |= {"prompt": "hi"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    refused = strict_app.post(route, body)
    error = refused.error(429, "server_overloaded")
    assert error["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    with pytest.raises(openai.RateLimitError):
        strict_app.complete("hi", max_tokens=2)
    running.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"prompt": "hi", "n": 3}, {"prompt": ["hi", "ho", "ha"]}])
def test_a_request_of_several_answers_is_admitted_or_refused_as_a_whole(
    strict_app: OpenAIApp, options: dict[str, Any], stream: bool
) -> None:
    """Though only one sequence may run at a time, and none may wait to be admitted."""
    body = {"max_tokens": 5, "ignore_eos": True, "stream": stream, **options}
    answer = strict_app.post("/v1/completions", body)
    assert answer.status == 200
    if stream:
        chunks = [json.loads(event[6:]) for event in answer.body.decode().split("\n\n")[:-2]]
        ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(ended) == [0, 1, 2]
    else:
        assert answer.json["usage"]["completion_tokens"] == 15
    running = strict_app.complete("hi", stream=True, **FOREVER)
    next(running)
    strict_app.post("/v1/completions", body).error(429, "server_overloaded")
    running.close()


def test_a_whole_answer_that_takes_too_long(strict_app: OpenAIApp) -> None:
    answer = strict_app.post("/v1/completions", {"prompt": "hi", **FOREVER})
    error = answer.error(504, "timeout")
    assert error["type"] == "timeout_error"
    assert f"{TIMEOUT_S:g} s" in error["message"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_takes_too_long_ends_with_an_error_event(strict_app: OpenAIApp, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = strict_app.post(path, {**prompt, **options, **FOREVER})
    assert answer.status == 200  # it was said before the failure
    *chunks, error, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    assert len(chunks) > 10
    assert all("choices" in json.loads(chunk.removeprefix("data: ")) for chunk in chunks)
    failure = json.loads(error.removeprefix("data: "))
    assert failure.keys() == {"error"}
    assert (failure["error"]["type"], failure["error"]["code"]) == ("timeout_error", "timeout")


def test_a_stream_that_fails_raises_in_the_client_after_what_came_before(strict_app: OpenAIApp) -> None:
    got = []
    with pytest.raises(openai.APIError, match="longer than the limit") as caught:
        got.extend(strict_app.complete("hi", stream=True, **FOREVER))
    assert caught.value.code == "timeout"
    assert len(got) > 10
    assert all(chunk.choices[0].finish_reason is None for chunk in got)
