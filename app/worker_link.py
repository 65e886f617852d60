"""An ingress replica's line to one worker: an open question for news, and the requests that wait for its tokens.

The question is asked over a socket (`actors.direct_line`), or through Ray where a socket cannot be had. Everything else
goes through Ray: once a request, it does not cost much.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from ray.exceptions import RayError, RayTaskError

from actors.addresses import address_of
from actors.direct_line import DirectLine
from actors.engine.request import FINISH_ERROR, TokenEvent
from actors.messages import HandOver, Submission, WorkerMessage
from app.progress import Progress
from migrate.load import WorkerLoad
from migrate.roster import Member

COLLECT_TIMEOUT_S = 2.0
"""How long one question stays open when there is nothing to say; loads are reported at least this often."""

logger = logging.getLogger("ray.serve")


class WorkerLostError(Exception):
    """The worker died or cannot be reached. What it computed is gone; the request can be sent elsewhere."""


Delivery = TokenEvent | HandOver | WorkerLostError


class WorkerLink:
    """Sends requests to one worker and hands its messages to whoever waits for them.

    A message for a request that is not open (any more) is dropped: a cancelled request's last tokens, or those of an
    attempt that was given up.
    """

    def __init__(
        self,
        member: Member,
        owner: str,
        on_load: Callable[[WorkerLoad], None],
        on_lost: Callable[[WorkerLink], None],
    ) -> None:
        self.member = member
        self.load: WorkerLoad | None = None
        self.progress = Progress(asyncio.get_running_loop().time())
        address = address_of(member)
        self._handle = address.actor
        self._line_address = address.facts.line
        # An owner of its own for each line: an earlier line to the same worker may have left a question open there,
        # which would be given the messages meant for this one.
        self._owner = f"{owner}/{secrets.token_hex(4)}"
        self._session: int | None = None
        self._on_load = on_load
        self._on_lost = on_lost
        self._open: dict[str, asyncio.Queue[Delivery]] = {}
        self._ended: WorkerLostError | None = None
        # Calls made while a client's request is served count as that request's own to Ray, which cancels them together
        # with it; these must arrive whatever becomes of the client.
        self._context = contextvars.copy_context()
        self._polling = asyncio.create_task(self._poll())

    @property
    def worker_id(self) -> str:
        """The worker's id in the roster."""
        return self.member.worker_id

    @property
    def num_open(self) -> int:
        """Requests of this ingress that the worker has."""
        return len(self._open)

    async def submit(self, submission: Submission) -> asyncio.Queue[Delivery]:
        """Sends a request; its events come through the returned queue until `close`. Raises WorkerLostError."""
        if self._ended is not None:
            raise self._ended
        request = submission.request
        submission = replace(submission, request=replace(request, owner=self._owner))
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._open[request.request_id] = queue
        try:
            await self._context.run(self._handle.submit.remote, [submission])
        except RayTaskError as error:
            # The worker answered: it is this request that it could not take.
            queue.put_nowait(TokenEvent(request.request_id, None, FINISH_ERROR, error=str(error.cause)))
        except RayError as error:
            self.close(request.request_id)
            raise self._lose(error) from error
        except BaseException:
            # Cancelled while the call was under way: it may have arrived.
            self.abort(request.request_id)
            raise
        return queue

    def close(self, request_id: str) -> None:
        """No more events of this request are wanted; it has ended."""
        self._open.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Frees the request on the worker, if it is there. Does not wait: the caller may be in the middle of being
        cancelled. A line that has ended tries too, since its worker may be alive."""
        self.close(request_id)
        self._context.run(self._handle.abort.remote, [request_id])

    def stop(self) -> None:
        """Ends the line: the worker left the roster, or the ingress shuts down."""
        self._end(WorkerLostError(f"worker {self.worker_id} left"))

    async def _poll(self) -> None:
        try:
            line = await self._connect()
            if line is None:
                while True:
                    self._take(await self._handle.collect.remote(self._owner, COLLECT_TIMEOUT_S))
            try:
                while True:
                    self._take(await line.collect(COLLECT_TIMEOUT_S))
            finally:
                line.close()
        except (RayError, OSError) as error:
            self._lose(error)
        except Exception as error:  # a defect of ours; a line that nobody listens to must not look alive
            logger.exception("the line to worker %s broke", self.worker_id)
            self._lose(error)

    async def _connect(self) -> DirectLine | None:
        """None when there is no way but Ray's. That one also says whether the worker is alive at all."""
        if self._line_address is None:
            return None
        try:
            return await DirectLine.connect(self._line_address, self._owner)
        except OSError as error:
            logger.warning(
                "no line to worker %s at %s:%d (%s: %s): its tokens go through Ray, which costs more",
                self.worker_id,
                self._line_address.host,
                self._line_address.port,
                type(error).__name__,
                error,
            )
            return None

    def _take(self, message: WorkerMessage) -> None:
        if self._session not in (None, message.session):
            logger.warning(
                "worker %s freed this ingress's %d requests: they are sent again", self.worker_id, self.num_open
            )
            self._fail_open(WorkerLostError(f"worker {self.worker_id} had freed the request"))
        self._session = message.session
        deliveries: list[TokenEvent | HandOver] = [*message.events, *message.hand_overs]
        for delivery in deliveries:
            queue = self._open.get(delivery.request_id)
            if queue is not None:
                queue.put_nowait(delivery)
        if message.load is not None:
            self.load = message.load
            has_requests = bool(self._open)
            self.progress.update(message.load, asyncio.get_running_loop().time(), has_requests=has_requests)
            self._on_load(message.load)

    def _lose(self, error: Exception) -> WorkerLostError:
        """The worker does not answer, as a call to it said."""
        if self._ended is None:
            reason = WorkerLostError(f"worker {self.worker_id} was lost: {type(error).__name__}")
            logger.warning("%s; %d of its requests are sent elsewhere", reason, self.num_open)
            self._end(reason)
            self._on_lost(self)
            return reason
        return self._ended

    def _end(self, reason: WorkerLostError) -> None:
        if self._ended is None:
            self._ended = reason
        self._polling.cancel()
        self._fail_open(reason)

    def _fail_open(self, reason: WorkerLostError) -> None:
        for queue in self._open.values():
            queue.put_nowait(reason)
        self._open.clear()
