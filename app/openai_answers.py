"""A generation as an OpenAI answer: whole, or as a stream of server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from app.choice_text import Piece
from app.openai_errors import ApiError, internal, sse_error_event
from app.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from app.openai_responses import chat_choice, chat_completion, text_choice, text_completion
from app.openai_stream import DONE, ChatStream, CompletionStream
from app.running_answer import RunningAnswer
from app.spoken_answer import SpokenAnswer, gathered
from app.token_bytes import TokenBytes

logger = logging.getLogger("ray.serve")


class OpenAIAnswer:
    """One request's answer, in the shape of its endpoint."""

    def __init__(self, answer: RunningAnswer, table: TokenBytes) -> None:
        self._answer = answer
        self._table = table
        self._open: AsyncGenerator[Piece] | None = None

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError."""
        pieces = await self._answer.whole()
        if self._answer.is_chat:
            answer = chat_completion(self._answer.head, [self._chat_choice(p) for p in pieces], self._answer.usage())
            return {**answer, **self._prompt_logprobs(pieces[0])}
        choices = [
            {**text_choice(p.index, p.text, p.finish_reason or "stop", self._logprobs(p)), **self._prompt_logprobs(p)}
            for p in pieces
        ]
        return text_completion(self._answer.head, choices, self._answer.usage())

    async def stream(self) -> AsyncGenerator[bytes]:
        """Waits for the first piece, so that what fails before it is an HTTP status (raises ApiError); then the
        events. Whatever comes of it, `close` must be called at the end."""
        self._open = pieces = self._answer.pieces()
        first = await anext(pieces)
        return self._events(first, pieces)

    async def close(self) -> None:
        """Frees what a stream holds, one that was never read included. A second call does nothing."""
        if self._open is not None:
            await self._open.aclose()

    async def _events(self, first: Piece, pieces: AsyncGenerator[Piece]) -> AsyncGenerator[bytes]:
        render, usage = self._renderer()
        try:
            async with aclosing(pieces):
                yield b"".join(render(first))
                async for piece in pieces:
                    event = b"".join(render(piece))
                    if event:
                        yield event
        except ApiError as error:
            yield sse_error_event(error)
            return
        except Exception:
            logger.exception("a stream failed")
            yield sse_error_event(internal())
            return
        if self._answer.request.includes_usage:
            yield usage(self._answer.usage())
        yield DONE

    def _renderer(self) -> tuple[Callable[[Piece], list[bytes]], Callable[[dict[str, Any]], bytes]]:
        """What turns a piece, and the usage, into events."""
        if not self._answer.is_chat:
            completion = CompletionStream(self._answer.head, includes_usage=self._answer.request.includes_usage)

            def render_completion(piece: Piece) -> list[bytes]:
                logprobs = self._logprobs(piece)
                if not (piece.text or logprobs or piece.finish_reason):
                    return []
                return [completion.text(piece.index, piece.text, logprobs, piece.finish_reason)]

            return render_completion, completion.usage
        chat = ChatStream(self._answer.head, includes_usage=self._answer.request.includes_usage)
        spoken: dict[int, SpokenAnswer] = {}

        def render_chat(piece: Piece) -> list[bytes]:
            events = []
            if piece.index not in spoken:
                spoken[piece.index] = SpokenAnswer(self._answer.tools)
                events.append(chat.begin(piece.index))
            logprobs = self._logprobs(piece)
            text, calls = spoken[piece.index].take(piece)
            if text or logprobs:
                events.append(chat.text(piece.index, text, logprobs))
            events += [chat.tool_call(piece.index, call) for call in calls]
            if piece.finish_reason is not None:
                events.append(chat.end(piece.index, spoken[piece.index].reason(piece.finish_reason)))
            return events

        return render_chat, chat.usage

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
