"""Calls of tools, by a model that is too small to make them by itself: with the official client, over prefill and
decode workers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from tests.openai_app import OpenAIApp

pytestmark = [pytest.mark.cluster, pytest.mark.model]

IN_FLIGHT = 6


def tool(name: str, properties: dict[str, Any], required: list[str], **rest: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **rest}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


TEXT = {"type": "string", "maxLength": 12}
TOOLS = [
    tool("get_weather", {"city": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}, ["city", "unit"]),
    tool("add", {"a": {"type": "integer", "maximum": 999, "minimum": 0}, "b": {"$ref": "#/$defs/n"}}, ["a", "b"],
         **{"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}}),
    tool("remember", {"tags": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}}, ["tags"]),
    tool("book", {"who": {"type": "object", "properties": {"name": TEXT, "vip": {"type": "boolean"}},
                          "required": ["name", "vip"], "additionalProperties": False}}, ["who"]),
    tool("now", {}, []),
]  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTION = "What is the weather in Paris? Use a tool."


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(call: Any) -> str:
    """The name of a call whose arguments are what its function takes."""
    assert call.type == "function"
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return str(call.function.name)


def test_every_tool_by_name_whole_and_streamed(openai_app: OpenAIApp) -> None:
    def both(name: str) -> tuple[str, str]:
        options: dict[str, Any] = {
            "tools": TOOLS,
            "tool_choice": named(name),
            "parallel_tool_calls": False,
            "max_tokens": 120,
            "temperature": 1.0,
            "seed": 3,
        }
        (choice,) = openai_app.chat(QUESTION, **options).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert check(call) == name
        messages: Any = [{"role": "user", "content": QUESTION}]
        with openai_app.client.chat.completions.stream(model=openai_app.model, messages=messages, **options) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert streamed.finish_reason == "tool_calls"
        (streamed_call,) = streamed.message.tool_calls or []
        assert check(streamed_call) == name
        return call.function.arguments, streamed_call.function.arguments

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for whole, streamed in pool.map(both, SCHEMAS):
            assert whole == streamed


def test_some_tool_must_be_called_by_every_choice(openai_app: OpenAIApp) -> None:
    answer = openai_app.chat(
        QUESTION,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        n=4,
        temperature=1.5,
        seed=1,
        max_tokens=120,
    )
    names = []
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        names += [check(call) for call in choice.message.tool_calls]
    assert len(names) == 4
    assert len(set(names)) > 1


def test_a_call_and_its_result_are_gone_on_with(openai_app: OpenAIApp) -> None:
    first = openai_app.chat(QUESTION, tools=TOOLS, tool_choice=named("get_weather"), max_tokens=60)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny."}
    messages = [{"role": "user", "content": QUESTION}, message.model_dump(exclude_none=True), result]
    second = openai_app.chat(messages, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens


def test_a_cut_call_says_so(openai_app: OpenAIApp) -> None:
    (choice,) = openai_app.chat(QUESTION, tools=TOOLS, tool_choice=named("get_weather"), max_tokens=26).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.arguments.startswith('{"city": "')


def test_a_template_without_tools_leaves_no_choice_to_the_model(openai_app: OpenAIApp) -> None:
    with pytest.raises(openai.BadRequestError, match="says nothing of tools") as caught:
        openai_app.chat(QUESTION, tools=TOOLS)
    assert caught.value.param == "tools"
