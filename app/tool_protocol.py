"""Tools in a chat request: what may be called, whether it must be, and the calls of earlier answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from app.openai_errors import shortened
from app.request_parsing import must_be

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments, an object."""
    document: dict[str, Any]
    """As the client gave it, for the chat template."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one function that the answer must call."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def read_tools(value: Any) -> tuple[Tool, ...]:
    """`tools` of a request. For a pydantic validator."""
    allowed = (
        f'a list of up to {MAX_TOOLS} objects {{"type": "function", "function": {{"name": ..., "description": ..., '
        '"parameters": <a JSON schema of the type "object">}}'
    )
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise must_be(allowed)
    tools = []
    for position, document in enumerate(value):
        tool = _tool(document)
        if isinstance(tool, str):
            raise must_be(f"{allowed} (item {position} {tool})")
        tools.append(tool)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise must_be(f"{allowed}, each name once ('{twice}' is there twice)")
    return tuple(tools)


def _tool(document: Any) -> Tool | str:
    """The tool, or what is wrong with it."""
    if not isinstance(document, dict) or document.keys() - {"type", "function"} or document.get("type") != "function":
        return "is no function"
    function = document.get("function")
    if not isinstance(function, dict) or function.keys() - _FUNCTION_FIELDS:
        return f"has no function, or one with other fields than {', '.join(sorted(_FUNCTION_FIELDS))}"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return "has no name of 1 to 64 letters, digits, '_' and '-'"
    if not isinstance(function.get("description", ""), str | None):
        return "has a description that is no string"
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    elif not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        return "has parameters that are no JSON schema of the type 'object'"
    return Tool(name, {**parameters, "type": "object"}, document)


def read_tool_choice(value: Any) -> ToolChoice | None:
    """`tool_choice` of a request; None where it is not said. For a pydantic validator."""
    if value is None or value in ("none", "auto", "required"):
        choice: ToolChoice | None = value
        return choice
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return NamedTool(function["name"])
    raise must_be('"none", "auto", "required", or {"type": "function", "function": {"name": ...}}')


def read_tool_calls(value: Any) -> tuple[dict[str, Any], ...]:
    """`tool_calls` of an earlier answer, with their arguments as objects, which is how templates want them. For a
    pydantic validator."""
    allowed = (
        'a list of calls {"id": ..., "type": "function", "function": {"name": ..., "arguments": '
        "<a JSON object, as a string>}}"
    )
    if value is None:
        return ()
    if not isinstance(value, list):
        raise must_be(allowed)
    calls = []
    for position, call in enumerate(value):
        read = _tool_call(call)
        if isinstance(read, str):
            raise must_be(f"{allowed} (call {position} {read})")
        calls.append(read)
    return tuple(calls)


def _tool_call(call: Any) -> dict[str, Any] | str:
    """The call, or what is wrong with it. `index` is what clients keep that gather a call from a stream."""
    if not isinstance(call, dict) or call.keys() - {"id", "type", "function", "index"}:
        return "is no object of that form"
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        return "is not of a function"
    name, arguments = function.get("name"), function.get("arguments")
    if function.keys() != {"name", "arguments"} or not isinstance(name, str) or not isinstance(arguments, str):
        return "has not exactly a name and arguments, both strings"
    try:
        parsed = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return f"has arguments that are no JSON object: a string of {len(arguments)} characters"
    identifier = call.get("id")
    if not isinstance(identifier, str | None):
        return f"has the id {shortened(identifier)}, which is no string"
    named = {} if identifier is None else {"id": identifier}
    return {**named, "type": "function", "function": {"name": name, "arguments": parsed}}
