"""What one ingress has promised to workers and not yet seen in their reports.

The two halves of a dispatch end at different times:

    reserve ----> first token (from prefill) ----> decode reports the request as its own ----> end
    |-- prefill tokens --|
    |-- decode blocks -------------------------------------|

`release_prefill` and `release_decode` end one half each, `release` (failure, cancel) whatever is left. The decode half
must outlive the first token: between the two messages nobody else would count those blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from migrate.load import WorkerLoad
from migrate.view import WorkerView


@dataclass(slots=True)
class _Held:
    prefill_worker: str | None
    prefill_tokens: int
    decode_worker: str | None
    decode_blocks: int
    deadline_s: float


@dataclass(slots=True)
class _Sums:
    prefill_tokens: int = 0
    prefill_requests: int = 0
    decode_blocks: int = 0
    decode_requests: int = 0


class Reservations:
    """Reservations of one ingress, with their sums by worker. Every release happens once; a second one does nothing.

    Reserving at the choice follows Ray's token tracker for KV-aware routing: choosing first and reserving later herds.
    All times are of one clock of the caller's, in seconds.

    Args:
        ttl_s: a reservation ends by itself after this long. A second net only: set it above the longest time a request
            may take to its first token on the decode side, or load is forgotten that is still there.

    Raises:
        ValueError: `ttl_s` is not finite and above zero.
    """

    def __init__(self, ttl_s: float) -> None:
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"ttl_s is {ttl_s}; it must be finite and above 0")
        self._ttl_s = ttl_s
        self._held: dict[str, _Held] = {}
        self._sums: dict[str, _Sums] = {}

    def reserve(
        self,
        request_id: str,
        *,
        now_s: float,
        prefill_worker: str | None = None,
        prefill_tokens: int = 0,
        decode_worker: str | None = None,
        decode_blocks: int = 0,
    ) -> None:
        """Count `prefill_tokens` against one worker and `decode_blocks` against another (or the same) from now on.

        Either side may be None. A request that is sent again to other workers is released first.

        Raises:
            ValueError: the request holds a reservation already, a count is negative, or a count has no worker.
        """
        if request_id in self._held:
            raise ValueError(f"request {request_id!r} already holds a reservation; release it before reserving again")
        for name, worker, amount in (
            ("prefill_tokens", prefill_worker, prefill_tokens),
            ("decode_blocks", decode_worker, decode_blocks),
        ):
            if amount < 0 or (worker is None and amount > 0):
                raise ValueError(
                    f"{name} is {amount} for worker {worker!r}; it must be 0 or more, and 0 without a worker"
                )
        if prefill_worker is None and decode_worker is None:
            raise ValueError(
                f"request {request_id!r} reserves on no worker; name a prefill worker, a decode worker or both"
            )
        self._held[request_id] = _Held(
            prefill_worker, prefill_tokens, decode_worker, decode_blocks, now_s + self._ttl_s
        )
        if prefill_worker is not None:
            sums = self._sums.setdefault(prefill_worker, _Sums())
            sums.prefill_tokens += prefill_tokens
            sums.prefill_requests += 1
        if decode_worker is not None:
            sums = self._sums.setdefault(decode_worker, _Sums())
            sums.decode_blocks += decode_blocks
            sums.decode_requests += 1

    def release_prefill(self, request_id: str) -> bool:
        """End the prefill half: the first token is there. Returns whether there was one to end."""
        held = self._held.get(request_id)
        if held is None or held.prefill_worker is None:
            return False
        sums = self._sums[held.prefill_worker]
        sums.prefill_tokens -= held.prefill_tokens
        sums.prefill_requests -= 1
        worker, held.prefill_worker = held.prefill_worker, None
        self._drop_if_empty(request_id, held, worker)
        return True

    def release_decode(self, request_id: str) -> bool:
        """End the decode half: the decode worker reports the request itself. Returns whether there was one to end."""
        held = self._held.get(request_id)
        if held is None or held.decode_worker is None:
            return False
        sums = self._sums[held.decode_worker]
        sums.decode_blocks -= held.decode_blocks
        sums.decode_requests -= 1
        worker, held.decode_worker = held.decode_worker, None
        self._drop_if_empty(request_id, held, worker)
        return True

    def release(self, request_id: str) -> bool:
        """End what is left of a reservation: the request failed, was cancelled or is over. Returns whether any was."""
        prefill = self.release_prefill(request_id)
        decode = self.release_decode(request_id)
        return prefill or decode

    def expire(self, now_s: float) -> list[str]:
        """Release every reservation whose time is over; return their request ids, oldest first."""
        expired = []
        # All live equally long, so the oldest is the first to end. A clock that steps back only delays those behind it.
        for request_id, held in self._held.items():
            if held.deadline_s > now_s:
                break
            expired.append(request_id)
        for request_id in expired:
            self.release(request_id)
        return expired

    def worker_gone(self, worker_id: str) -> list[str]:
        """Release all halves held on a worker that left or restarted; return the ids of the requests that had one.

        The other half of such a request stays, until the caller fails the request or sends it elsewhere.
        """
        prefill = [id_ for id_, held in self._held.items() if held.prefill_worker == worker_id]
        decode = [id_ for id_, held in self._held.items() if held.decode_worker == worker_id]
        for request_id in prefill:
            self.release_prefill(request_id)
        for request_id in decode:
            self.release_decode(request_id)
        return list(dict.fromkeys(prefill + decode))

    def view(self, load: WorkerLoad) -> WorkerView:
        """Join a worker's report with what is reserved on it."""
        sums = self._sums.get(load.worker_id, _Sums())
        return WorkerView(
            load,
            reserved_prefill_tokens=sums.prefill_tokens,
            reserved_prefill_requests=sums.prefill_requests,
            reserved_decode_blocks=sums.decode_blocks,
            reserved_decode_requests=sums.decode_requests,
        )

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def _drop_if_empty(self, request_id: str, held: _Held, worker: str) -> None:
        if held.prefill_worker is None and held.decode_worker is None:
            del self._held[request_id]
        sums = self._sums[worker]
        if sums.prefill_requests == 0 and sums.decode_requests == 0:
            del self._sums[worker]
