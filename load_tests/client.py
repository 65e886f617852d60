"""Sends one streaming request to an OpenAI-compatible server and writes down when everything happened.

Whatever goes wrong with a request (no connection, an HTTP error, an error event in the stream, a stream that just
stops, a timeout) is the outcome of that request, in its record; it never stops the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import aiohttp

from load_tests.driver import clock_s
from load_tests.request_record import RequestRecord
from load_tests.sse import EventStreamDecoder, ServerSentEvent
from load_tests.workloads import PlannedRequest

Api = Literal["completions", "chat"]

_PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_ERROR_CHARACTERS = 300


class StreamError(Exception):
    """The server's answer is not a complete stream of tokens; the message says what it was."""


@dataclass(frozen=True, slots=True)
class AbortPoint:
    """When a client gives up by closing the connection: so long after sending, or on so many chunks of output."""

    after_s: float | None = None
    after_chunks: int | None = None


class CompletionClient:
    """A client for one server, one model and one endpoint. Use it as an async context manager.

    Sampling is greedy and end-of-sequence is ignored (`ignore_eos`, which vLLM, SGLang and Equipoise know), so that
    every answer has the length that was asked for. `extra` is merged into each request's body and may override that.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: Api = "completions",
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = base_url.rstrip("/") + _PATHS[api]
        self._model = model
        self._api = api
        self._extra = dict(extra or {})
        self._timeout_s = timeout_s
        self._headers = {"Accept": "text/event-stream", "Content-Type": "application/json", **_authorization(api_key)}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # No cap on connections: the arrival plan alone says how many requests are in flight.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def encode(self, request: PlannedRequest) -> bytes:
        """The body to send. Made before the run, so that encoding makes no request late."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._api == "completions":
            body["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise ValueError("the chat endpoint takes no token ids; draw the prompts as text (--prompt text)")
        return json.dumps(body | self._extra).encode()

    async def send(
        self, body: bytes, *, wanted_output_tokens: int, scheduled_s: float, abort: AbortPoint | None = None
    ) -> RequestRecord:
        """Sends an encoded request now and reads the answer to its end, to `abort`, or to the timeout."""
        if self._session is None:
            raise RuntimeError("the client is not open; use `async with CompletionClient(...) as client`")
        give_up_s = None if abort is None else abort.after_s
        limit_s = self._timeout_s if give_up_s is None else min(self._timeout_s, give_up_s)
        record = RequestRecord(scheduled_s=scheduled_s, wanted_output_tokens=wanted_output_tokens)
        record.sent_s = clock_s()
        try:
            async with asyncio.timeout(limit_s), self._session.post(self._url, data=body) as response:
                await _read(response, record, None if abort is None else abort.after_chunks)
        except TimeoutError:
            if limit_s == give_up_s:
                record.aborted = True
            else:
                record.error = f"timed out after {limit_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, StreamError) as error:
            record.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        record.ended_s = clock_s()
        return record


async def first_model(base_url: str, api_key: str | None = None, timeout_s: float = 30.0) -> str:
    """The first model that the server lists. Raises ConnectionError when it cannot be had."""
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with (
            aiohttp.ClientSession(
                headers=_authorization(api_key), timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as session,
            session.get(url, raise_for_status=True) as response,
        ):
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConnectionError(
            f"GET {url} named no model ({type(error).__name__}: {error}); start the server first or name the model"
        ) from error


def _authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def _read(response: aiohttp.ClientResponse, record: RequestRecord, abort_after_chunks: int | None) -> None:
    if response.status != 200:
        text = await response.text(errors="replace")
        raise StreamError(f"HTTP {response.status}: {text[:_ERROR_CHARACTERS]}")
    stream = _AnswerStream(record)
    decoder = EventStreamDecoder()
    async for data in response.content.iter_any():
        now_s = clock_s()
        for event in decoder.feed(data):
            stream.take(event, now_s)
            if abort_after_chunks is not None and len(record.chunk_s) >= abort_after_chunks:
                record.aborted = True
                response.close()
                return
    for event in decoder.finish():
        stream.take(event, clock_s())
    stream.finish()


class _AnswerStream:
    """Turns the events of one answer into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._done = False
        self._empty_end_s: float | None = None

    def take(self, event: ServerSentEvent, now_s: float) -> None:
        if event.data == "[DONE]":
            self._done = True
            return
        message = json.loads(event.data)
        if not isinstance(message, dict):
            raise StreamError(f"an event is no JSON object: {event.data[:_ERROR_CHARACTERS]}")
        if event.event == "error" or message.get("error") is not None:
            raise StreamError(f"error event: {json.dumps(message.get('error', message))}")
        choices, usage = message.get("choices") or [], message.get("usage") or {}
        if not (isinstance(usage, dict) and isinstance(choices, list) and all(isinstance(c, dict) for c in choices)):
            raise StreamError(f"an event is no completion chunk: {event.data[:_ERROR_CHARACTERS]}")
        for choice in choices:
            self._take_choice(choice, now_s)
        self._take_usage(usage)

    def finish(self) -> None:
        """To be called at the end of the stream. Raises StreamError when it ended too early."""
        if not self._done and self._record.finish_reason is None:
            raise StreamError(f"the stream ended after {len(self._record.chunk_s)} chunks, without [DONE]")
        if not self._record.chunk_s and self._empty_end_s is not None and (self._record.output_tokens or 0) > 0:
            # All of the output was invisible (part of a character, say) and came with the end.
            self._record.chunk_s.append(self._empty_end_s)
        if not self._record.chunk_s:
            raise StreamError("the stream carried no output")

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        finish_reason = choice.get("finish_reason")
        if finish_reason is not None:
            self._record.finish_reason = str(finish_reason)
        self._record.tokens += (choice.get("logprobs") or {}).get("tokens") or ()
        if _carries_output(choice):
            self._record.chunk_s.append(now_s)
        elif finish_reason is not None:
            self._empty_end_s = now_s

    def _take_usage(self, usage: dict[str, Any]) -> None:
        if "completion_tokens" in usage:
            self._record.output_tokens = usage["completion_tokens"]
        if "prompt_tokens" in usage:
            self._record.prompt_tokens = usage["prompt_tokens"]
        self._record.cached_prompt_tokens = (usage.get("prompt_tokens_details") or {}).get(
            "cached_tokens", self._record.cached_prompt_tokens
        )


def _carries_output(choice: dict[str, Any]) -> bool:
    """Whether a choice brings a token, visible or not.

    A completion chunk does, even with an empty text (a token may be part of a character), unless it only announces
    the end. A chat chunk does when its delta has any text or tool call: the first one, which only names the role, and
    the last one do not.
    """
    if choice.get("token_ids"):
        return True
    if "delta" in choice:
        delta = choice["delta"] or {}
        return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text")) or choice.get("finish_reason") is None
