"""One sequence's way through the workers: admission, prefill, hand-over, decode, and what happens when one is lost.

The ingress owns the request from beginning to end, so there is one place that knows where it is, one that frees it, and
one that sends it elsewhere. A request is resumed from its tokens alone: sampling has no other state (decision D5).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from actors.engine.request import FINISH_ERROR, EngineRequest, TokenEvent
from actors.messages import HandOver, Submission
from app.dispatcher import Assignment, Dispatcher
from app.sequence_times import SequenceTimes
from app.worker_link import WorkerLink, WorkerLostError
from migrate.view import DispatchRequest

MAX_ATTEMPTS = 3
"""A request that lost so many workers is not sent to another: it may be what kills them."""

logger = logging.getLogger("ray.serve")


class RequestFailedError(Exception):
    """A worker ended the request with an error, or too many workers were lost under it."""


class GrammarFailedError(RequestFailedError):
    """A worker could not use the request's grammar, or not to the answer's end."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What dispatch needs to know of a request beside its tokens."""

    block_tokens: int
    block_keys: tuple[bytes, ...]
    """Of the prompt's full blocks; none when the request computes its whole prompt anyway."""
    cached_tokens: Callable[[tuple[bytes, ...]], Awaitable[int]]
    """Asks the global store how many tokens of a prefix it has; 0 when it cannot be asked."""
    disaggregated: bool
    """Whether prefill and decode are different workers, so that there is a hand-over."""


class SequenceFlow:
    """Runs one sequence. Iterate over `events` once; leaving the iteration early frees the sequence everywhere."""

    def __init__(
        self,
        request: EngineRequest,
        plan: SequencePlan,
        dispatcher: Dispatcher,
        admitted: asyncio.Event | None = None,
        times: SequenceTimes | None = None,
    ) -> None:
        """`admitted` is shared by the sequences of one API request and set once the first of them was admitted. From
        then on none of them, and no further attempt, is refused for an overload. `times`: is told when this one was
        admitted, and when its decode worker had begun."""
        self._admitted = asyncio.Event() if admitted is None else admitted
        self._request = request
        self._plan = plan
        self._dispatcher = dispatcher
        self._outputs = list(request.output_token_ids)
        self._times = SequenceTimes() if times is None else times

    async def events(self) -> AsyncGenerator[TokenEvent]:
        """The sequence's tokens, in order and each once, up to the one with a finish reason.

        Raises RefusedError (admission), RequestFailedError, or NoWorkerError.
        """
        for attempt in range(MAX_ATTEMPTS):
            request = self._resumed(f"{self._request.request_id}.{attempt}", self._outputs)
            dispatch_request = await self._dispatch_request(request)
            assignment = await self._dispatcher.admit(dispatch_request, begun=self._admitted.is_set())
            self._admitted.set()
            self._times.admitted()
            try:
                async with aclosing(self._attempt(request, assignment)) as events:
                    async for event in events:
                        if event.finish_reason == FINISH_ERROR:
                            failure = GrammarFailedError if event.blames_grammar else RequestFailedError
                            raise failure(event.error or "the worker gave no reason")
                        if event.token_id is not None:
                            self._outputs.append(event.token_id)
                        yield event
                        if event.finish_reason is not None:
                            return
            except WorkerLostError as error:
                logger.warning("request %s: %s, attempt %d", self._request.request_id, error, attempt + 1)
            finally:
                self._dispatcher.release(request.request_id)
        raise RequestFailedError(f"{MAX_ATTEMPTS} workers were lost while they had this request; it is not tried again")

    def _resumed(self, request_id: str, output_token_ids: Sequence[int]) -> EngineRequest:
        """The request after the tokens so far. What belongs to the first token is not asked for again: a worker that
        is to report on the prompt computes all of it."""
        sampling = self._request.sampling
        if output_token_ids:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self._request, request_id=request_id, sampling=sampling, output_token_ids=tuple(output_token_ids)
        )

    async def _dispatch_request(self, request: EngineRequest) -> DispatchRequest:
        cached = await self._plan.cached_tokens(self._plan.block_keys)
        prompt_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        block_tokens = self._plan.block_tokens
        longest = len(request.prompt_token_ids) + request.sampling.max_tokens
        return DispatchRequest(
            request_id=request.request_id,
            uncached_tokens=max(1, prompt_tokens - cached),
            prompt_tokens=prompt_tokens,
            num_blocks=-(-prompt_tokens // block_tokens),
            block_keys=self._plan.block_keys,
            max_blocks=-(-longest // block_tokens),
            turn_s=self._times.arrived_s + request.priority_s,
        )

    async def _attempt(self, request: EngineRequest, assignment: Assignment) -> AsyncGenerator[TokenEvent]:
        if not self._plan.disaggregated:
            async with aclosing(self._run(assignment.prefill, Submission(request))) as deliveries:
                async for delivery in deliveries:
                    if isinstance(delivery, TokenEvent):
                        self._dispatcher.first_token(request.request_id)
                        self._dispatcher.decode_started(request.request_id)
                        yield delivery
            return
        prefill, first, hand_over = Submission(replace(request, hand_over=True)), None, None
        async with aclosing(self._run(assignment.prefill, prefill)) as deliveries:
            async for delivery in deliveries:
                if isinstance(delivery, TokenEvent):
                    self._dispatcher.first_token(request.request_id)
                    first = delivery.token_id
                    yield delivery
                else:
                    hand_over = delivery
        if first is None or hand_over is None:
            return
        decode = Submission(self._resumed(request.request_id, [*request.output_token_ids, first]), hand_over)
        is_taken_over = False
        try:
            async with aclosing(self._run(assignment.decode, decode)) as deliveries:
                async for delivery in deliveries:
                    is_taken_over = True
                    if isinstance(delivery, TokenEvent):
                        self._dispatcher.decode_started(request.request_id)
                        self._times.taken_over()
                        yield delivery
        finally:
            if not is_taken_over:
                # What was handed over waits for a reader, and only the prefill worker knows how to free it.
                assignment.prefill.abort(request.request_id)

    @staticmethod
    async def _run(link: WorkerLink, submission: Submission) -> AsyncGenerator[TokenEvent | HandOver]:
        """One worker's part: its deliveries up to the last one, a finish or the hand-over. Left early, it is
        aborted."""
        queue = await link.submit(submission)
        ended = False
        try:
            while not ended:
                delivery = await queue.get()
                if isinstance(delivery, WorkerLostError):
                    raise delivery
                ended = isinstance(delivery, HandOver) or delivery.finish_reason is not None
                yield delivery
        finally:
            request_id = submission.request.request_id
            link.close(request_id) if ended else link.abort(request_id)
