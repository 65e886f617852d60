"""A generation as OpenAI's chats and completions have it."""

from __future__ import annotations

from typing import Any

from app.choice_text import Piece
from app.event_answer import EventAnswer
from app.openai_errors import ApiError, sse_error_event
from app.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from app.openai_responses import chat_choice, chat_completion, text_choice, text_completion
from app.openai_stream import DONE, ChatStream, CompletionStream
from app.running_answer import RunningAnswer
from app.spoken_answer import SpokenAnswer, gathered
from app.token_bytes import TokenBytes


class OpenAIAnswer(EventAnswer):
    """A chat's or a completion's answer."""

    def __init__(self, answer: RunningAnswer, table: TokenBytes) -> None:
        super().__init__(answer)
        self._table = table
        make = ChatStream if answer.is_chat else CompletionStream
        self._stream: ChatStream | CompletionStream = make(answer.head, includes_usage=answer.request.includes_usage)
        self._spoken: dict[int, SpokenAnswer] = {}

    async def whole(self) -> dict[str, Any]:
        pieces = await self._answer.whole()
        if self._answer.is_chat:
            answer = chat_completion(self._answer.head, [self._chat_choice(p) for p in pieces], self._answer.usage())
            return {**answer, **self._prompt_logprobs(pieces[0])}
        choices = [
            {**text_choice(p.index, p.text, p.finish_reason or "stop", self._logprobs(p)), **self._prompt_logprobs(p)}
            for p in pieces
        ]
        return text_completion(self._answer.head, choices, self._answer.usage())

    def _opening(self) -> bytes:
        return b""

    def _event(self, piece: Piece) -> bytes:
        logprobs = self._logprobs(piece)
        if isinstance(self._stream, CompletionStream):
            if not (piece.text or logprobs or piece.finish_reason):
                return b""
            return self._stream.text(piece.index, piece.text, logprobs, piece.finish_reason)
        chat, events = self._stream, []
        if piece.index not in self._spoken:
            self._spoken[piece.index] = SpokenAnswer(self._answer.tools)
            events.append(chat.begin(piece.index))
        text, calls = self._spoken[piece.index].take(piece)
        if text or logprobs:
            events.append(chat.text(piece.index, text, logprobs))
        events += [chat.tool_call(piece.index, call) for call in calls]
        if piece.finish_reason is not None:
            events.append(chat.end(piece.index, self._spoken[piece.index].reason(piece.finish_reason)))
        return b"".join(events)

    def _failure(self, error: ApiError) -> bytes:
        return sse_error_event(error)

    def _closing(self) -> bytes:
        usage = self._stream.usage(self._answer.usage()) if self._answer.request.includes_usage else b""
        return usage + DONE

    def _chat_choice(self, piece: Piece) -> dict[str, Any]:
        spoken = SpokenAnswer(self._answer.tools)
        text, calls = spoken.take(piece)
        reason = spoken.reason(piece.finish_reason or "stop")
        return chat_choice(piece.index, text, reason, self._logprobs(piece), gathered(calls))

    def _prompt_logprobs(self, piece: Piece) -> dict[str, Any]:
        """vLLM has them in a chat's answer once, and in a completion's with each choice."""
        if self._answer.request.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(piece.prompt_logprobs or (), self._table)}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._answer.wants_logprobs or not piece.token_ids:
            return None
        if self._answer.is_chat:
            return chat_logprobs([position for position in piece.logprobs if position is not None], self._table)
        return completion_logprobs(piece.token_ids, piece.logprobs, piece.text_offsets, self._table)
