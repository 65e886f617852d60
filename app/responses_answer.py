"""An answer as OpenAI's responses have it: one message of one text."""

from __future__ import annotations

import json
from typing import Any

from app.choice_text import Piece
from app.event_answer import EventAnswer
from app.openai_errors import ApiError
from app.responses_protocol import ResponsesRequest
from app.running_answer import RunningAnswer

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ResponsesAnswer(EventAnswer):
    """`answer` is that of `request.as_chat()`."""

    def __init__(self, answer: RunningAnswer, request: ResponsesRequest) -> None:
        super().__init__(answer)
        self._request = request
        unique = answer.head.id.rpartition("-")[2]
        self._id, self._item_id = f"resp_{unique}", f"msg_{unique}"
        self._num_events = 0
        self._text: list[str] = []
        self._finish_reason = ""

    async def whole(self) -> dict[str, Any]:
        (piece,) = await self._answer.whole()
        self._take(piece)
        return self._response(self._status)

    def _take(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._finish_reason = piece.finish_reason or ""

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _opening(self) -> bytes:
        response = self._response("in_progress")
        return (
            self._named("response.created", response=response)
            + self._named("response.in_progress", response=response)
            + self._named("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._named("response.content_part.added", **self._place, part=_part(""))
        )

    def _event(self, piece: Piece) -> bytes:
        self._take(piece)
        if not piece.text:
            return b""
        return self._named("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def _failure(self, error: ApiError) -> bytes:
        return self._named("error", code=error.code, message=error.message, param=error.param)

    def _closing(self) -> bytes:
        text, status = "".join(self._text), self._status
        return (
            self._named("response.output_text.done", **self._place, text=text, logprobs=[])
            + self._named("response.content_part.done", **self._place, part=_part(text))
            + self._named("response.output_item.done", output_index=0, item=self._item(status, [_part(text)]))
            + self._named(f"response.{status}", response=self._response(status))
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _named(self, kind: str, **fields: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {_encode(document)}\n\n".encode()

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str) -> dict[str, Any]:
        request, has_ended = self._request, status != "in_progress"
        form = request.text or {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._answer.head.created,
            "model": self._answer.head.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(status, [_part("".join(self._text))])] if has_ended else [],
            "usage": self._usage() if has_ended else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "text": {"format": {"type": form["type"], **form.get("json_schema", {})}},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "metadata": {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,  # writing costs a client nothing here and is not counted
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
