"""A prompt as token ids, and the room it leaves for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.completion_protocol import Prompt
from app.openai_errors import context_length_exceeded, invalid_request, shortened
from app.openai_protocol import GenerationRequest


def encode_prompt(tokenizer: Any, prompt: Prompt, *, vocab_size: int) -> tuple[int, ...]:
    """The token ids of one completion prompt. Text gets the tokenizer's special tokens (BOS), as in transformers; token
    ids are taken as they are. `vocab_size` is the model's. Raises ApiError 400 for ids outside the vocabulary and for
    text that the tokenizer turns to nothing."""
    if isinstance(prompt, str):
        token_ids = tuple(tokenizer.encode(prompt))
        if not token_ids:
            raise invalid_request(
                "The tokenizer turns 'prompt' to no tokens at all. It must not be empty.", param="prompt"
            )
        return token_ids
    check_token_ids(prompt, vocab_size=vocab_size, param="prompt")
    return prompt


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Raises ApiError 400 where ids, of which there must be some, are outside the vocabulary."""
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < vocab_size:
            raise invalid_request(
                f"Invalid value for '{param}': token id {shortened(worst)}. It must be from 0 to {vocab_size - 1}.",
                param=param,
            )


def answer_tokens(
    request: GenerationRequest, *, prompt_tokens: int, context_tokens: int, default_tokens: int | None = None
) -> int:
    """How many tokens the answer may have: what the request asks for; else `default_tokens` (None: as many as fit), cut
    to the room that the prompt leaves in the context.

    Raises ApiError 400 (`context_length_exceeded`) when prompt and answer do not fit.
    """
    room = context_tokens - prompt_tokens
    asked = request.max_new_tokens
    if room < (1 if asked is None else asked):
        raise context_length_exceeded(
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens,
            answer_tokens=1 if asked is None else asked,
            param="messages" if "messages" in type(request).model_fields else "prompt",
        )
    if asked is not None:
        return asked
    return room if default_tokens is None else min(room, default_tokens)
