"""The app that the OpenAI tests share, and OpenAI's own client of it."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.running_app import RunningApp, small_roles

CONTEXT_TOKENS = 4096
"""What the KV pool holds; the model itself was made for twice as many."""
BLOCK_TOKENS = 16

ARGS: dict[str, Any] = {
    "mode": "static",
    "engine": {"dtype": "float32", "block_tokens": BLOCK_TOKENS, "kv_cache_blocks": CONTEXT_TOKENS // BLOCK_TOKENS},
    **small_roles(),
}
"""The default model, prefill and decode apart."""

_EXTRAS = frozenset(
    {
        "add_generation_prompt", "cache_salt", "continue_final_message", "ignore_eos", "include_stop_str_in_output",
        "min_p", "min_tokens", "priority", "repetition_penalty", "skip_special_tokens", "stop_token_ids", "top_k",
    }
)  # fmt: skip
"""Fields that OpenAI's client has no argument for."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class OpenAIApp:
    """A running app and the official client of it. Requests are greedy unless they say otherwise."""

    app: RunningApp
    client: openai.OpenAI
    model: str

    @classmethod
    def of(cls, app: RunningApp, api_key: str = "none") -> OpenAIApp:
        """Over a running app; without retries, so that a test sees the first answer."""
        client = openai.OpenAI(base_url=app.base_url + "/v1", api_key=api_key, max_retries=0, timeout=120.0)
        return cls(app, client, client.models.list().data[0].id)

    def chat(self, messages: str | Messages, **options: Any) -> Any:
        """A ChatCompletion, or with `stream` an iterator of chunks. A string is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.client.chat.completions.create(model=self.model, messages=messages, **_arguments(options))

    def complete(self, prompt: Any, **options: Any) -> Any:
        """A Completion, or with `stream` an iterator of chunks."""
        return self.client.completions.create(model=self.model, prompt=prompt, **_arguments(options))

    def post(self, path: str, body: Mapping[str, Any] | bytes, method: str = "POST") -> RawAnswer:
        """Bytes as they are; a mapping as JSON, with the model filled in."""
        if not isinstance(body, bytes):
            body = json.dumps({"model": self.model, **body}).encode()
        return send(self.app.base_url, method, path, body)


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {"temperature": 0.0, **options}
    extra = {name: arguments.pop(name) for name in _EXTRAS & arguments.keys()}
    return {**arguments, "extra_body": extra} if extra else arguments


@dataclass(frozen=True)
class RawAnswer:
    """An answer over plain HTTP."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def error(self, status: int, code: str | None = None) -> dict[str, Any]:
        """The error of an answer that must be one with this status, checked for OpenAI's form."""
        assert self.status == status, self.body[:500]
        assert self.headers["content-type"].startswith("application/json")
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"]
        assert 0 < len(error["message"]) < 1000
        assert code in (None, error["code"])
        return error


def send(
    base_url: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> RawAnswer:
    """One HTTP request, read to its end."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        read = answer.read()
        return RawAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, read)
    finally:
        connection.close()


def fresh_salt() -> str:
    """A `cache_salt` under which nothing is cached yet."""
    return uuid.uuid4().hex


def text_of(answer: ChatCompletion | Completion) -> str:
    """The text of an answer's only choice."""
    (choice,) = answer.choices
    return (choice.message.content or "") if isinstance(answer, ChatCompletion) else choice.text


def cached_tokens(answer: ChatCompletion | Completion) -> int:
    """`usage.prompt_tokens_details.cached_tokens`"""
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return cached
