"""An answer over HTTP, in whatever form: whole, or as a stream of server-sent events."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from app.choice_text import Piece
from app.openai_errors import ApiError, internal
from app.running_answer import RunningAnswer

logger = logging.getLogger("ray.serve")


class EventAnswer(ABC):
    """One request's answer. Its form is the subclass's."""

    def __init__(self, answer: RunningAnswer) -> None:
        self._answer = answer
        self._open: AsyncGenerator[Piece] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the client asked for `stream` rather than `whole`."""
        return bool(self._answer.request.stream)

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The answer in one piece. Raises ApiError."""

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
        try:
            async with aclosing(pieces):
                yield self._opening() + self._event(first)
                async for piece in pieces:
                    event = self._event(piece)
                    if event:
                        yield event
        except ApiError as error:
            yield self._failure(error)
            return
        except Exception:
            logger.exception("a stream failed")
            yield self._failure(internal())
            return
        yield self._closing()

    @abstractmethod
    def _opening(self) -> bytes:
        """Events before the first piece."""

    @abstractmethod
    def _event(self, piece: Piece) -> bytes:
        """Events of a piece; none where it shows nothing."""

    @abstractmethod
    def _failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""

    @abstractmethod
    def _closing(self) -> bytes:
        """Events after the last piece of a stream that succeeds."""
