"""Whether a request may start now, waits, or is refused, from the state of both pools.

A prompt is not sent to prefill before a decode worker has room for its KV. Without that rule a full decode pool fills
the prefill workers with finished prompts that nobody fetches, and time to first token grows without bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from migrate.dispatch import choose_decode
from migrate.view import DispatchRequest, NoWorkerError, WorkerView, large_enough
from migrate.waiting_line import Turn, WaitingLine

SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0


class Verdict(Enum):
    ADMIT = "admit"
    QUEUE = "queue"
    REJECT = "reject"


class RejectReason(Enum):
    NEVER_FITS = "never_fits"
    """More KV blocks than the largest worker owns: the request is at fault, and trying again does not help."""
    QUEUE_FULL = "queue_full"
    """Overload: try again after `retry_after_s`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a request.

    `decode_worker_id` goes with ADMIT, `reason` and `detail` (for the client) with REJECT, `retry_after_s` with
    QUEUE_FULL.
    """

    verdict: Verdict
    decode_worker_id: str | None = None
    reason: RejectReason | None = None
    detail: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolState:
    """Both pools as one ingress sees them at one moment. In monolithic mode both are the same workers."""

    prefill: Sequence[WorkerView]
    decode: Sequence[WorkerView]
    inflight_requests: int
    """Requests of this ingress that were admitted and have not ended."""
    completions_per_s: float = 0.0
    """Requests of this ingress that ended per second of late; 0 when nothing was measured."""
    turn: int = 0
    """Passed on to `choose_decode`."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Limits of one ingress.

    A request has room when its decode blocks (prompt and one more), added to the live and reserved ones, are at most
    `decode_overcommit` times a decode worker's blocks; or when that worker is empty, so that whatever can be held at
    all gets its turn. More than 1 trades preemptions on decode for a fuller batch; less keeps room to grow.

    Args:
        max_inflight_requests: admitted and not ended.
        max_queued_requests: waiting; 0 refuses what cannot start at once.
        decode_overcommit: share of a decode worker's blocks that may be promised.

    Raises:
        ValueError: a limit out of its range.
    """

    max_inflight_requests: int
    max_queued_requests: int
    decode_overcommit: float = 1.0

    def __post_init__(self) -> None:
        if self.max_inflight_requests < 1:
            raise ValueError(f"max_inflight_requests is {self.max_inflight_requests}; it must be 1 or more")
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests is {self.max_queued_requests}; it must be 0 or more")
        if not (math.isfinite(self.decode_overcommit) and self.decode_overcommit > 0):
            raise ValueError(f"decode_overcommit is {self.decode_overcommit}; it must be finite and above 0")

    def decide(
        self,
        request: DispatchRequest,
        pools: PoolState,
        *,
        queued_requests: int = 0,
        queued_tokens: int = 0,
        ahead: int | None = None,
        begun: bool = False,
    ) -> Decision:
        """Decide on a request that has just come, while `queued_requests` with `queued_tokens` uncached tokens in all
        wait, and `ahead` of them go before it (None: all).

        While anything waits before it, nothing starts. `begun`: it belongs to what was admitted before (a further
        choice of a prompt, or a request whose worker was lost), so that it is too late to refuse it for an overload:
        its client may have half of an answer.
        """
        refusal = self.never_fits(request, pools)
        if refusal is not None:
            return refusal
        if (queued_requests if ahead is None else ahead) == 0:
            decode_worker_id = self.decode_worker_with_room(request, pools)
            if decode_worker_id is not None:
                return Decision(Verdict.ADMIT, decode_worker_id)
        if begun or queued_requests < self.max_queued_requests:
            return Decision(Verdict.QUEUE)
        return Decision(
            Verdict.REJECT,
            reason=RejectReason.QUEUE_FULL,
            detail=f"{pools.inflight_requests} requests are in flight and {queued_requests} wait, of at most "
            f"{self.max_inflight_requests} and {self.max_queued_requests}",
            retry_after_s=retry_after_s(pools, queued_requests, queued_tokens + request.uncached_tokens),
        )

    def never_fits(self, request: DispatchRequest, pools: PoolState) -> Decision | None:
        """Return the refusal of a request that no worker now alive can ever hold; None if one can, or a pool is empty.

        An empty pool is one that restarts: requests wait for it.
        """
        for role, views in (("prefill", pools.prefill), ("decode", pools.decode)):
            if views:
                try:
                    large_enough(request, views, role)
                except NoWorkerError as error:
                    return Decision(Verdict.REJECT, reason=RejectReason.NEVER_FITS, detail=str(error))
        return None

    def decode_worker_with_room(self, request: DispatchRequest, pools: PoolState) -> str | None:
        """Return the decode worker that would take `request` now; None while it has to wait.

        It waits while a pool has no worker that can hold it, at `max_inflight_requests`, and without room on decode.
        """
        if pools.inflight_requests >= self.max_inflight_requests:
            return None
        if not any(view.can_ever_hold(request) for view in pools.prefill):
            return None
        roomy = [view for view in pools.decode if view.can_ever_hold(request) and self._has_room(request, view)]
        return choose_decode(request, roomy, turn=pools.turn) if roomy else None

    def _has_room(self, request: DispatchRequest, view: WorkerView) -> bool:
        promised = view.used_blocks + request.decode_blocks
        return view.used_blocks == 0 or promised <= self.decode_overcommit * view.load.total_blocks


def retry_after_s(pools: PoolState, queued_requests: int, queued_tokens: int) -> float:
    """Estimate when a refused request would find room (ours): the later of two ends, within 1 to 60 s.

    One is when the prefill pool has computed all that is pending and queued, at its measured rates (an empty pool: the
    upper bound). The other is when as many requests as wait, and this one, have ended at the measured rate of
    completions, because decode may be what is full. Finite at zero traffic.
    """
    rate = sum(view.load.prefill_tokens_per_s for view in pools.prefill)
    pending_tokens = sum(view.pending_tokens for view in pools.prefill) + queued_tokens
    prefill_s = pending_tokens / rate if rate > 0 else LONGEST_RETRY_S
    queue_s = (queued_requests + 1) / pools.completions_per_s if pools.completions_per_s > 0 else 0.0
    return min(max(prefill_s, queue_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)


@dataclass(frozen=True, slots=True)
class Ready:
    """What left the queue: requests that may start now, each with its decode worker, and requests refused after all."""

    admitted: list[tuple[DispatchRequest, str]] = field(default_factory=list)
    refused: list[tuple[DispatchRequest, Decision]] = field(default_factory=list)


class AdmissionQueue:
    """Requests that wait to be admitted, in the order of their turns (`migrate.waiting_line`). What has begun came
    before what has not, and so it goes first among those of its priority.

    Nothing overtakes the head but what comes with an earlier turn. A large request waits until the pool has drained
    enough for it and cannot be starved by small ones behind it; the price is that these wait too.
    """

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._line: WaitingLine[DispatchRequest] = WaitingLine()
        self._arrivals = 0
        self._queued_tokens = 0

    def offer(self, request: DispatchRequest, pools: PoolState, *, begun: bool = False) -> Decision:
        """Decide on a new request; on QUEUE it is in the queue when this returns. On ADMIT the caller reserves at once.
        `begun`: see `AdmissionPolicy.decide`.

        Raises:
            ValueError: a request of that id waits already.
        """
        if request.request_id in self:
            raise ValueError(f"request {request.request_id!r} waits already; a request id is used once")
        decision = self._policy.decide(
            request,
            pools,
            queued_requests=len(self),
            queued_tokens=self._queued_tokens,
            ahead=self._line.num_before(request.turn_s),
            begun=begun,
        )
        if decision.verdict is Verdict.QUEUE:
            self._line.add(request.request_id, request, Turn(request.turn_s, self._arrivals))
            self._arrivals += 1
            self._queued_tokens += request.uncached_tokens
        return decision

    def cancel(self, request_id: str) -> bool:
        """Take a request out (cancelled, disconnected, out of time). Returns whether it was waiting."""
        request = self._line.remove(request_id)
        if request is None:
            return False
        self._queued_tokens -= request.uncached_tokens
        return True

    def admit_ready(self, pools: PoolState) -> Ready:
        """Take the requests off the head that may start now, each counted before the next one is looked at.

        The caller reserves for each before it builds the next `PoolState`. A request that no worker can hold any more,
        because the only large one has left, is refused rather than left to block the queue for ever. Call this whenever
        a request ends, a report comes or a worker joins or leaves.
        """
        ready = Ready()
        while (request := self._line.first()) is not None:
            refusal = self._policy.never_fits(request, pools)
            decode_worker_id = None if refusal else self._policy.decode_worker_with_room(request, pools)
            if refusal is not None:
                ready.refused.append((request, refusal))
            elif decode_worker_id is not None:
                ready.admitted.append((request, decode_worker_id))
                pools = _with_promise(pools, request, decode_worker_id)
            else:
                break
            self.cancel(request.request_id)
        return ready

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._line


def _with_promise(pools: PoolState, request: DispatchRequest, decode_worker_id: str) -> PoolState:
    decode = [
        replace(
            view,
            reserved_decode_blocks=view.reserved_decode_blocks + request.decode_blocks,
            reserved_decode_requests=view.reserved_decode_requests + 1,
        )
        if view.worker_id == decode_worker_id
        else view
        for view in pools.decode
    ]
    return replace(pools, decode=decode, inflight_requests=pools.inflight_requests + 1)
