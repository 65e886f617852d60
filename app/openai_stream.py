"""Server-sent events of a streamed answer.

A chunk is sent for every token, so it costs no more than its own text: all that a request's chunks share is serialised
once, and only the text (and log-probabilities) of each goes through the JSON encoder. The output is ASCII with JSON
escapes, because some clients split lines at U+2028 or U+0085, which JSON would allow inside a string.
"""

from __future__ import annotations

import json
from typing import Any

from app.openai_responses import AnswerHead, FinishReason
from app.tool_call_parser import ToolCallDelta

DONE = b"data: [DONE]\n\n"
"""Ends a stream that succeeded."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class _Stream:
    def __init__(self, head: AnswerHead, kind: str, *, includes_usage: bool) -> None:
        shared = _encode(head.fields(kind))[:-1]
        # As OpenAI does: with usage asked for, every chunk has the field, and it is null but for the last.
        self._end = ',"usage":null}\n\n' if includes_usage else "}\n\n"
        self._shared = f"data: {shared}"
        self._openings: dict[tuple[int, str], str] = {}

    def _opening(self, index: int, rest: str) -> str:
        known = self._openings.get((index, rest))
        if known is None:
            known = self._openings[index, rest] = f'{self._shared},"choices":[{{"index":{index},{rest}'
        return known

    def _closing(self, finish_reason: FinishReason | None, logprobs: dict[str, Any] | None) -> str:
        if finish_reason not in (None, "stop", "length", "tool_calls"):
            raise ValueError(f"{finish_reason!r} is no way for an answer to finish: send an error instead.")
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        values = "null" if logprobs is None else _encode(logprobs)
        return f',"logprobs":{values},"finish_reason":{reason}}}]{self._end}'

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk before `DONE` when the request asked for usage: no choices."""
        return f'{self._shared},"choices":[],"usage":{_encode(usage)}}}\n\n'.encode()


class ChatStream(_Stream):
    """Chunks of one chat answer. For each choice: `begin`, any number of `text` and `tool_call`, `end`."""

    def __init__(self, head: AnswerHead, *, includes_usage: bool = False) -> None:
        super().__init__(head, "chat.completion.chunk", includes_usage=includes_usage)

    def begin(self, index: int) -> bytes:
        opening = self._opening(index, '"delta":{"role":"assistant","content":"","refusal":null}')
        return f"{opening}{self._closing(None, None)}".encode()

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        opening = self._opening(index, '"delta":{"content":')
        return f"{opening}{_encode(text)}}}{self._closing(None, logprobs)}".encode()

    def tool_call(self, index: int, call: ToolCallDelta) -> bytes:
        opening = self._opening(index, '"delta":{"tool_calls":[')
        function = {"arguments": call.arguments}
        document: dict[str, Any] = {"index": call.index, "function": function}
        if call.name is not None:
            document = {"index": call.index, "id": call.id, "type": "function"}
            document["function"] = {"name": call.name, **function}
        return f"{opening}{_encode(document)}]}}{self._closing(None, None)}".encode()

    def end(self, index: int, finish_reason: FinishReason) -> bytes:
        opening = self._opening(index, '"delta":{}')
        return f"{opening}{self._closing(finish_reason, None)}".encode()


class CompletionStream(_Stream):
    """Chunks of one completion. The last `text` of a choice carries its finish reason."""

    def __init__(self, head: AnswerHead, *, includes_usage: bool = False) -> None:
        super().__init__(head, "text_completion", includes_usage=includes_usage)

    def text(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        opening = self._opening(index, '"text":')
        return f"{opening}{_encode(text)}{self._closing(finish_reason, logprobs)}".encode()
