"""A generation as an OpenAI answer: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from app.chat_protocol import ChatCompletionRequest
from app.choice_text import Piece
from app.dispatcher import RefusedError
from app.generation import Generation
from app.openai_errors import ApiError, internal, invalid_request, overloaded, sse_error_event, timeout, unavailable
from app.openai_logprobs import chat_logprobs, completion_logprobs
from app.openai_protocol import GenerationRequest
from app.openai_responses import AnswerHead, chat_choice, chat_completion, text_choice, text_completion
from app.openai_stream import DONE, ChatStream, CompletionStream
from app.sequence_flow import RequestFailedError
from app.token_bytes import TokenBytes
from migrate.admission import RejectReason
from migrate.view import NoWorkerError

logger = logging.getLogger("ray.serve")


class Answer:
    """One request's answer, in the shape of its endpoint."""

    def __init__(
        self, request: GenerationRequest, generation: Generation, model: str, table: TokenBytes, timeout_s: float
    ) -> None:
        self._request = request
        self._generation = generation
        self._table = table
        self._timeout_s = timeout_s
        self._is_chat = isinstance(request, ChatCompletionRequest)
        self._open: AsyncGenerator[Piece] | None = None
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError."""
        merged: dict[int, Piece] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                so_far = merged.setdefault(piece.index, Piece(piece.index))
                so_far.text += piece.text
                so_far.token_ids += piece.token_ids
                so_far.logprobs += piece.logprobs
                so_far.text_offsets += piece.text_offsets
                so_far.finish_reason = piece.finish_reason
        choices = []
        for index, piece in sorted(merged.items()):
            make = chat_choice if self._is_chat else text_choice
            choices.append(make(index, piece.text, piece.finish_reason or "stop", self._logprobs(piece)))
        answer = chat_completion if self._is_chat else text_completion
        return answer(self._head, choices, self._generation.usage())

    async def stream(self) -> AsyncGenerator[bytes]:
        """Waits for the first piece, so that what fails before it is an HTTP status (raises ApiError); then the
        events. Whatever comes of it, `close` must be called at the end."""
        self._open = pieces = self._pieces()
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
        if self._request.includes_usage:
            yield usage(self._generation.usage())
        yield DONE

    def _renderer(self) -> tuple[Callable[[Piece], list[bytes]], Callable[[dict[str, Any]], bytes]]:
        """What turns a piece, and the usage, into events."""
        if not self._is_chat:
            completion = CompletionStream(self._head, includes_usage=self._request.includes_usage)

            def render_completion(piece: Piece) -> list[bytes]:
                logprobs = self._logprobs(piece)
                if not (piece.text or logprobs or piece.finish_reason):
                    return []
                return [completion.text(piece.index, piece.text, logprobs, piece.finish_reason)]

            return render_completion, completion.usage
        chat = ChatStream(self._head, includes_usage=self._request.includes_usage)
        begun: set[int] = set()

        def render_chat(piece: Piece) -> list[bytes]:
            events = []
            if piece.index not in begun:
                begun.add(piece.index)
                events.append(chat.begin(piece.index))
            logprobs = self._logprobs(piece)
            if piece.text or logprobs:
                events.append(chat.text(piece.index, piece.text, logprobs))
            if piece.finish_reason is not None:
                events.append(chat.end(piece.index, piece.finish_reason))
            return events

        return render_chat, chat.usage

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._request.top_logprob_count is None or not piece.token_ids:
            return None
        if self._is_chat:
            return chat_logprobs([position for position in piece.logprobs if position is not None], self._table)
        return completion_logprobs(piece.token_ids, piece.logprobs, piece.text_offsets, self._table)

    async def _pieces(self) -> AsyncGenerator[Piece]:
        """The generation's pieces, with a time limit and every failure as an ApiError."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with aclosing(self._generation.pieces()) as pieces:
                while True:
                    async with asyncio.timeout_at(deadline):
                        piece = await anext(pieces, None)
                    if piece is None:
                        return
                    yield piece
        except TimeoutError:
            raise timeout(self._timeout_s) from None
        except (RefusedError, RequestFailedError, NoWorkerError) as error:
            raise _api_error(error) from error


def _api_error(error: RefusedError | RequestFailedError | NoWorkerError) -> ApiError:
    if isinstance(error, NoWorkerError):
        return unavailable(str(error))
    if isinstance(error, RefusedError):
        if error.decision.reason is RejectReason.NEVER_FITS:
            return invalid_request(error.decision.detail, code="context_length_exceeded")
        return overloaded(error.decision.detail, retry_after_s=error.decision.retry_after_s or 1.0)
    logger.error("a request failed: %s", error)
    return internal()
