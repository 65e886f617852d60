"""Whole (not streamed) answers, usage and the list of models, as OpenAI clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]
"""`tool_calls` takes the place of `stop` in a chat's answer that calls tools. An answer that ended otherwise (abort,
error) is an error, never a 200 with a reason of its own."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer repeat. `created` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """Tokens of the whole request: its prompts once each (not once per choice), its answers all together.
    `cached_tokens` are those of the prompt whose KV was found in a cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_choice(
    index: int,
    text: str,
    finish_reason: FinishReason,
    logprobs: dict[str, Any] | None = None,
    tool_calls: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """An answer that only calls has no content."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if tool_calls:
        message |= {"content": text or None, "tool_calls": list(tool_calls)}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def text_choice(
    index: int, text: str, finish_reason: FinishReason, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`index` counts over all choices of all prompts: prompt * n + choice."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_completion(head: AnswerHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {**head.fields("chat.completion"), "choices": list(choices), "usage": usage}


def text_completion(head: AnswerHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {**head.fields("text_completion"), "choices": list(choices), "usage": usage}


def model_entry(model: str, *, created: int, context_tokens: int) -> dict[str, Any]:
    """One served model. `max_model_len` is vLLM's name for the context length."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "equipoise",
        "max_model_len": context_tokens,
    }


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}
