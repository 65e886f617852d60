"""Completions over connections of their own, which can be left at any point, as clients do that go away."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LIMIT_S = 120.0
SERVED = "tested"
"""The `served_model_name` of apps that are asked this way."""


@dataclass
class Answered:
    """What came back. `tokens` are the API's names of single tokens, which no two tokens share."""

    status: int
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Asked:
    """One request to /v1/completions, sent when this is made. Greedy and to the last token, unless told otherwise."""

    def __init__(
        self, base_url: str, prompt: Sequence[int], max_tokens: int, *, stream: bool = True, **options: Any
    ) -> None:
        body = {
            "model": SERVED, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "stream": stream, **options,
        }  # fmt: skip
        if stream:
            body["stream_options"] = {"include_usage": True}
        self._connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=LIMIT_S)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        # Kept apart: the connection forgets its socket when the answer is the last one on it.
        self._socket: socket.socket = self._connection.sock
        self._is_stream = stream
        self._response: http.client.HTTPResponse | None = None

    def leave(self) -> None:
        """Closes the connection at once, whatever is under way."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """A stream's events from where the last iteration stopped."""
        response = self._begun()
        assert response.status == 200, response.read()
        while line := response.readline():
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))

    def wait_tokens(self, count: int) -> list[str]:
        """The first tokens of a stream, at least so many; more may have come by the same event."""
        tokens: list[str] = []
        for event in self.events():
            tokens += _tokens(event)
            if len(tokens) >= count:
                break
        return tokens

    def answer(self) -> Answered:
        """The whole answer, or what of a stream is left."""
        response = self._begun()
        answered = Answered(response.status)
        if self._is_stream and response.status == 200:
            for event in self.events():
                _add(answered, event)
        else:
            _add(answered, json.load(response))
        self._connection.close()
        return answered

    def _begun(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response


def ask(base_url: str, prompt: Sequence[int], max_tokens: int, *, stream: bool = True, **options: Any) -> Answered:
    """Asks and waits for the whole answer."""
    return Asked(base_url, prompt, max_tokens, stream=stream, **options).answer()


def _add(answered: Answered, event: dict[str, Any]) -> None:
    answered.error = event.get("error", answered.error)
    answered.usage = event.get("usage") or answered.usage
    answered.tokens += _tokens(event)
    for choice in event.get("choices", []):
        answered.finish_reason = choice["finish_reason"] or answered.finish_reason


def _tokens(event: dict[str, Any]) -> list[str]:
    return [token for choice in event.get("choices", []) for token in (choice["logprobs"] or {"tokens": []})["tokens"]]
