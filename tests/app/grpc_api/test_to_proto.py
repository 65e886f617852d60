"""Answers that call tools where they may, over gRPC and over HTTP: the same text is made the same of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.engine.request import FINISH_STOP, EngineRequest, SamplingParams, TokenEvent
from actors.random_model import byte_tokenizer
from app.chat_protocol import ChatCompletionRequest
from app.choice_text import ChoiceText
from app.generation import Choice, Generation
from app.grpc_api.inference_pb2 import GenerateChunk, GenerateResponse
from app.grpc_api.to_proto import chunks, whole_response
from app.openai_answers import OpenAIAnswer
from app.request_metrics import RequestMetrics
from app.request_parsing import validate_request
from app.running_answer import RunningAnswer
from app.token_bytes import TokenBytes
from app.tool_formats import HERMES
from app.tool_use import ToolUse

TOKENIZER = byte_tokenizer()
TABLE = TokenBytes(TOKENIZER)
REQUEST = validate_request({"model": "m", "messages": [{"role": "user", "content": "hi"}]}, ChatCompletionRequest)
TOOLS = ToolUse(HERMES, frozenset({"add", "stop"}), None, frozenset())
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": [1, {}]}}\n</tool_call>'
STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
ANSWERS = pytest.mark.parametrize(
    "texts",
    [
        ["It is five."],
        ["Let me see. " + ADD],
        [ADD + "\n" + STOP, "No.", STOP],
        ["<tool_call>" + '{"name": "sub", "arguments": {}}</tool_call>', "<tool_", "a < b"],
        [ADD[:40]],
    ],
)


class Flow:
    """A token for each byte of a text, and one that ends it."""

    def __init__(self, text: str) -> None:
        self._token_ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    async def events(self) -> AsyncGenerator[TokenEvent]:
        for left, token_id in zip(range(len(self._token_ids) - 1, -1, -1), self._token_ids, strict=True):
            yield TokenEvent("r", token_id, None if left else FINISH_STOP, cached_tokens=0)


def running(texts: list[str], tools: ToolUse | None = TOOLS) -> RunningAnswer:
    """An answer with a choice of each text."""
    choices = [
        Choice(
            EngineRequest(str(index), (1,), SamplingParams(max_tokens=999)),
            ChoiceText(
                index, TABLE, (), include_stop=False, skip_special_tokens=True, echoed_prompt=None, after_text=False
            ),
        )
        for index in range(len(texts))
    ]

    def start(choice: Choice, admitted: asyncio.Event) -> Any:
        admitted.set()
        return Flow(texts[int(choice.request.request_id)])

    return RunningAnswer(REQUEST, Generation([choices], start, RequestMetrics("m"), tools=tools), "m", 60.0)


async def streamed(answer: RunningAnswer) -> list[GenerateChunk]:
    return [chunk async for chunk in chunks(answer, TABLE)]


def whole(texts: list[str], tools: ToolUse | None = TOOLS) -> GenerateResponse:
    return asyncio.run(whole_response(running(texts, tools), TABLE))


@ANSWERS
def test_whole_answers_say_and_call_what_they_do_over_http(texts: list[str]) -> None:
    answer = whole(texts)
    over_http = asyncio.run(OpenAIAnswer(running(texts), TABLE).whole())
    for text, choice, wanted in zip(texts, answer.choices, over_http["choices"], strict=True):
        message = wanted["message"]
        assert (choice.text, choice.finish_reason) == (message["content"] or "", wanted["finish_reason"])
        called = [(call.name, call.arguments) for call in choice.tool_calls]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        assert called == [(function["name"], function["arguments"]) for function in functions]
        assert [call.index for call in choice.tool_calls] == list(range(len(functions)))
        assert TOKENIZER.decode(list(choice.token_ids), skip_special_tokens=True) == text


@ANSWERS
def test_streams_add_up_to_whole_answers(texts: list[str]) -> None:
    *pieces, last = asyncio.run(streamed(running(texts)))
    for choice in whole(texts).choices:
        own = [piece.choice for piece in pieces if piece.choice.index == choice.index]
        calls: dict[int, list[str]] = {}
        for part in (part for piece in own for part in piece.tool_calls):
            if part.id:  # a call's first part, and no other one
                assert part.index == len(calls)
                calls[part.index] = [part.name, ""]
            calls[part.index][1] += part.arguments
        assert list(calls.values()) == [[call.name, call.arguments] for call in choice.tool_calls]
        assert "".join(piece.text for piece in own) == choice.text
        assert [piece.finish_reason for piece in own] == [""] * (len(own) - 1) + [choice.finish_reason]
    assert last.HasField("usage")


def test_without_tools_a_call_is_text() -> None:
    (choice,) = whole([ADD], tools=None).choices
    assert (choice.text, list(choice.tool_calls), choice.finish_reason) == (ADD, [], "stop")
