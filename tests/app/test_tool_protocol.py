"""Tools in chat requests, and calls in the messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.chat_protocol import ChatCompletionRequest
from app.request_parsing import validate_request

Refused = Callable[[bytes, type[ChatCompletionRequest]], dict[str, Any]]
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chat(**changes: Any) -> ChatCompletionRequest:
    return validate_request({**GOOD, **changes}, ChatCompletionRequest)


def callable_names(request: ChatCompletionRequest) -> list[str]:
    return [tool.name for tool in request.callable_tools]


def test_which_tools_may_be_called() -> None:
    tools = [tool("add"), tool("sub")]
    named = {"type": "function", "function": {"name": "sub"}}
    assert callable_names(chat(tools=tools)) == ["add", "sub"]
    assert callable_names(chat(tools=tools, tool_choice=None)) == ["add", "sub"]
    assert callable_names(chat(tools=tools, tool_choice="auto")) == ["add", "sub"]
    assert callable_names(chat(tools=tools, tool_choice="required")) == ["add", "sub"]
    assert callable_names(chat(tools=tools, tool_choice=named)) == ["sub"]
    assert callable_names(chat(tools=tools, tool_choice="none")) == []
    assert callable_names(chat(tools=[], tool_choice="none")) == []
    assert callable_names(chat(tools=None)) == []


def test_a_tool_without_parameters_takes_none() -> None:
    (given,) = chat(tools=[tool(description="adds")]).tools
    assert given.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert given.document == tool(description="adds")


def test_a_format_may_stand_beside_tools_that_are_not_called() -> None:
    request = chat(tools=[tool()], tool_choice="none", response_format={"type": "json_object"}, min_tokens=None)
    assert request.grammar is not None


BAD = [
    ({"tools": {}}, "tools", "a list of up to 128 objects"),
    ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools", "up to 128"),
    ({"tools": ["add"]}, "tools", "(item 0 is no function)"),
    ({"tools": [{**tool(), "type": "code_interpreter"}]}, "tools", "(item 0 is no function)"),
    ({"tools": [tool(), {"type": "function"}]}, "tools", "(item 1 has no function"),
    ({"tools": [tool(schema={})]}, "tools", "other fields than description, name, parameters, strict"),
    ({"tools": [tool("")]}, "tools", "no name of 1 to 64"),
    ({"tools": [tool("a b")]}, "tools", "no name of 1 to 64"),
    ({"tools": [tool("a" * 65)]}, "tools", "no name of 1 to 64"),
    ({"tools": [tool(description=5)]}, "tools", "a description that is no string"),
    ({"tools": [tool(parameters="x")]}, "tools", "no JSON schema of the type 'object'"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools", "no JSON schema of the type 'object'"),
    ({"tools": [tool(), tool()]}, "tools", "('add' is there twice)"),
    ({"tools": [tool()], "tool_choice": "add"}, "tool_choice", "'add'. It must be \"none\""),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice", "It must be"),
    ({"tools": [tool()], "tool_choice": tool("add", strict=True)}, "tool_choice", "It must be"),
    ({"tools": [tool()], "tool_choice": tool("sub")}, "tool_choice", "names 'sub', which is none of the 'tools'"),
    ({"tool_choice": "auto"}, "tool_choice", "only allowed with 'tools'"),
    ({"tool_choice": tool("add"), "tools": []}, "tool_choice", "only allowed with 'tools'"),
    ({"tools": [tool()], "response_format": {"type": "json_object"}}, "tools", "do not go with"),
    ({"tools": [tool()], "min_tokens": 3}, "min_tokens", "ends where its calls do"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true (the default) or false"),
]


@pytest.mark.parametrize(("changes", "param", "said"), BAD)
def test_bad_tools(refused: Refused, changes: dict[str, Any], param: str, said: str) -> None:
    error = refused(json.dumps({**GOOD, **changes}).encode(), ChatCompletionRequest)
    assert error["param"] == param
    assert said in error["message"]


def test_calls_of_an_earlier_answer_are_objects_for_the_template() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}
    result = {"role": "tool", "content": "5", "tool_call_id": "call_1"}
    request = chat(messages=[*GOOD["messages"], answer, result])
    assert [message.for_template() for message in request.messages[1:]] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            ],
        },
        result,
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("add", "(call 0 is no object of that form)"),
        ({**CALL, "x": 1}, "(call 0 is no object of that form)"),
        ({**CALL, "type": "custom"}, "(call 0 is not of a function)"),
        ({**CALL, "id": 5}, "which is no string"),
        ({**CALL, "function": {"name": "add"}}, "(call 0 has not exactly a name and arguments"),
        ({**CALL, "function": {"name": "add", "arguments": {"a": 1}}}, "both strings"),
        ({**CALL, "function": {"name": "add", "arguments": '{"a": '}}, "no JSON object: a string of 6 characters"),
        ({**CALL, "function": {"name": "add", "arguments": "[1]"}}, "no JSON object"),
    ],
)
def test_bad_calls(refused: Refused, call: Any, said: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [call]}]
    error = refused(json.dumps({**GOOD, "messages": messages}).encode(), ChatCompletionRequest)
    assert error["param"] == "messages[0].tool_calls"
    assert said in error["message"]


def test_only_an_assistant_calls(refused: Refused) -> None:
    messages = [{"role": "user", "content": "x", "tool_calls": [CALL]}]
    error = refused(json.dumps({**GOOD, "messages": messages}).encode(), ChatCompletionRequest)
    assert "which are an assistant's" in error["message"]
