"""Streams of each form that fail after their first piece, or are left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from actors.engine.request import EngineRequest, SamplingParams, TokenEvent
from app.chat_protocol import ChatCompletionRequest
from app.choice_text import ChoiceText
from app.completion_protocol import CompletionRequest
from app.event_answer import EventAnswer
from app.generation import Choice, Generation
from app.openai_answers import OpenAIAnswer
from app.openai_protocol import GenerationRequest
from app.request_metrics import RequestMetrics
from app.request_parsing import validate_request
from app.responses_answer import ResponsesAnswer
from app.responses_protocol import ResponsesRequest
from app.running_answer import RunningAnswer
from app.sequence_flow import RequestFailedError
from app.token_bytes import TokenBytes

RESPONSES = validate_request({"model": "m", "input": "hi", "stream": True}, ResponsesRequest)
CHAT = RESPONSES.as_chat()
COMPLETION = validate_request({"model": "m", "prompt": "hi", "stream": True}, CompletionRequest)


class Flow:
    """A sequence whose worker fails after three tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.has_ended = False

    async def events(self) -> AsyncGenerator[TokenEvent]:
        try:
            for token_id in self.token_ids:
                yield TokenEvent("r", token_id)
            raise RequestFailedError("no reason that a client is told")
        finally:
            self.has_ended = True


def running(tokenizer: Any, request: GenerationRequest) -> tuple[RunningAnswer, Flow, TokenBytes]:
    table = TokenBytes(tokenizer)
    text = ChoiceText(0, table, (), include_stop=False, skip_special_tokens=True, echoed_prompt=None, after_text=False)
    flow = Flow(tokenizer.encode("fox")[:3])
    choice = Choice(EngineRequest("r", (1,), SamplingParams(max_tokens=9)), text)

    def start(*_: object) -> Any:
        return flow

    return RunningAnswer(request, Generation([[choice]], start, RequestMetrics("m")), "m", 60.0), flow, table


def as_openai(request: ChatCompletionRequest | CompletionRequest) -> Callable[[Any], tuple[EventAnswer, Flow]]:
    def make(tokenizer: Any) -> tuple[EventAnswer, Flow]:
        answer, flow, table = running(tokenizer, request)
        return OpenAIAnswer(answer, table), flow

    return make


def as_responses(tokenizer: Any) -> tuple[EventAnswer, Flow]:
    answer, flow, _ = running(tokenizer, CHAT)
    return ResponsesAnswer(answer, RESPONSES), flow


FORMS = pytest.mark.parametrize(
    "make", [as_openai(CHAT), as_openai(COMPLETION), as_responses], ids=["chat", "completion", "responses"]
)


@FORMS
def test_a_stream_that_fails_ends_with_its_error(make: Any, byte_level_tokenizer: Any) -> None:
    async def read() -> bytes:
        answer, flow = make(byte_level_tokenizer)
        events = b"".join([event async for event in await answer.stream()])
        assert flow.has_ended
        return events

    *_, last, rest = asyncio.run(read()).split(b"\n\n")
    assert rest == b""
    document = json.loads(last.split(b"data: ")[1])
    error = document.get("error", document)
    assert error["code"] == "internal_error"
    assert "no reason that" not in error["message"]
    if make is as_responses:
        assert last.startswith(b"event: error\n")
        assert (document["type"], document["param"]) == ("error", None)


@FORMS
def test_a_stream_that_is_never_read_frees_what_it_holds(make: Any, byte_level_tokenizer: Any) -> None:
    async def leave() -> bool:
        answer, flow = make(byte_level_tokenizer)
        await answer.close()  # before it began
        events = await answer.stream()
        assert not flow.has_ended
        await events.aclose()
        await answer.close()
        await answer.close()
        return bool(flow.has_ended)

    assert asyncio.run(leave())
