"""The request of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from app.openai_errors import invalid_request, shortened
from app.openai_protocol import MAX_COUNT, MAX_LOGPROBS, GenerationRequest
from app.request_parsing import must_be

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
MAX_PROMPTS = 64
MAX_SEQUENCES = 256
"""Prompts times `n`: what one request may start."""

Prompt = str | tuple[int, ...]
"""Text, or token ids (not negative; whether they are in the vocabulary is checked with the vocabulary at hand)."""


_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Many = Field(min_length=1, max_length=MAX_PROMPTS)
_PromptInput = _Text | _TokenIds | Annotated[list[_Text], _Many] | Annotated[list[_TokenIds], _Many]
"""For the API's description."""


def _prompts(value: Any) -> tuple[Prompt, ...]:
    allowed = f"a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these, none of them empty"
    if isinstance(value, str) or _are_token_ids(value):
        value = [value]
    if not isinstance(value, list):
        raise must_be(allowed)
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise must_be(f"{allowed} (given {len(value)})")
    prompts: list[Prompt] = []
    for position, prompt in enumerate(value):
        if prompt in ("", []):
            raise must_be(f"{allowed} (item {position} is empty)")
        if not (isinstance(prompt, str) or _are_token_ids(prompt)):
            raise must_be(f"{allowed} (item {position} is neither)")
        if isinstance(prompt, list) and min(prompt) < 0:
            raise must_be(f"{allowed} (item {position} has the negative token id {shortened(min(prompt))})")
        prompts.append(tuple(prompt) if isinstance(prompt, list) else prompt)
    return tuple(prompts)


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class CompletionRequest(GenerationRequest):
    """See `GenerationRequest` for the common fields."""

    _harmless: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": (None, "")}

    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(_prompts, json_schema_input_type=_PromptInput),
    ] = Field(description=f"a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="a whole number of at least 1, or 0 together with 'echo'"
    )
    best_of: int | None = Field(None, description="a whole number, the same as 'n'")
    echo: bool | None = Field(None, description="true or false")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}")

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            message = (
                f"'best_of' other than 'n' ({self.choices}) is not supported: every choice is returned. Leave it out."
            )
            raise invalid_request(message, param="best_of", code="unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            message = "'max_tokens' is 0, which is only allowed with 'echo': true. It must be at least 1."
            raise invalid_request(message, param="max_tokens")
        if self.prompt_logprobs is not None and self.echo and self.logprobs not in (None, self.prompt_logprobs):
            message = (
                f"'prompt_logprobs' is {self.prompt_logprobs} and 'logprobs' is {self.logprobs}, which with 'echo' is "
                "for the prompt too. Give the same number."
            )
            raise invalid_request(message, param="prompt_logprobs")
        if len(self.prompt) * self.choices > MAX_SEQUENCES:
            message = (
                f"{len(self.prompt)} prompts with 'n' {self.choices} make {len(self.prompt) * self.choices} sequences; "
                f"at most {MAX_SEQUENCES} are allowed in one request. Send several requests."
            )
            raise invalid_request(message, param="n")
        return self

    @property
    def top_logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
