"""An ingress replica's line to one worker: an open `collect` call, and the requests that wait for its tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ray.exceptions import RayError

from actors.addresses import address_of
from actors.engine.request import TokenEvent
from actors.messages import HandOver, Submission, WorkerMessage
from app.progress import Progress
from migrate.load import WorkerLoad
from migrate.roster import Member

COLLECT_TIMEOUT_S = 2.0
"""How long one call stays open when there is nothing to say; loads are reported at least this often."""

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
        self._handle = address_of(member).actor
        self._owner = owner
        self._on_load = on_load
        self._on_lost = on_lost
        self._open: dict[str, asyncio.Queue[Delivery]] = {}
        self._lost: WorkerLostError | None = None
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
        if self._lost is not None:
            raise self._lost
        request_id = submission.request.request_id
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._open[request_id] = queue
        try:
            await self._handle.submit.remote([submission])
        except RayError as error:
            self.close(request_id)
            raise self._mark_lost(error) from error
        except BaseException:
            # Cancelled while the call was under way: it may have arrived.
            self.abort(request_id)
            raise
        return queue

    def close(self, request_id: str) -> None:
        """No more events of this request are wanted; it has ended."""
        self._open.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Frees the request on the worker. Does not wait: the caller may be in the middle of being cancelled."""
        self.close(request_id)
        if self._lost is None:
            self._handle.abort.remote([request_id])

    def stop(self) -> None:
        """Ends the line: the worker left the roster, or the ingress shuts down."""
        self._polling.cancel()
        self._fail_open(self._lost or WorkerLostError(f"worker {self.worker_id} left"))

    async def _poll(self) -> None:
        while True:
            try:
                message: WorkerMessage = await self._handle.collect.remote(self._owner, COLLECT_TIMEOUT_S)
            except RayError as error:
                self._mark_lost(error)
                return
            deliveries: list[TokenEvent | HandOver] = [*message.events, *message.hand_overs]
            for delivery in deliveries:
                queue = self._open.get(delivery.request_id)
                if queue is not None:
                    queue.put_nowait(delivery)
            if message.load is not None:
                self.load = message.load
                self.progress.update(message.load, asyncio.get_running_loop().time())
                self._on_load(message.load)

    def _mark_lost(self, error: Exception) -> WorkerLostError:
        if self._lost is None:
            self._lost = WorkerLostError(f"worker {self.worker_id} was lost: {type(error).__name__}")
            logger.warning("%s; %d of its requests are sent elsewhere", self._lost, self.num_open)
            self._fail_open(self._lost)
            self._on_lost(self)
        return self._lost

    def _fail_open(self, reason: WorkerLostError) -> None:
        for queue in self._open.values():
            queue.put_nowait(reason)
        self._open.clear()
