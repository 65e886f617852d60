"""Whole and streamed answers, read by OpenAI's own client from a server that sends our bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types import Model as ApiModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs as CompletionLogprobs

from app import openai_errors as errors
from app.openai_errors import ApiError, sse_error_event
from app.openai_responses import (
    AnswerHead,
    chat_choice,
    chat_completion,
    model_entry,
    model_list,
    text_choice,
    text_completion,
    usage,
)
from app.openai_stream import DONE, ChatStream, CompletionStream
from app.tool_call_parser import ToolCallDelta

HEAD = AnswerHead("id-1", 1_700_000_000, "tiny", "fp-1")
USAGE = usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
ODD_TEXT = 'quotes " and \\ and \n\n and data: [DONE] and 😀 and \u2028\u2029\u0085\x0b\x1c and \x00'
CHAT_LOGPROBS = {
    "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}],
    "refusal": None,
}


@contextmanager
def client_of(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Iterator[openai.OpenAI]:
    """The official client of a server that answers everything with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            kind = "text/event-stream" if body.startswith(b"data:") else "application/json"
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/v1"
            with openai.OpenAI(api_key="key", base_url=url, max_retries=0) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


def ask_chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], **options)


def test_a_whole_chat() -> None:
    choices = [chat_choice(0, ODD_TEXT, "stop", CHAT_LOGPROBS), chat_choice(1, "", "length")]
    answer = chat_completion(HEAD, choices, USAGE)
    ChatCompletion.model_validate(answer, strict=True)
    with client_of(json.dumps(answer).encode()) as client:
        got = ask_chat(client)
    assert (got.id, got.created, got.model, got.object) == ("id-1", 1_700_000_000, "tiny", "chat.completion")
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in got.choices] == [
        (0, ODD_TEXT, "stop"),
        (1, "", "length"),
    ]
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].logprobs.content[0].logprob == -0.5
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 3, 8)
    assert got.usage.prompt_tokens_details.cached_tokens == 4


def test_a_whole_completion() -> None:
    answer = text_completion(HEAD, [text_choice(0, ODD_TEXT, "length")], USAGE)
    Completion.model_validate(answer, strict=True)
    with client_of(json.dumps(answer).encode()) as client:
        got = client.completions.create(model="tiny", prompt="hi")
    assert (got.object, got.choices[0].text, got.choices[0].finish_reason) == ("text_completion", ODD_TEXT, "length")


def test_the_list_of_models() -> None:
    answer = model_list([model_entry("tiny", created=7, context_tokens=2048)])
    ApiModel.model_validate(answer["data"][0], strict=True)
    with client_of(json.dumps(answer).encode()) as client:
        got = list(client.models.list())
    assert [(model.id, model.created, model.owned_by) for model in got] == [("tiny", 7, "equipoise")]


def chunks_of(events: list[bytes]) -> list[dict[str, Any]]:
    """The events' JSON, each checked to be one SSE event on one line of ASCII."""
    parsed = []
    for event in events:
        text = event.decode("ascii")
        assert text.splitlines() == [text.removesuffix("\n\n"), ""]
        parsed.append(json.loads(text.removeprefix("data: ")))
    return parsed


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_streamed_chat(with_usage: bool) -> None:
    stream = ChatStream(HEAD, includes_usage=with_usage)
    events = [
        stream.begin(0),
        stream.begin(1),
        stream.text(0, "Hel"),
        stream.text(1, ODD_TEXT),
        stream.text(0, "lo", CHAT_LOGPROBS),
        stream.end(1, "length"),
        stream.end(0, "stop"),
    ]
    if with_usage:
        events.append(stream.usage(USAGE))
    for chunk in chunks_of(events):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert ("usage" in chunk) == with_usage
    with client_of(b"".join(events) + DONE) as client:
        got = list(ask_chat(client, stream=True))
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in got:
        assert (chunk.id, chunk.model, chunk.object) == ("id-1", "tiny", "chat.completion.chunk")
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "Hello", 1: ODD_TEXT}
    assert reasons == {0: "stop", 1: "length"}
    assert [choice.delta.role for chunk in got[:2] for choice in chunk.choices] == ["assistant", "assistant"]
    assert got[4].choices[0].logprobs.content[0].token == "a"
    used = [chunk.usage for chunk in got if chunk.usage is not None]
    assert [item.total_tokens for item in used] == ([8] if with_usage else [])
    if with_usage:
        assert got[-1].choices == []


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_streamed_completion(with_usage: bool) -> None:
    stream = CompletionStream(HEAD, includes_usage=with_usage)
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
    events = [
        stream.text(0, "He"),
        stream.text(3, ODD_TEXT, logprobs),
        stream.text(0, "llo", None, "stop"),
        stream.text(3, "", None, "length"),
    ]
    if with_usage:
        events.append(stream.usage(USAGE))
    for chunk in chunks_of(events):
        assert ("usage" in chunk) == with_usage
        assert {"text", "index", "logprobs", "finish_reason"} == {
            key for choice in chunk["choices"] for key in choice
        } or (chunk["choices"] == [])
    with client_of(b"".join(events) + DONE) as client:
        got = list(client.completions.create(model="tiny", prompt="hi", stream=True))
    assert [(choice.index, choice.text, choice.finish_reason) for chunk in got for choice in chunk.choices] == [
        (0, "He", None),
        (3, ODD_TEXT, None),
        (0, "llo", "stop"),
        (3, "", "length"),
    ]
    assert got[1].choices[0].logprobs == CompletionLogprobs.model_validate(logprobs)
    assert [chunk.usage.total_tokens for chunk in got if chunk.usage] == ([8] if with_usage else [])


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_a_whole_answer_that_calls() -> None:
    choices = [chat_choice(0, "", "tool_calls", None, [CALL]), chat_choice(1, "I add.", "length", None, [CALL])]
    answer = chat_completion(HEAD, choices, USAGE)
    ChatCompletion.model_validate(answer, strict=True)
    with client_of(json.dumps(answer).encode()) as client:
        got = ask_chat(client)
    assert [choice.message.content for choice in got.choices] == [None, "I add."]
    assert [choice.finish_reason for choice in got.choices] == ["tool_calls", "length"]
    assert [choice.message.tool_calls[0].model_dump() for choice in got.choices] == [CALL, CALL]


def test_a_streamed_answer_that_calls() -> None:
    stream = ChatStream(HEAD)
    events = [
        stream.begin(0),
        stream.text(0, "I add."),
        stream.tool_call(0, ToolCallDelta(0, "", "call_1", "add")),
        stream.tool_call(0, ToolCallDelta(0, '{"a"')),
        stream.tool_call(0, ToolCallDelta(0, ": 1}")),
        stream.tool_call(0, ToolCallDelta(1, "{}", "call_2", "stop")),
        stream.end(0, "tool_calls"),
    ]
    for chunk in chunks_of(events):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    with (
        client_of(b"".join(events) + DONE) as client,
        client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hi"}]) as got,
    ):
        (choice,) = got.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == [
        ("call_1", "add", '{"a": 1}'),
        ("call_2", "stop", "{}"),
    ]


@pytest.mark.parametrize("reason", ["abort", "error", ""])
def test_an_answer_cannot_finish_by_an_abort(reason: Any) -> None:
    with pytest.raises(ValueError, match="send an error instead"):
        ChatStream(HEAD).end(0, reason)
    with pytest.raises(ValueError, match="send an error instead"):
        CompletionStream(HEAD).text(0, "", None, reason)


def test_a_stream_that_fails_raises_in_the_client() -> None:
    stream = ChatStream(HEAD)
    body = stream.begin(0) + stream.text(0, "Hel") + sse_error_event(errors.unavailable("the worker was lost"))
    got = []
    with client_of(body) as client, pytest.raises(openai.APIError, match="the worker was lost") as caught:
        got.extend(ask_chat(client, stream=True))
    assert caught.value.code == "service_unavailable"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.invalid_request("'n' is wrong", param="n"), openai.BadRequestError),
        (errors.unauthorized(), openai.AuthenticationError),
        (errors.forbidden("no"), openai.PermissionDeniedError),
        (errors.model_not_found("big", "tiny"), openai.NotFoundError),
        (errors.overloaded("full"), openai.RateLimitError),
        (errors.internal("r"), openai.InternalServerError),
        (errors.unavailable("gone"), openai.InternalServerError),
    ],
)
def test_the_client_reads_our_errors(error: ApiError, raised: type[openai.APIStatusError]) -> None:
    with (
        client_of(json.dumps(error.body()).encode(), status=error.status, headers=error.headers()) as client,
        pytest.raises(raised) as caught,
    ):
        ask_chat(client)
    assert (caught.value.code, caught.value.param, caught.value.type) == (error.code, error.param, error.type)
    assert caught.value.body["message"] == str(error)  # type: ignore[index]


@pytest.mark.parametrize("finish", [chat_choice, text_choice])
def test_a_choice_has_no_logprobs_unless_asked(finish: Callable[..., dict[str, Any]]) -> None:
    assert finish(0, "a", "stop")["logprobs"] is None
