"""gRPC requests as the requests that HTTP knows, so that both are held to the same rules by the same code.

A message becomes the JSON document that a client would have sent over HTTP; what is wrong with it is then said in the
same words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.grpc_api.inference_pb2 import (
    GenerateRequest,
    StructuredOutput,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
)
from app.openai_errors import invalid_request, request_too_large
from app.openai_protocol import GenerationRequest
from app.request_body import MAX_BODY_BYTES
from app.request_parsing import validate_request
from app.tokenize_protocol import TokenizeBody

_PROMPTS = ("prompt", "prompt_token_ids", "messages")


def generation_request(message: GenerateRequest) -> GenerationRequest:
    """A chat where there are messages, else a completion. Raises ApiError 400 for whatever is wrong with it, 413
    when it is longer than an HTTP request's body may be."""
    _check_size(message)
    document = _document(message)
    _check_one_prompt(document)
    if "messages" in document:
        if "logprobs" in document:
            document["top_logprobs"], document["logprobs"] = document["logprobs"], True
        return validate_request(document, ChatCompletionRequest)
    if "prompt_token_ids" in document:
        document["prompt"] = document.pop("prompt_token_ids")
    return validate_request(document, CompletionRequest)


def tokenize_request(message: TokenizeRequest) -> TokenizeBody:
    """Raises ApiError 400 for whatever is wrong with it, 413 when it is too long."""
    _check_size(message)
    document = _document(message)
    _check_one_prompt(document)
    return validate_request(document, TokenizeBody)


def _check_size(message: Message) -> None:
    if message.ByteSize() > MAX_BODY_BYTES:
        raise request_too_large(MAX_BODY_BYTES)


def _check_one_prompt(document: dict[str, Any]) -> None:
    given = [name for name in _PROMPTS if name in document]
    if len(given) != 1:
        raise invalid_request(
            f"{' and '.join(given) if given else 'None'} of {', '.join(_PROMPTS)} are set. Set exactly one of them.",
            param=given[-1] if given else _PROMPTS[0],
        )


def _document(message: Message) -> dict[str, Any]:
    """What is set in a message, as JSON has it. Raises ApiError 400 for fields of a later version of the service: they
    might change the answer."""
    unknown = [field.field_number for field in UnknownFieldSet(message)]
    if unknown:
        raise invalid_request(
            f"{message.DESCRIPTOR.name} has the field number {unknown[0]}, which this server does not know. Leave it "
            "out, or use the inference.proto of the server's version.",
            code="unknown_parameter",
        )
    given = {field.name: value for field, value in message.ListFields()}
    # Fields that are not optional have a value always, and are not listed when that is the empty one.
    required = (field for field in message.DESCRIPTOR.fields if not (field.has_presence or field.is_repeated))
    given |= {field.name: getattr(message, field.name) for field in required}
    return {name: _value(value) for name, value in given.items()}


def _rule(message: StructuredOutput) -> dict[str, Any]:
    """As vLLM's `structured_outputs`. Raises ApiError 400."""
    document = _document(message)
    if "choice" in document:
        document["choice"] = document["choice"].get("choices", [])
    if "json" in document:
        document["json"] = _json_schema(document["json"], "structured_outputs")
    return document


def _tool(message: Tool) -> dict[str, Any]:
    """As OpenAI's. Raises ApiError 400."""
    function = _document(message)
    if "parameters" in function:
        function["parameters"] = _json_schema(function["parameters"], "tools")
    return {"type": "function", "function": function}


def _tool_choice(message: ToolChoice) -> dict[str, Any] | str:
    """As OpenAI's: a word, or a function's name in an object. Raises ApiError 400."""
    document = _document(message)
    if "function" in document:
        return {"type": "function", "function": {"name": document["function"]}}
    return str(document.get("mode", ""))


def _tool_call(message: ToolCall) -> dict[str, Any]:
    """As OpenAI's. Raises ApiError 400."""
    document = _document(message)
    named = {"id": document["id"]} if document["id"] else {}
    function = {name: document[name] for name in ("name", "arguments")}
    return {**named, "type": "function", "function": function}


def _json_schema(text: str, param: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_request(
            f"The JSON schema is not valid JSON: {error}.", param=param, code="invalid_json"
        ) from None


_OF_THEIR_OWN: dict[type[Message], Callable[[Any], Any]] = {
    StructuredOutput: _rule,
    Tool: _tool,
    ToolChoice: _tool_choice,
    ToolCall: _tool_call,
}
"""Messages whose form over HTTP is another one."""


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        read = _OF_THEIR_OWN.get(type(value))
        return _document(value) if read is None else read(value)
    if isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "items"):  # a map; JSON's keys are strings
        return {str(key): item for key, item in value.items()}
    return [_value(item) for item in value]
