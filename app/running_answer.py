"""One request's answer while it is made, whatever form it leaves in: its pieces, a time limit, and errors to answer
with."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from app.chat_protocol import ChatCompletionRequest
from app.choice_text import Piece
from app.dispatcher import RefusedError
from app.generation import Generation
from app.openai_errors import ApiError, internal, invalid_request, overloaded, timeout, unavailable
from app.openai_protocol import GenerationRequest
from app.openai_responses import AnswerHead
from app.request_metrics import Ending
from app.sequence_flow import GrammarFailedError, RequestFailedError
from migrate.admission import RejectReason
from migrate.view import NoWorkerError

logger = logging.getLogger("ray.serve")


class RunningAnswer:
    """Read once, by `pieces` or `whole`. `head` is what all parts of the answer repeat.

    Args:
        hold: what the request holds while it runs; raises ApiError where it may not.
    """

    def __init__(
        self,
        request: GenerationRequest,
        generation: Generation,
        model: str,
        timeout_s: float,
        hold: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.request = request
        self.is_chat = isinstance(request, ChatCompletionRequest)
        self.wants_logprobs = request.top_logprob_count is not None
        self.head = AnswerHead(f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}", int(time.time()), model)
        self.tools = generation.tools
        self._generation = generation
        self._timeout_s = timeout_s
        self._hold = hold

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`, as far as the answer has come."""
        return self._generation.usage()

    async def whole(self) -> list[Piece]:
        """All of each choice as one piece, by index. Raises ApiError."""
        merged: dict[int, Piece] = {}
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                so_far = merged.setdefault(piece.index, Piece(piece.index))
                so_far.text += piece.text
                so_far.token_ids += piece.token_ids
                so_far.logprobs += piece.logprobs
                so_far.text_offsets += piece.text_offsets
                so_far.finish_reason = piece.finish_reason
                so_far.prompt_logprobs = so_far.prompt_logprobs or piece.prompt_logprobs
        return [piece for _, piece in sorted(merged.items())]

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The pieces as they come, until the time limit. Raises ApiError for every way to fail. Leaving it early frees
        what the request holds anywhere."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        ending: Ending = "abort"  # of what has not ended by itself
        try:
            with self._hold():
                async with aclosing(self._generation.pieces()) as pieces:
                    while True:
                        async with asyncio.timeout_at(deadline):
                            piece = await anext(pieces, None)
                        if piece is None:
                            return
                        yield piece
        except TimeoutError:
            ending = "timeout"
            raise timeout(self._timeout_s) from None
        except (RefusedError, RequestFailedError, NoWorkerError) as error:
            is_ours = isinstance(error, RequestFailedError) and not isinstance(error, GrammarFailedError)
            ending = "error" if is_ours else "refused"
            raise _api_error(error) from error
        except ApiError:
            ending = "refused"
            raise
        except Exception:
            ending = "error"
            raise
        finally:
            self._generation.give_up(ending)


def _api_error(error: RefusedError | RequestFailedError | NoWorkerError) -> ApiError:
    if isinstance(error, NoWorkerError):
        return unavailable(str(error))
    if isinstance(error, RefusedError):
        if error.decision.reason is RejectReason.NEVER_FITS:
            return invalid_request(error.decision.detail, code="context_length_exceeded")
        return overloaded(error.decision.detail, retry_after_s=error.decision.retry_after_s or 1.0)
    if isinstance(error, GrammarFailedError):
        message = f"What the answer is to keep to cannot be used: {error}. Make it simpler."
        return invalid_request(message, code="invalid_grammar")
    logger.error("a request failed: %s", error)
    return internal()
