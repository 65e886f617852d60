"""The request of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from app.openai_errors import invalid_request, shortened
from app.openai_protocol import MAX_COUNT, MAX_LOGPROBS, GenerationRequest
from app.request_parsing import must_be
from app.tool_protocol import NamedTool, Tool, ToolChoice, read_tool_calls, read_tool_choice, read_tools

PART_SEPARATOR = "\n"
"""Between the text parts of one message, as vLLM joins them."""


_TextPart = Annotated[
    dict[str, str],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
    ),
]
_ContentInput = str | Annotated[list[_TextPart], Field(min_length=1)]
"""For the API's description."""


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise must_be('a string, or a list of text parts: {"type": "text", "text": "..."}')
    return PART_SEPARATOR.join(_text_of_part(position, part) for position, part in enumerate(value))


def _text_of_part(position: int, part: Any) -> str:
    form = '{"type": "text", "text": "..."}'
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise must_be(f"a string, or a list of parts {form} (part {position} has no type)")
    if kind != "text":
        raise must_be(f"a string, or a list of text parts {form} (part {position} is {shortened(kind)}, not supported)")
    text = part.get("text")
    if not isinstance(text, str) or part.keys() != {"type", "text"}:
        raise must_be(f"a string, or a list of text parts that are just {form} (part {position} is not)")
    return text


class ChatMessage(BaseModel):
    """One message. What an assistant's message of an earlier answer carries beside its text and calls is accepted when
    empty, so that a client can send an answer back as it came."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="'system', 'developer', 'user', 'assistant' or 'tool'"
    )
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=_ContentInput)] = Field(
        description="a string or a list of text parts"
    )
    name: str | None = Field(None, description="a string")
    tool_call_id: str | None = Field(None, description="a string")
    reasoning_content: str | None = Field(None, description="a string")
    refusal: None = Field(None, description="null: refusals are not supported yet")
    audio: None = Field(None, description="null: audio is not supported yet")
    function_call: None = Field(None, description="null: function calls are not supported yet")
    tool_calls: Annotated[tuple[dict[str, Any], ...], PlainValidator(read_tool_calls)] = ()
    annotations: list[Any] | None = Field(None, description="a list; it has no effect")

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_text(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("tool_calls") and data.get("content") is None:
            return {**data, "content": ""}
        return data

    @model_validator(mode="after")
    def _only_answers_have_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid_request(
                f"A message of the role '{self.role}' has 'tool_calls', which are an assistant's.", param="messages"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        given = {name: value for name, value in optional.items() if value is not None}
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": self.role, "content": self.content, **given, **calls}


class ChatCompletionRequest(GenerationRequest):
    """See `GenerationRequest` for the common fields."""

    _harmless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: list[ChatMessage] = Field(min_length=1, description="a list of at least one message")
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="a whole number of at least 1")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="a whole number of at least 1")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}"
    )

    add_generation_prompt: bool | None = Field(None, description="true (the default) or false")
    continue_final_message: bool | None = Field(None, description="true or false")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object of variables for the chat template"
    )
    tools: Annotated[tuple[Tool, ...], PlainValidator(read_tools)] = ()
    tool_choice: Annotated[ToolChoice | None, PlainValidator(read_tool_choice)] = None
    parallel_tool_calls: bool | None = Field(None, description="true (the default) or false")

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid_request(
                f"'max_tokens' is {self.max_tokens} and 'max_completion_tokens' is {self.max_completion_tokens}. They "
                "mean the same here: give one, or the same number.",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_request("'top_logprobs' is only allowed with 'logprobs': true.", param="top_logprobs")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid_request(
                    "'continue_final_message' and 'add_generation_prompt' cannot both be true: the model either goes "
                    "on with the last message or begins one.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise invalid_request(
                    "'continue_final_message' needs a last message of the role 'assistant', not "
                    f"'{self.messages[-1].role}'.",
                    param="continue_final_message",
                )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if not self.tools:
            if self.tool_choice not in (None, "none"):
                raise invalid_request("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
            return self
        if not self.callable_tools:
            if isinstance(self.tool_choice, NamedTool):
                raise invalid_request(
                    f"'tool_choice' names {shortened(self.tool_choice.name)}, which is none of the 'tools'.",
                    param="tool_choice",
                )
            return self
        if self.grammar is not None:
            raise invalid_request(
                "'tools' do not go with 'response_format' or 'structured_outputs': an answer is held to one thing. Set "
                "'tool_choice' to \"none\" where none is to be called.",
                param="tools",
            )
        if self.min_tokens:
            raise invalid_request(
                f"'min_tokens' is {self.min_tokens}, but an answer ends where its calls do. Leave it out.",
                param="min_tokens",
            )
        if self.continue_final_message:
            raise invalid_request(
                "'continue_final_message' does not go with 'tools': a call cannot be gone on with.",
                param="continue_final_message",
            )
        return self

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, NamedTool):
            return tuple(tool for tool in self.tools if tool.name == self.tool_choice.name)
        return self.tools

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def begins_answer(self) -> bool:
        """Whether the template is to open the assistant's turn."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def top_logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
