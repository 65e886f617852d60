"""The requests of `POST /tokenize` and `POST /detokenize`, with the least of vLLM's fields, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from app.chat_protocol import ChatMessage
from app.openai_errors import invalid_request, shortened
from app.request_parsing import must_be

MAX_TOKEN_IDS = 1 << 20


class TokenizeBody(BaseModel):
    """A prompt, or messages for the chat template."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}}},
            ]
        },
    )

    model: str = Field(min_length=1, description="the name of a served model, see GET /v1/models")
    prompt: str | None = Field(None, min_length=1, description="a string that is not empty")
    messages: list[ChatMessage] | None = Field(None, min_length=1, description="a list of at least one message")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid_request("Give either 'prompt' or 'messages', and not both.", param="prompt")
        return self


_TokenIdsInput = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKEN_IDS)]
"""For the API's description."""


def _token_ids(value: Any) -> tuple[int, ...]:
    allowed = f"a list of at most {MAX_TOKEN_IDS} token ids"
    if not isinstance(value, list) or len(value) > MAX_TOKEN_IDS or any(type(item) is not int for item in value):
        raise must_be(allowed)
    if value and min(value) < 0:
        raise must_be(f"{allowed} (given {shortened(min(value))})")
    return tuple(value)


class DetokenizeBody(BaseModel):
    """Token ids to be turned to text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="the name of a served model, see GET /v1/models")
    tokens: Annotated[tuple[int, ...], PlainValidator(_token_ids, json_schema_input_type=_TokenIdsInput)] = Field(
        description=f"a list of at most {MAX_TOKEN_IDS} token ids"
    )


def tokenized(token_ids: Sequence[int], *, context_tokens: int) -> dict[str, Any]:
    """vLLM's answer to /tokenize, without `token_strs`."""
    return {"tokens": list(token_ids), "count": len(token_ids), "max_model_len": context_tokens}
