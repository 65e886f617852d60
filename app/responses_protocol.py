"""The request of `POST /v1/responses`: a chat in other words. Text in, text out; nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from app.chat_protocol import PART_SEPARATOR, ChatCompletionRequest
from app.key_limits import MAX_PRIORITY
from app.openai_protocol import MAX_COUNT, PRIORITY_ALLOWED, sifted
from app.request_parsing import must_be
from app.structured_output import response_format_grammar

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text")


def _input(value: Any) -> tuple[dict[str, str], ...]:
    """As messages of a chat."""
    allowed = (
        'a string, or a list of messages {"role": "user", "content": <a string, or a list of parts '
        '{"type": "input_text", "text": "..."}>}'
    )
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise must_be(allowed)
    messages = []
    for position, item in enumerate(value):
        content = _content(item)
        if content is None:
            raise must_be(f"{allowed} (item {position} is none; only texts are supported)")
        messages.append({"role": str(item["role"]), "content": content})
    return tuple(messages)


def _content(item: Any) -> str | None:
    """The text of a message, which may be an answer's as it came; None: it is no message, or has more than text."""
    if not isinstance(item, dict) or item.get("type", "message") != "message" or item.get("role") not in _ROLES:
        return None
    content = item.get("content")
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return PART_SEPARATOR.join(texts) if texts else None


def _format(value: Any) -> dict[str, Any] | None:
    """`text` as the `response_format` of a chat."""
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or value.keys() - {"format", "verbosity"}
        or value.get("verbosity") not in (None, "medium")
    ):
        raise must_be('an object {"format": ...}')
    form = value.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    response_format_grammar(form)
    return form


class ResponsesRequest(BaseModel):
    """What is not here is refused, or has no effect, as in chats."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    _harmless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "parallel_tool_calls": (None, True, False),
        "previous_response_id": (None,),
        "prompt": (None,),
        "reasoning": (None,),
        "stream_options": (None,),
        "tool_choice": (None, "auto", "none"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    model: str = Field(min_length=1, description="the name of a served model, see GET /v1/models")
    input: Annotated[tuple[dict[str, str], ...], PlainValidator(_input)] = Field(
        description="a string or a list of messages"
    )
    instructions: str | None = Field(None, description="a string")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="a whole number of at least 1")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="a number above 0 and not above 1")
    stream: bool | None = Field(None, description="true or false")
    text: Annotated[dict[str, Any] | None, PlainValidator(_format)] = None
    """As the `response_format` of a chat."""
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=PRIORITY_ALLOWED)

    @model_validator(mode="before")
    @classmethod
    def _sift_fields(cls, data: Any) -> Any:
        return sifted(data, cls.model_fields.keys(), cls._harmless) if isinstance(data, dict) else data

    def as_chat(self) -> ChatCompletionRequest:
        """The chat that it is."""
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return ChatCompletionRequest.model_validate(
            {
                "model": self.model,
                "messages": [*told, *self.input],
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "stream": self.stream,
                "response_format": self.text,
                "priority": self.priority,
            }
        )
