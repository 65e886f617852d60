"""gRPC requests become the requests that the same JSON would be."""

from __future__ import annotations

from typing import Any

import pytest

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.grpc_api.from_proto import generation_request, tokenize_request
from app.grpc_api.inference_pb2 import (
    ChatMessage,
    Choices,
    GenerateRequest,
    StructuredOutput,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
)
from app.openai_errors import ApiError
from app.openai_protocol import GenerationRequest

COMMON: dict[str, Any] = {
    "max_tokens": 9, "n": 2, "temperature": 0.0, "top_p": 0.25, "top_k": -1, "min_p": 0.1, "presence_penalty": -1.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": -(2**63), "stop": ["a", "b"],
    "stop_token_ids": [7, 8], "include_stop_str_in_output": True, "min_tokens": 0, "ignore_eos": False,
    "skip_special_tokens": False, "cache_salt": "mine", "priority": -7,
}  # fmt: skip


def test_every_field_arrives_in_a_completion() -> None:
    message = GenerateRequest(model="m", prompt="p", logprobs=3, logit_bias={5: -100.0, 6: 0.5}, **COMMON)
    wanted = {"model": "m", "prompt": "p", "logprobs": 3, "logit_bias": {"5": -100.0, "6": 0.5}, **COMMON}
    assert generation_request(message) == CompletionRequest.model_validate(wanted)


def test_every_field_arrives_in_a_chat() -> None:
    messages = [{"role": "user", "content": "hi", "name": "me"}, {"role": "tool", "content": "", "tool_call_id": "c"}]
    message = GenerateRequest(model="m", messages=[ChatMessage(**each) for each in messages], logprobs=0, **COMMON)
    wanted = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 0, **COMMON}
    request = generation_request(message)
    assert request == ChatCompletionRequest.model_validate(wanted)


def test_a_message_is_no_longer_than_a_body_may_be() -> None:
    assert tokenize_request(TokenizeRequest(model="m", prompt="a" * (4 * 1024 * 1024 - 100))).model == "m"
    for read, kind in ((tokenize_request, TokenizeRequest), (generation_request, GenerateRequest)):
        with pytest.raises(ApiError, match="longer than 4194304 bytes") as caught:
            read(kind(model="m", prompt="a" * (4 * 1024 * 1024)))
        assert caught.value.status == 413


def test_the_fields_of_the_message_are_those_that_are_tested() -> None:
    named = {field.name for field in GenerateRequest.DESCRIPTOR.fields}
    assert named == COMMON.keys() | {"model", "prompt", "prompt_token_ids", "messages", "logprobs", "logit_bias"} | {
        "structured_outputs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (StructuredOutput(json='{"type": "object"}'), {"json": {"type": "object"}}),
        (StructuredOutput(regex="a+"), {"regex": "a+"}),
        (StructuredOutput(choice=Choices(choices=["a", "b"])), {"choice": ["a", "b"]}),
        (StructuredOutput(grammar='start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_what_the_answer_keeps_to(rule: StructuredOutput, wanted: dict[str, Any]) -> None:
    request = generation_request(GenerateRequest(model="m", prompt="p", structured_outputs=rule))
    same = CompletionRequest.model_validate({"model": "m", "prompt": "p", "structured_outputs": wanted})
    assert request == same
    assert request.grammar is not None


TOOLS = [Tool(name="add", description="adds", parameters='{"type": "object", "properties": {}}'), Tool(name="stop")]
SAME_TOOLS = [
    {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    {"name": "stop"},
]
CHAT = [ChatMessage(role="user", content="hi")]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, {}),
        (ToolChoice(mode="none"), {"tool_choice": "none"}),
        (ToolChoice(mode="required"), {"tool_choice": "required"}),
        (ToolChoice(function="add"), {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ],
)
def test_tools_and_what_is_to_be_called(choice: ToolChoice | None, wanted: dict[str, Any]) -> None:
    message = GenerateRequest(
        model="m", messages=CHAT, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=9
    )
    same = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": False, "max_tokens": 9,
        "tools": [{"type": "function", "function": function} for function in SAME_TOOLS], **wanted,
    }  # fmt: skip
    request = generation_request(message)
    assert isinstance(request, ChatCompletionRequest)
    assert request == ChatCompletionRequest.model_validate(same)
    assert [tool.name for tool in request.tools] == ["add", "stop"]


def test_calls_of_earlier_answers() -> None:
    calls = [ToolCall(index=0, id="c", name="add", arguments='{"a": 1}'), ToolCall(index=1, name="stop")]
    message = GenerateRequest(model="m", messages=[*CHAT, ChatMessage(role="assistant", tool_calls=calls)])
    request = generation_request(message)
    assert isinstance(request, ChatCompletionRequest)
    assert request.messages[1].tool_calls == (
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "stop", "arguments": {}}},
    )


def test_what_is_not_set_is_left_to_the_server() -> None:
    message = GenerateRequest(model="m", prompt_token_ids=[1, 2])
    assert generation_request(message) == CompletionRequest.model_validate({"model": "m", "prompt": [1, 2]})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "top_p": 0.0}, "top_p"),
        ({"prompt": "a", "structured_outputs": StructuredOutput(json="{")}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": StructuredOutput(grammar="start: A\nA: ~/a/")}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": StructuredOutput()}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": StructuredOutput(choice=Choices())}, "structured_outputs"),
        ({"prompt": "a", "priority": 101}, "priority"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"messages": CHAT, "tools": [Tool(name="add", parameters="{")]}, "tools"),
        ({"messages": CHAT, "tools": [Tool(name="add", parameters="[]")]}, "tools"),
        ({"messages": CHAT, "tools": [Tool()]}, "tools"),
        ({"messages": CHAT, "tools": TOOLS, "tool_choice": ToolChoice()}, "tool_choice"),
        ({"messages": CHAT, "tools": TOOLS, "tool_choice": ToolChoice(mode="maybe")}, "tool_choice"),
        ({"messages": CHAT, "tools": TOOLS, "tool_choice": ToolChoice(function="sub")}, "tool_choice"),
        ({"messages": CHAT, "tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"messages": [ChatMessage(role="user", tool_calls=[ToolCall(name="add")])]}, "messages"),
        (
            {"messages": [ChatMessage(role="assistant", tool_calls=[ToolCall(name="add", arguments='{"a')])]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_is_wrong_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        generation_request(GenerateRequest(model="m", **fields))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_unknown_fields_are_refused_at_every_depth() -> None:
    inner = ChatMessage(role="user", content="x")
    inner.MergeFromString(b"\xf8\x3e\x01")
    for message in (GenerateRequest(model="m", messages=[inner]), TokenizeRequest(model="m", messages=[inner])):
        with pytest.raises(ApiError, match=r"ChatMessage has the field number 1007"):
            read(message)


def read(message: GenerateRequest | TokenizeRequest) -> GenerationRequest | object:
    return generation_request(message) if isinstance(message, GenerateRequest) else tokenize_request(message)
