"""One ingress replica's view of the workers, and its choice among them.

The decisions are `migrate`'s: admission over both pools, dispatch by load, reservations made at the choice. This class
feeds them with the roster and the workers' reports and carries out what they say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.worker_link import WorkerLink
from migrate.admission import AdmissionPolicy, AdmissionQueue, Decision, PoolState, Verdict
from migrate.dispatch import DispatchPolicy
from migrate.load import Role, WorkerLoad
from migrate.reservations import Reservations
from migrate.roster import Member
from migrate.view import DispatchRequest, NoWorkerError, WorkerView

_RECENT_ENDS = 64

logger = logging.getLogger("ray.serve")


class RefusedError(Exception):
    """Admission refused the request; `decision` says why and when to try again."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.detail)
        self.decision = decision


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where an admitted request goes. In monolithic mode both are the same worker."""

    request_id: str
    prefill: WorkerLink
    decode: WorkerLink


class Dispatcher:
    """Keeps a line to every worker and admits requests. Used from one event loop.

    Args:
        owner: this ingress replica's id, by which workers know whose requests are whose.
        mode: "monolithic", where one worker takes both parts of a request, or another.
        policy: chooses the prefill (or monolithic) worker.
        admission: limits of this ingress replica.
        reservation_ttl_s: after so long a reservation is dropped, whatever became of its request.
        on_suspect: called with a worker that did not answer; its line is closed by then.
    """

    def __init__(
        self,
        owner: str,
        mode: str,
        policy: DispatchPolicy,
        admission: AdmissionPolicy,
        reservation_ttl_s: float,
        on_suspect: Callable[[Member], None],
    ) -> None:
        self._owner = owner
        self._roles: tuple[Role, Role] = ("monolithic", "monolithic") if mode == "monolithic" else ("prefill", "decode")
        self._policy = policy
        self._queue = AdmissionQueue(admission)
        self._reservations = Reservations(reservation_ttl_s)
        self._on_suspect = on_suspect
        self._links: dict[str, WorkerLink] = {}
        self._waiting: dict[str, asyncio.Future[Assignment]] = {}
        self._inflight: set[str] = set()
        self._ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._turn = 0

    @property
    def links(self) -> list[WorkerLink]:
        """Lines to all workers that are alive as far as is known."""
        return list(self._links.values())

    @property
    def num_inflight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._inflight)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._queue)

    def missing_roles(self) -> list[str]:
        """Roles that no worker with a known load plays now: while there are any, nothing can be served."""
        present = {link.member.role for link in self._links.values() if link.load is not None}
        return [role for role in dict.fromkeys(self._roles) if role not in present]

    def update_members(self, members: tuple[Member, ...]) -> None:
        """Opens lines to workers that joined and ends those to workers that left."""
        current = {member.worker_id: member for member in members}
        for worker_id in [id_ for id_ in self._links if id_ not in current]:
            self._links.pop(worker_id).stop()
            self._reservations.worker_gone(worker_id)
        for worker_id, member in current.items():
            if worker_id not in self._links:
                self._links[worker_id] = WorkerLink(member, self._owner, self._on_load, self._on_lost)
        self._pump()

    async def admit(self, request: DispatchRequest, *, begun: bool = False) -> Assignment:
        """Waits for room in both pools and reserves it. The caller ends it with `release`. `begun`: part of what was
        admitted before, so that it waits rather than being refused for an overload.

        Raises RefusedError, or NoWorkerError when the last worker that could take it left while it waited.
        """
        decision = self._queue.offer(request, self._pools(), begun=begun)
        if decision.verdict is Verdict.REJECT:
            raise RefusedError(decision)
        if decision.verdict is Verdict.ADMIT:
            return self._assign(request, decision.decode_worker_id or "")
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        try:
            return await future
        except BaseException:
            # Cancelled, while waiting or just after it was admitted; the next in line may fit where this one did not.
            self._queue.cancel(request.request_id)
            self.release(request.request_id)
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    def first_token(self, request_id: str) -> None:
        """The prefill worker has done its part: its reservation ends."""
        self._reservations.release_prefill(request_id)

    def decode_started(self, request_id: str) -> None:
        """The decode worker reports the request's blocks itself from now on."""
        self._reservations.release_decode(request_id)

    def release(self, request_id: str) -> None:
        """The request ended, well or not."""
        self._reservations.release(request_id)
        if request_id in self._inflight:
            self._inflight.remove(request_id)
            self._ends_s.append(time.monotonic())
        self._pump()

    def expire(self) -> None:
        """Drops reservations that outlived their time; a second net, called now and then."""
        for request_id in self._reservations.expire(time.monotonic()):
            logger.warning("the reservation of request %s expired", request_id)

    def stop(self) -> None:
        """Ends all lines."""
        for link in self._links.values():
            link.stop()
        self._links.clear()

    def _assign(self, request: DispatchRequest, decode_worker_id: str) -> Assignment:
        """Chooses the prefill worker and reserves on both at once: choosing first and reserving later would herd."""
        candidates = self._views(self._roles[0])
        if self._roles[0] == self._roles[1]:
            candidates = [view for view in candidates if view.has_room(request)] or candidates
        prefill_worker_id = self._policy.choose(request, candidates)
        if self._roles[0] == self._roles[1]:
            decode_worker_id = prefill_worker_id
        self._reservations.reserve(
            request.request_id,
            now_s=time.monotonic(),
            prefill_worker=prefill_worker_id,
            prefill_tokens=request.uncached_tokens,
            decode_worker=decode_worker_id,
            decode_blocks=request.decode_blocks,
        )
        self._inflight.add(request.request_id)
        self._turn += 1
        return Assignment(request.request_id, self._links[prefill_worker_id], self._links[decode_worker_id])

    def _pump(self) -> None:
        """Admits what may start now; called whenever a request ended, a load was reported or a worker came or went."""
        if not self._queue:
            return
        ready = self._queue.admit_ready(self._pools())
        for request, decode_worker_id in ready.admitted:
            future = self._waiting[request.request_id]
            if future.cancelled():
                continue  # its client left in this turn of the loop; `admit` is about to tidy up, and pumps again
            try:
                assignment = self._assign(request, decode_worker_id)
            except NoWorkerError as error:
                future.set_exception(error)
                continue
            future.set_result(assignment)
        for request, decision in ready.refused:
            if not self._waiting[request.request_id].cancelled():
                self._waiting[request.request_id].set_exception(RefusedError(decision))

    def _pools(self) -> PoolState:
        rate = 0.0
        if len(self._ends_s) > 1 and self._ends_s[-1] > self._ends_s[0]:
            rate = (len(self._ends_s) - 1) / (time.monotonic() - self._ends_s[0])
        return PoolState(
            prefill=self._views(self._roles[0]),
            decode=self._views(self._roles[1]),
            inflight_requests=len(self._inflight),
            completions_per_s=rate,
            turn=self._turn,
        )

    def _views(self, role: Role) -> list[WorkerView]:
        return [
            self._reservations.view(link.load)
            for link in self._links.values()
            if link.load is not None and link.member.role == role
        ]

    def _on_load(self, _: WorkerLoad) -> None:
        self._pump()

    def _on_lost(self, link: WorkerLink) -> None:
        if self._links.get(link.worker_id) is not link:
            return  # an earlier line to a worker that has another one by now, or has left
        del self._links[link.worker_id]
        self._reservations.worker_gone(link.worker_id)
        self._on_suspect(link.member)
        self._pump()
